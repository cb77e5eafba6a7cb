/* attention.c – masks, and attention with its gradients, from C. */
#include <stdio.h>
#include <string.h>

#include "bind/c/call.h"
#include "core/arrays/convert.h"
#include "core/attention/terms/terms.h"
#include "core/runtime/sizes.h"

/* --- Masks --- */

/* Terms and operators: their names here and in the core (am_node_row_named), and those of their operands. */
#define KIND(kind, ...) [ATTNMASK_##kind] = {"ATTNMASK_" #kind, __VA_ARGS__}
static const struct {
    const char *name, *row, *operands[AM_MOST_OPERANDS];
} kinds[] = {
    KIND(ALL, "all", {0}),
    KIND(BAND, "band", {"low", "high", "offset"}),
    KIND(DIAGONAL, "diagonal", {"low", "high", "offset", "at"}),
    KIND(CHUNK, "chunk", {"size", "q_shift", "k_shift"}),
    KIND(KEYS, "keys", {"begin", "end"}),
    KIND(EQUAL, "equal", {"q_ids", "k_ids", "exclude_zero"}),
    KIND(SEQUENCES, "sequences", {"cum_seqlens_q", "cum_seqlens_k", "low", "high", "offset"}),
    KIND(DENSE, "dense", {"array", "q_shift", "k_shift"}),
    KIND(TILES, "tiles", {"places", "q_size", "k_size", "bits", "q_shift", "k_shift"}),
    KIND(NEIGHBORHOOD, "neighborhood", {"grid", "q_shift", "k_shift"}),
    KIND(NOT, "not", {0}),
    KIND(AND, "and", {0}),
    KIND(OR, "or", {0}),
    KIND(XOR, "xor", {0}),
};
enum { KINDS = sizeof kinds / sizeof *kinds };

bool am_c_read_mask_struct(am_c_call *c, attnmask_mask *to, const attnmask_mask *from)
{
    static const attnmask_mask all = {.size = sizeof all};
    if (!am_c_read(c, to, from ? from : &all, "mask")) return false;
    if (to->node_count < 0 || to->node_count > AM_LONGEST)
        return am_refuse(&c->request, AM_WRONG_VALUE, NULL, "node_count must be from 0 to 2**56, got %lld",
                         (long long)to->node_count);
    return to->nodes || to->node_count == 0 ||
           am_refuse(&c->request, AM_WRONG_VALUE, NULL, "nodes must be given with node_count %lld, got NULL",
                     (long long)to->node_count);
}

static bool add_node(am_c_call *c, const attnmask_node *given)
{
    am_request *r = &c->request;
    am_operand operands[AM_MOST_OPERANDS] = {{0}};
    const am_node_row *row = am_node_row_named(kinds[given->kind].row);
    const int count = row->operands ? (int)strlen(row->operands) : 0;
    for (int i = 0; i < (int)(sizeof given->operand / sizeof *given->operand); i++) {
        const attnmask_operand *o = &given->operand[i];
        if (i < count && !am_c_operand(c, o, kinds[given->kind].operands[i], &operands[i])) return false;
        if (i >= count && o->given != 0)
            return am_refuse(r, AM_WRONG_VALUE, NULL, "operand[%d] must not be given", i);
    }
    return row->operands ? am_mask_add(r, row, operands) : am_mask_join(r, row->kind);
}

/* Says which node was refused. */
static bool refuse_node(am_request *r, const attnmask_node *node, int64_t index)
{
    am_refusal whole = *r->refusal, *said = r->refusal;
    const char *words = strncmp(said->words, "mask: ", 6) == 0 ? said->words + 6 : said->words;
    snprintf(whole.words, sizeof whole.words, "nodes[%lld], %s: %.400s", (long long)index,
             kinds[node->kind].name, words);
    *said = whole;
    return false;
}

/* Nodes that no operator has taken are joined. */
bool am_c_add_nodes(am_c_call *c, const attnmask_mask *mask)
{
    am_request *r = &c->request;
    for (int64_t i = 0; i < mask->node_count; i++) {
        const attnmask_node *node = &mask->nodes[i];
        if (node->kind < 0 || node->kind >= KINDS)
            return am_refuse(r, AM_WRONG_VALUE, NULL, "nodes[%lld] must have a kind of attnmask_kind, got %d",
                             (long long)i, (int)node->kind);
        if (!add_node(c, node)) return r->refusal && refuse_node(r, node, i);
    }
    while (r->waiting > 1) {
        if (!am_mask_join(r, AM_AND)) return false;
    }
    return true;
}

static bool add_term(am_c_call *c, const char *name, const am_operand *operands)
{
    return am_mask_add(&c->request, am_node_row_named(name), operands) &&
           (c->request.waiting == 1 || am_mask_join(&c->request, AM_AND));
}

/* A mask, and its limits of sequences and distances as operands. */
typedef struct {
    attnmask_mask given;
    am_operand low, high, offset, starts[2];
} limits;

static bool look_at_limits(am_c_call *c, limits *l)
{
    const attnmask_mask *m = &l->given;
    const attnmask_array *const starts[] = {&m->cum_seqlens_q, &m->cum_seqlens_k};
    static const char *const names[] = {"cum_seqlens_q", "cum_seqlens_k"};
    for (int side = 0; side < 2; side++) {
        l->starts[side] = (am_operand){.kind = AM_ARRAY};
        if (!am_c_look(c, starts[side], names[side], &l->starts[side].view)) return false;
        if (l->starts[side].view.data && !am_is_integer(l->starts[side].view.type))
            return am_refuse(&c->request, AM_WRONG_TYPE, &l->starts[side].view, "%s must be integers",
                             names[side]);
    }
    if (!l->starts[0].view.data) l->starts[0] = l->starts[1];
    if (!l->starts[1].view.data) l->starts[1] = l->starts[0];
    return am_c_operand(c, &m->low, "low", &l->low) && am_c_operand(c, &m->high, "high", &l->high) &&
           am_c_operand(c, &m->offset, "offset", &l->offset);
}

/* Reads a mask whose shape is set. */
static bool read_mask(am_c_call *c, limits *l)
{
    am_request *r = &c->request;
    enum { MORE = 2 }; /* a term and its operator */
    const bool packed = l->starts[0].view.data,
               limited = l->low.kind != AM_NOTHING || l->high.kind != AM_NOTHING;
    if (!am_mask_begin(r, 2 * l->given.node_count + MORE) || !am_c_add_nodes(c, &l->given)) return false;
    if (packed && r->mask.batch != 1)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "cum_seqlens_q must come with one batch row, got %td",
                         r->mask.batch);
    if (packed) {
        const am_operand operands[AM_MOST_OPERANDS] = {l->starts[0], l->starts[1], l->low, l->high,
                                                       l->offset};
        if (!add_term(c, "sequences", operands)) return false;
    } else if (limited) {
        const am_operand operands[AM_MOST_OPERANDS] = {l->low, l->high, l->offset};
        if (!add_term(c, "band", operands)) return false;
    }
    const am_node all = {.kind = AM_TERM_ALL};
    return am_mask_end(r, &all, r->mask.node_count == 0);
}

attnmask_status attnmask_fill_mask(const attnmask_mask *mask, const attnmask_array *out,
                                   attnmask_message *message)
{
    am_c_call c;
    limits l;
    am_view v;
    am_mask *m = &c.request.mask;
    bool done = am_c_begin(&c) && am_c_read_mask_struct(&c, &l.given, mask) && look_at_limits(&c, &l) &&
                (out || am_refuse(&c.request, AM_WRONG_VALUE, NULL, "out must be given, got NULL")) &&
                am_c_need(&c, out, "out", &v);
    if (done && (v.axes != 4 || (v.type != AM_BOOL && v.type != AM_UINT8)))
        done = am_refuse(&c.request, AM_WRONG_VALUE, &v, "out must be [B, H, Tq, Tk] of bool or uint8");
    if (done) {
        m->batch = v.shape[0], m->heads = v.shape[1], m->queries = v.shape[2], m->keys = v.shape[3];
        const am_mask_target target = {
            .array = am_array_of(&v, AM_HEADS_FIRST), .size = 1, .live = 1, .dead = 0};
        done = read_mask(&c, &l) && am_refuse_status(&c.request, am_mask_fill(&c.context, m, &target));
    }
    return am_c_end(&c, done, message);
}

/* --- Terms of the logits --- */

#define SAME(kind, ...) &&(int)ATTNMASK_##kind == (int)AM_LOGIT_##kind
_Static_assert(true AM_LOGIT_KINDS(SAME, SAME, SAME, SAME), "kinds of terms have the numbers of the core");

/* Looks at the array that takes the gradient of the last term. */
static bool look_at_gradient(am_c_call *c, const attnmask_term *given)
{
    am_request *r = &c->request;
    am_logit_term *term = &r->attn.terms.list[r->attn.terms.count - 1];
    const am_logit_row *row = am_row_of_term(term);
    const am_by_axis *shape = &term->array.shape;
    am_view v, like = {.type = term->array.type,
                       .axes = 4,
                       .shape = {shape->batch, shape->head, shape->token, shape->channel, 1}};
    char name[64];
    snprintf(name, sizeof name, "gradient of %s", am_words_of_door.terms[term->kind]);
    if (!am_c_look(c, &given->gradient, name, &v)) return false;
    if (!v.data) return true;
    if (!am_can_learn(term)) return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must not be given", name);
    if (row->acts != AM_ADDS_PAIRS)
        like = (am_view){.type = AM_FLOAT64, .axes = 2, .shape = {r->attn.heads, shape->channel, 1, 1, 1}};
    if (!am_c_look_in_order(c, &given->gradient, name, &v) || !am_c_is_like(c, &v, name, &like)) return false;
    term->gradient = v.data;
    return true;
}

bool am_c_read_terms(am_c_call *c, const attnmask_term *terms, int64_t count, bool with_gradients)
{
    am_request *r = &c->request;
    if (count < 0 || count > AM_LOGIT_KIND_COUNT)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "term_count must be from 0 to %d, got %lld",
                         (int)AM_LOGIT_KIND_COUNT, (long long)count);
    if (count && !terms)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "terms must be given with term_count %lld, got NULL",
                         (long long)count);
    for (int64_t i = 0; i < count; i++) {
        const attnmask_term *t = &terms[i];
        if (t->kind < 0 || t->kind >= AM_LOGIT_KIND_COUNT)
            return am_refuse(r, AM_WRONG_VALUE, NULL,
                             "terms[%lld] must have a kind of attnmask_term_kind, got %d", (long long)i,
                             (int)t->kind);
        am_term_given given = {.kind = (am_logit_kind)t->kind,
                               .number = t->number,
                               .integer = {.kind = AM_INTEGER, .number = t->integer},
                               .array = {.kind = AM_ARRAY}};
        am_view *v = &given.array.view;
        char name[64];
        snprintf(name, sizeof name, "array of %s", am_words_of_door.terms[t->kind]);
        if (!am_c_look(c, &t->array, name, v)) return false;
        if (!v->data) given.array.kind = AM_NOTHING;
        /* A bias may go on behind the keys of a cache. */
        if (t->kind == ATTNMASK_BIAS && r->attn.pages.size && v->shape[3] > r->attn.keys)
            v->shape[3] = r->attn.keys;
        if (!am_read_term(r, &given) || (with_gradients && !look_at_gradient(c, t))) return false;
    }
    return true;
}

/* --- Attention --- */

/* Where terms by distance and by point begin to count. */
static bool read_places(am_c_call *c, const limits *l, const attnmask_attention *call)
{
    am_request *r = &c->request;
    am_places *places = &r->attn.terms.places;
    const am_operand none = {0}, *starts = l->starts;
    ptrdiff_t count = -1;
    bool by_point = false;
    if (!starts->view.data) return am_read_places(r, &none, &none, &l->offset);
    const ptrdiff_t *keys = am_read_starts_of(r, "cum_seqlens_k", &starts[1], r->attn.keys, &count);
    if (!keys || count < 1) return keys; /* no sequences: no queries */
    for (int64_t i = 0; call->terms && i < call->term_count && i < AM_LOGIT_KIND_COUNT; i++)
        by_point |= call->terms[i].kind == ATTNMASK_GRID_BIAS;
    if (!am_read_places(r, &starts[0], &none, &none)) return false;
    if (by_point) places->key_starts = keys;
    ptrdiff_t *offsets = am_read_integers(r, &l->offset, count, 0);
    for (ptrdiff_t i = 0; offsets && i < count; i++) offsets[i] += keys[i] - places->starts[i];
    places->offsets = offsets;
    return offsets;
}

static bool read_attention(am_c_call *c, attnmask_attention *call, const attnmask_attention *from,
                           bool with_gradients)
{
    am_request *r = &c->request;
    limits l;
    am_view v[3];
    if (!am_c_read(c, call, from, "call") || !am_c_read_mask_struct(c, &l.given, call->mask) ||
        !am_c_need(c, &call->query, "query", &v[0]) || !am_c_need(c, &call->key, "key", &v[1]) ||
        !am_c_need(c, &call->value, "value", &v[2]) || !look_at_limits(c, &l) ||
        !am_read_inputs(r, &v[0], &v[1], &v[2]) ||
        !am_c_scale(c, call->scale, r->attn.head_dim, &r->attn.scale))
        return false;
    r->attn.normalize = call->unnormalized == 0;
    if (!read_mask(c, &l) || (call->term_count && !read_places(c, &l, call))) return false;
    return am_c_read_terms(c, call->terms, call->term_count, with_gradients);
}

/* Looks at out, lse or wide_out, which may be missing unless one is needed. */
static bool look_at_result(am_c_call *c, const attnmask_array *array, const char *name, bool needed,
                           am_dtype type, am_view *v)
{
    const am_attn *attn = &c->request.attn;
    const bool stats = strcmp(name, "lse") == 0 || strcmp(name, "d_lse") == 0;
    const am_view tokens = {.type = type,
                            .axes = 4,
                            .shape = {attn->batch, attn->queries, attn->heads, attn->value_dim, 1}},
                  rows = {.type = type, .axes = 3, .shape = {attn->batch, attn->heads, attn->queries, 1, 1}};
    if (!(needed ? am_c_need(c, array, name, v) : am_c_look(c, array, name, v))) return false;
    return !v->data || am_c_is_like(c, v, name, stats ? &rows : &tokens);
}

attnmask_status attnmask_forward(const attnmask_attention *from, attnmask_message *message)
{
    am_c_call c;
    attnmask_attention call;
    am_attn *attn = &c.request.attn;
    am_view out, lse, wide;
    bool done = am_c_begin(&c) && read_attention(&c, &call, from, false);
    const am_dtype own = done ? attn->q.type : AM_FLOAT32, type = am_wide_type(own);
    done = done && look_at_result(&c, &call.out, "out", true, own, &out) &&
           look_at_result(&c, &call.lse, "lse", false, type, &lse) &&
           look_at_result(&c, &call.wide_out, "wide_out", false, type, &wide);
    if (done) {
        attn->out = am_tokens_of(&out);
        if (lse.data) attn->lse = am_stats_of(&lse);
        if (wide.data) attn->wide_out = am_tokens_of(&wide);
        done = am_refuse_status(&c.request, am_attn_forward(&c.context, attn));
    }
    return am_c_end(&c, done, message);
}

static bool read_gradients(am_c_call *c, const attnmask_gradients *from, am_attn_gradients *problem)
{
    attnmask_gradients given;
    attnmask_attention call;
    am_gradients_given read;
    const am_attn *attn = &c->request.attn;
    if (!am_c_read(c, &given, from, "gradients") || !read_attention(c, &call, given.call, true)) return false;
    const am_dtype own = attn->q.type, type = am_wide_type(own);
    if (!look_at_result(c, &given.d_out, "d_out", true, own, &read.d_out) ||
        !look_at_result(c, &given.d_lse, "d_lse", false, type, &read.d_lse) ||
        !look_at_result(c, &call.wide_out, "wide_out", false, type, &read.out) ||
        (!read.out.data && !look_at_result(c, &call.out, "out", true, own, &read.out)) ||
        !look_at_result(c, &call.lse, "lse", true, type, &read.lse) ||
        !am_read_gradients(&c->request, &read, problem))
        return false;
    const attnmask_array *const of[] = {&call.query, &call.key, &call.value}, *const to[] = {&given.d_query,
                                                                                             &given.d_key,
                                                                                             &given.d_value};
    static const char *const names[] = {"d_query", "d_key", "d_value"};
    am_array *const targets[] = {&problem->d_q, &problem->d_k, &problem->d_v};
    for (int i = 0; i < 3; i++) {
        am_view v, like;
        if (!am_c_need(c, to[i], names[i], &v) || !am_c_look(c, of[i], names[i], &like) ||
            !am_c_is_like(c, &v, names[i], &like))
            return false;
        *targets[i] = am_tokens_of(&v);
    }
    return true;
}

attnmask_status attnmask_backward(const attnmask_gradients *from, attnmask_message *message)
{
    am_c_call c;
    am_attn_gradients problem;
    const bool done = am_c_begin(&c) && read_gradients(&c, from, &problem) &&
                      am_refuse_status(&c.request, am_attn_backward(&c.context, &problem));
    return am_c_end(&c, done, message);
}
