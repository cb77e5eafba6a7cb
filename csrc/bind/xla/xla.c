/* xla.c – attention as handlers of XLA's foreign function interface, for attnmask.jax: called by XLA's
 * threads, without Python.
 *
 * What this binding has in common with those of Python is the description that either fills in: am_attn with
 * its am_mask. Here it is made of buffers and of one attribute, the int64 array `words`
 * (attnmask/jax/_call.py):
 *
 *     VERSION, flags, the bits of the double scale;
 *     the number of arguments before the arrays; if PART the places of the first query and the first key in
 *     the larger problem; if PLACES the operands starts (if PACKED), key_starts (if
 *     KEY_STARTS) and offsets of am_places;
 *     the number of terms, and of each its am_logit_kind, the bits of its number, the operands of its integer
 *     and its array, and whether its gradient is wanted;
 *     the mask in postfix order: of each term or operator its am_node_kind, and the operands of a term in the
 *     order of its reader
 *
 * Operands are read by am_xla_next_operand.
 *
 * Arguments are query, key and value; those arrays of terms that have gradients; other arrays; for gradients
 * those of the result: dout, out, lse, and dlse if there is; and the tangents that flags name, that of
 * softmax_aux as [heads, sinks]. Results are out, and lse if it is wanted; the gradients of query, key and
 * value, and of the terms whose gradients are wanted; the tangents of out and lse; or, as inputs move by
 * tangents, how the gradients of query, key and value move, and then out, of the type of the arithmetic, and
 * lse.
 *
 * jax.vmap puts axes in front of all buffers, of length 1 where a buffer is the same for all calls. The calls
 * become rows of one larger batch; where that cannot be said by a stride, or rows have to be told apart,
 * there is one call after the other. */
#include <string.h>

#include "bind/python/state.h"
#include "bind/xla/xla.h"
#include "core/runtime/sizes.h"
#include "core/attention/terms/terms.h"
#include "core/runtime/memory_blocks.h"
#include "core/arrays/convert.h"

#define FLAGS(DO)                                                                                            \
    DO(NORMALIZE, 1, "normalize_output")                                                                     \
    DO(GRAD_LSE, 2, "dlse")                                                                                  \
    DO(PLACES, 4, "places")                                                                                  \
    DO(PACKED, 8, "packed")                                                                                  \
    DO(PART, 16, "part")                                                                                     \
    DO(Q_TANGENT, 32, "query_tangent")                                                                       \
    DO(K_TANGENT, 64, "key_tangent")                                                                         \
    DO(V_TANGENT, 128, "value_tangent")                                                                      \
    DO(BIAS_TANGENT, 256, "bias_tangent")                                                                    \
    DO(SINKS_TANGENT, 512, "softmax_aux_tangent")                                                            \
    DO(GIVEN_LSE, 1024, "lse")                                                                               \
    DO(KEY_STARTS, 2048, "key_starts")
enum { FLAGS(AM_XLA_BIT) };
static const am_xla_word attention_words[] = {{"version", AM_XLA_VERSION}, FLAGS(AM_XLA_WORD){NULL, 0}};

static am_state *state; /* of the module that has given the handlers away; it stays */

/* --- Attention --- */

/* Query, key and value. */
static bool read_tokens(am_xla_call *c)
{
    am_view v[3];
    const ptrdiff_t batch = c->request.mask.batch;
    for (int i = 0; i < 3; i++) {
        if (!am_xla_next(c, AM_XLA_ARGUMENT, true, &v[i])) return false;
    }
    return am_read_inputs(&c->request, &v[0], &v[1], &v[2]) &&
           (c->request.mask.batch == batch || am_xla_fail(c, "query must have the batch size of the result"));
}

/* Where queries are among the keys. */
static bool read_places(am_xla_call *c)
{
    const bool packed = (c->flags & PACKED) != 0;
    am_operand starts = {0}, key_starts = {0}, offsets;
    if (am_xla_one_by_one(c, packed)) return false; /* sequences are those of one row */
    return (!packed || am_xla_next_operand(c, false, AM_INT64, &starts)) &&
           (!(c->flags & KEY_STARTS) || am_xla_next_operand(c, false, AM_INT64, &key_starts)) &&
           am_xla_next_operand(c, !packed, AM_INT64, &offsets) &&
           am_read_places(&c->request, &starts, &key_starts, &offsets);
}

static bool next_double(am_xla_call *c, double *number)
{
    int64_t bits;
    const bool found = am_xla_next_word(c, &bits);
    memcpy(number, &bits, sizeof bits);
    return found;
}

static bool read_term(am_xla_call *c)
{
    am_terms *terms = &c->request.attn.terms;
    am_term_given given;
    int64_t kind, wanted;
    if (!am_xla_next_word(c, &kind) || !next_double(c, &given.number)) return false;
    if (kind < 0 || kind >= AM_LOGIT_KIND_COUNT) return am_xla_fail(c, "words: there is no such term");
    given.kind = (am_logit_kind)kind;
    const am_logit_row *row = &am_logit_rows[kind];
    /* Each call drops weights by the places of its own rows. */
    if (am_xla_one_by_one(c, row->acts == AM_DROPS)) return false;
    const am_axis first = row->axes[0];
    const bool by_row = first == AM_AXIS_B || (first == AM_AXIS_R && !c->request.attn.terms.places.starts);
    if (!am_xla_next_operand(c, false, AM_INT64, &given.integer) ||
        !am_xla_next_operand(c, by_row, AM_FLOAT64, &given.array) || !am_xla_next_word(c, &wanted) ||
        !am_read_term(&c->request, &given))
        return false;
    am_logit_term *term = &terms->list[terms->count - 1];
    if (wanted && am_can_learn(term)) term->gradient = term; /* until there is one */
    return true;
}

bool am_xla_read_terms(am_xla_call *c)
{
    int64_t count;
    if (!am_xla_next_word(c, &count)) return false;
    for (; count > 0; count--) {
        if (!read_term(c)) return false;
    }
    return true;
}

bool am_xla_read_flags(am_xla_call *c, int64_t version)
{
    int64_t found;
    if (!am_xla_next_word(c, &found) || !am_xla_next_word(c, &c->flags)) return false;
    return found == version || am_xla_fail(c, "words: another version of attnmask has made them");
}

bool am_xla_read_numbers(am_xla_call *c)
{
    am_attn *attn = &c->request.attn;
    *attn = (am_attn){.mask = &c->request.mask};
    return am_xla_read_flags(c, AM_XLA_VERSION) && next_double(c, &attn->scale) &&
           am_check_numbers(&c->request);
}

/* Where a part of a larger problem begins. */
static bool read_part(am_xla_call *c)
{
    int64_t query, key;
    if (!am_xla_next_word(c, &query) || !am_xla_next_word(c, &key)) return false;
    c->request.attn.terms.places.first_query = query, c->request.attn.terms.places.first_key = key;
    return am_check_numbers(&c->request);
}

bool am_xla_read_attention(am_xla_call *c, int own)
{
    static const int64_t flags[] = {GRAD_LSE,     Q_TANGENT,     K_TANGENT, V_TANGENT,
                                    BIAS_TANGENT, SINKS_TANGENT, GIVEN_LSE};
    if (!am_xla_read_numbers(c) || !am_xla_next_word(c, &c->first_array)) return false;
    c->request.attn.normalize = (c->flags & NORMALIZE) != 0;
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) own += (c->flags & flags[i]) != 0;
    c->arrays = c->frame->arguments.count - c->first_array - own;
    if (c->first_array < 3 || c->arrays < 0) return am_xla_fail(c, "there are too few arguments");
    if (!read_tokens(c) || ((c->flags & PART) && !read_part(c)) || ((c->flags & PLACES) && !read_places(c)) ||
        !am_xla_read_terms(c) || !am_xla_read_mask(c, NULL, 0))
        return false;
    c->next[AM_XLA_ARGUMENT] = c->first_array + c->arrays;
    return true;
}

/* Looks at the next result. That of a part, which will be added to others, has the type of the arithmetic. */
static bool look_at_result(am_xla_call *c, bool wide, am_view like, am_array *to)
{
    const am_dtype own = c->request.attn.q.type;
    like.axes = 4, like.shape[4] = 1;
    like.type = wide || (c->flags & PART) ? am_wide_type(own) : own;
    if (!am_xla_next_like(c, AM_XLA_RESULT, true, &like, &like)) return false;
    *to = am_tokens_of(&like);
    return true;
}

bool am_xla_flash_forward(am_xla_call *c)
{
    am_attn *attn = &c->request.attn;
    am_view lse;
    if (!am_xla_read_attention(c, 0)) return false;
    const am_view like = {.shape = {attn->batch, attn->queries, attn->heads, attn->value_dim}};
    if (!look_at_result(c, false, like, &attn->out)) return false;
    if (c->frame->results.count > 1) {
        if (!am_xla_next(c, AM_XLA_RESULT, true, &lse) || !am_check_stats(&c->request, &lse, "lse"))
            return false;
        attn->lse = am_stats_of(&lse);
    }
    if (c->frame->results.count > 2 && !look_at_result(c, true, like, &attn->wide_out)) return false;
    return am_refuse_status(&c->request, am_attn_forward(&c->context, attn));
}

/* Looks at the result that takes the gradient of a term's array: of a bias as it is, of others doubles for
 * each head, which write_numbers brings there. */
static bool look_at_gradient(am_xla_call *c, am_logit_term *term, am_view *to)
{
    const am_attn *attn = &c->request.attn;
    const bool is_bias = am_row_of_term(term)->acts == AM_ADDS_PAIRS;
    if (!am_xla_next(c, AM_XLA_RESULT, is_bias, to)) return false;
    bool fits = to->axes == 4 &&
                (is_bias ? to->type == term->array.type : to->type == AM_FLOAT32 || to->type == AM_FLOAT64);
    /* Under vmap a bias that all calls share has a gradient for each. */
    const am_by_axis shape = am_array_of(to, AM_HEADS_FIRST).shape;
    if (is_bias) term->array.shape = shape;
    if (!fits || memcmp(&shape, &term->array.shape, sizeof shape) != 0 || !am_term_fits(attn, term))
        return am_xla_fail(c, "d%s has a type or a shape that does not fit", am_row_of_term(term)->name);
    term->gradient =
        is_bias ? to->data
                : am_keep(&c->request, am_product(attn->heads, term->array.shape.channel, 1), sizeof(double));
    return term->gradient;
}

/* From a number for each head to what was given: a row for each head, or one for all. */
static void write_numbers(const am_xla_call *c, const am_logit_term *term, const am_view *to)
{
    const double *numbers = term->gradient;
    const ptrdiff_t heads = c->request.attn.heads, count = to->shape[3],
                    copies = to->shape[1] ? heads / to->shape[1] : 0;
    if (am_row_of_term(term)->acts == AM_ADDS_PAIRS) return;
    for (ptrdiff_t i = 0; i < to->shape[1] * count; i++) {
        double sum = 0;
        for (ptrdiff_t h = 0; h < copies; h++) sum += numbers[h * count + i];
        if (to->type == AM_FLOAT64)
            ((double *)to->data)[i] = sum;
        else
            ((float *)to->data)[i] = (float)sum;
    }
}

/* Query, key and value, or what is like them, without data. */
typedef struct {
    am_view of[3];
} inputs;

static inputs inputs_of(const am_attn *attn)
{
    const am_dtype q = attn->q.type, k = attn->k.type;
    return (inputs){
        {{.type = q, .axes = 4, .shape = {attn->batch, attn->queries, attn->heads, attn->head_dim, 1}},
         {.type = k, .axes = 4, .shape = {attn->batch, attn->keys, attn->kv_heads, attn->head_dim, 1}},
         {.type = k, .axes = 4, .shape = {attn->batch, attn->keys, attn->kv_heads, attn->value_dim, 1}}}};
}

/* The result, and its gradients. */
static bool read_gradients(am_xla_call *c, am_attn_gradients *to)
{
    am_gradients_given given = {0};
    am_view *const own[] = {&given.d_out, &given.out, &given.lse, &given.d_lse};
    for (int i = 0; i < 3 + ((c->flags & GRAD_LSE) != 0); i++) {
        if (!am_xla_next(c, AM_XLA_ARGUMENT, true, own[i])) return false;
    }
    return am_read_gradients(&c->request, &given, to);
}

static bool look_at_input_gradients(am_xla_call *c, am_attn_gradients *problem)
{
    const inputs like = inputs_of(&c->request.attn);
    return look_at_result(c, false, like.of[0], &problem->d_q) &&
           look_at_result(c, false, like.of[1], &problem->d_k) &&
           look_at_result(c, false, like.of[2], &problem->d_v);
}

bool am_xla_flash_backward(am_xla_call *c)
{
    const am_attn *attn = &c->request.attn;
    am_view learned[AM_LOGIT_KIND_COUNT];
    int64_t results = 3;
    am_attn_gradients problem;
    if (!am_xla_read_attention(c, 3)) return false;
    for (int i = 0; i < attn->terms.count; i++) results += attn->terms.list[i].gradient != NULL;
    if (c->frame->results.count != results) return am_xla_fail(c, "there are too few results");
    if (!read_gradients(c, &problem) || !look_at_input_gradients(c, &problem)) return false;
    am_terms *terms = &problem.forward.terms;
    for (int i = 0; i < terms->count; i++) {
        if (terms->list[i].gradient && !look_at_gradient(c, &terms->list[i], &learned[i])) return false;
    }
    if (!am_refuse_status(&c->request, am_attn_backward(&c->context, &problem))) return false;
    for (int i = 0; i < terms->count; i++) {
        if (terms->list[i].gradient) write_numbers(c, &terms->list[i], &learned[i]);
    }
    return true;
}

/* --- Tangents --- */

/* That of a bias has its type and its axes. */
static bool read_bias_tangent(am_xla_call *c, const am_logit_term *bias, am_array *to)
{
    am_view v;
    if (!am_xla_look(c, am_xla_argument(c, c->next[AM_XLA_ARGUMENT]++), true, &v)) return false;
    if (bias && am_xla_one_by_one(c, v.shape[0] != bias->array.shape.batch)) return false;
    const am_view shared = am_shared(v);
    *to = am_array_of(&shared, AM_HEADS_FIRST);
    return (bias && v.axes == 4 && to->type == bias->array.type &&
            memcmp(&to->shape, &bias->array.shape, sizeof to->shape) == 0) ||
           am_xla_fail(c, "bias_tangent must have the type and axes of bias");
}

static bool read_sinks_tangent(am_xla_call *c, ptrdiff_t sinks, const double **to)
{
    am_view v;
    const ptrdiff_t heads = c->request.attn.heads;
    if (!am_xla_next(c, AM_XLA_ARGUMENT, false, &v)) return false;
    if (v.axes != 2 || v.shape[0] != heads || v.shape[1] != sinks ||
        (v.type != AM_FLOAT32 && v.type != AM_FLOAT64))
        return am_xla_fail(c, "softmax_aux_tangent must be [H, S]");
    double *numbers = am_keep(&c->request, am_product(heads, sinks, 1), sizeof *numbers);
    for (ptrdiff_t i = 0; numbers && i < heads * sinks; i++)
        numbers[i] = v.type == AM_FLOAT64 ? ((const double *)v.data)[i] : ((const float *)v.data)[i];
    *to = numbers;
    return numbers;
}

/* Those that flags name. */
static bool read_tangents(am_xla_call *c, am_attn_tangents *to)
{
    static const int64_t flags[] = {Q_TANGENT, K_TANGENT, V_TANGENT};
    const am_terms_found terms = am_find_terms(&c->request.attn);
    const inputs like = inputs_of(&c->request.attn);
    am_array *const tangents[] = {&to->d_q, &to->d_k, &to->d_v};
    am_view v;
    *to = (am_attn_tangents){.forward = c->request.attn};
    for (int i = 0; i < 3; i++) {
        if (!(c->flags & flags[i])) continue;
        if (!am_xla_next_like(c, AM_XLA_ARGUMENT, true, &like.of[i], &v)) return false;
        *tangents[i] = am_tokens_of(&v);
    }
    return (!(c->flags & BIAS_TANGENT) || read_bias_tangent(c, terms.bias, &to->d_bias)) &&
           (!(c->flags & SINKS_TANGENT) || read_sinks_tangent(c, am_sink_count(&terms), &to->d_sinks));
}

/* Looks at the results that take the tangents of out and lse. */
static bool look_at_tangents(am_xla_call *c, bool wide, am_attn_tangents *problem)
{
    const am_attn *attn = &c->request.attn;
    const am_view like = {.shape = {attn->batch, attn->queries, attn->heads, attn->value_dim}};
    am_view lse;
    if (!look_at_result(c, wide, like, &problem->d_out) || !am_xla_next(c, AM_XLA_RESULT, true, &lse) ||
        !am_check_stats(&c->request, &lse, "lse_tangent"))
        return false;
    problem->d_lse = am_stats_of(&lse);
    return true;
}

bool am_xla_flash_jvp(am_xla_call *c)
{
    am_attn_tangents problem;
    return am_xla_read_attention(c, 0) && read_tangents(c, &problem) &&
           look_at_tangents(c, false, &problem) &&
           am_refuse_status(&c->request, am_attn_jvp(&c->context, &problem));
}

bool am_xla_flash_backward_vjp(am_xla_call *c)
{
    am_attn_gradients problem;
    am_attn_tangents along;
    return am_xla_read_attention(c, 3) && read_gradients(c, &problem) && read_tangents(c, &along) &&
           look_at_input_gradients(c, &problem) && look_at_tangents(c, true, &along) &&
           am_refuse_status(&c->request, am_attn_backward_tangents(&c->context, &problem, &along));
}

/* --- Calls --- */

static bool find_words(am_xla_call *c)
{
    const am_xla_attributes *attributes = &c->frame->attributes;
    for (int64_t i = 0; i < attributes->count; i++) {
        const am_xla_name *name = attributes->names[i];
        const am_xla_array *array = attributes->values[i];
        if (attributes->types[i] != AM_XLA_ARRAY || name->length != 5 || memcmp(name->text, "words", 5) != 0)
            continue;
        if (array->dtype != AM_XLA_S64) break;
        c->words = array->data, c->words_end = c->words + array->size;
        return true;
    }
    return am_xla_fail(c, "there is no attribute `words` of int64");
}

/* The pages of a long result are mostly new, and cost more than what is written to them. */
static void advise_pages(const am_xla_buffer *buffer)
{
    size_t bytes = am_size_of(am_xla_type_of(buffer->dtype));
    for (int64_t i = 0; i < buffer->rank; i++) bytes *= (size_t)buffer->shape[i];
    if (bytes >= AM_BUFFER_BYTES) am_buffer_advise(buffer->data, bytes);
}

/* The axes of vmap, from the first result, which has four axes without them. */
static bool find_calls(am_xla_call *c)
{
    const am_xla_call_frame *frame = c->frame;
    if (frame->arguments.count < 1 || frame->results.count < 1 || am_xla_result(c, 0)->rank < 4)
        return am_xla_fail(c, "there are too few arguments or results");
    c->vmap_axes = am_xla_result(c, 0)->rank - 4;
    c->vmap_shape = am_xla_result(c, 0)->shape;
    c->calls = 1;
    for (int64_t i = 0; i < c->vmap_axes; i++) c->calls *= c->vmap_shape[i];
    for (int64_t i = 0; i < frame->results.count; i++) advise_pages(am_xla_result(c, i));
    return true;
}

/* The buffers of one call, or of all. */
static bool do_one(am_xla_call *c, am_xla_do *compute, ptrdiff_t call)
{
    const int64_t *words = c->words;
    c->call = call;
    c->one_by_one = false;
    c->next[AM_XLA_ARGUMENT] = c->next[AM_XLA_RESULT] = 0;
    c->request.mask.batch =
        am_xla_result(c, 0)->shape[c->vmap_axes] * (call == AM_XLA_ALL_CALLS ? c->calls : 1);
    const bool done = compute(c);
    am_request_free(&c->request);
    c->words = words;
    return done;
}

static bool do_all(am_xla_call *c, am_xla_do *compute)
{
    if (!find_words(c) || !find_calls(c)) return false;
    if (c->calls == 0) return true;
    if (do_one(c, compute, AM_XLA_ALL_CALLS) || !c->one_by_one) return !am_is_refused(&c->request);
    for (ptrdiff_t call = 0; call < c->calls; call++) {
        if (!do_one(c, compute, call)) return false;
    }
    return true;
}

bool am_xla_run(am_xla_call *c, am_xla_do *compute)
{
    const am_float_mode mode = am_float_mode_get();
    am_float_mode_set(am_float_mode_quiet(mode));
    const bool done = do_all(c, compute);
    am_float_mode_set(mode);
    return done;
}

static bool answer_metadata(const am_xla_call_frame *frame)
{
    for (const am_xla_extension *e = frame->extensions; e; e = e->next) {
        if (e->type != AM_XLA_METADATA) continue;
        am_xla_metadata *metadata = ((const am_xla_metadata_extension *)e)->metadata;
        metadata->version.major = AM_XLA_MAJOR, metadata->version.minor = AM_XLA_MINOR;
        metadata->traits = 0;
        return true;
    }
    return false;
}

static am_xla_error *handle(const am_xla_call_frame *frame, am_xla_do *compute)
{
    if (answer_metadata(frame) || frame->stage != AM_XLA_EXECUTE) return NULL;
    am_xla_call c = {.frame = frame,
                     .context = {.kernels = atomic_load(&state->kernels), .threads = am_threads(state)}};
    if (am_xla_run(&c, compute)) return NULL;
    const am_status status = c.request.status;
    am_xla_error_args args = {.struct_size = sizeof args,
                              .message = am_request_words(&c.request),
                              .code = status == AM_OK       ? AM_XLA_INVALID_ARGUMENT
                                      : status == AM_FORKED ? AM_XLA_ABORTED
                                                            : AM_XLA_RESOURCE_EXHAUSTED};
    return frame->api->create_error(&args);
}

#define HANDLER(call)                                                                                        \
    static am_xla_error *call##_handler(am_xla_call_frame *frame) { return handle(frame, am_xla_##call); }
AM_XLA_EACH_CALL(HANDLER)

#define ROW(call) {.name = "attnmask_" #call, .compute = am_xla_##call, .handler = call##_handler},
static const struct {
    const char *name;
    am_xla_do *compute;
    am_xla_handler *handler;
} handlers[] = {AM_XLA_EACH_CALL(ROW)};
enum { HANDLERS = sizeof handlers / sizeof *handlers };

am_xla_do *am_xla_find(const char *name)
{
    for (int i = 0; i < HANDLERS; i++) {
        if (strcmp(handlers[i].name, name) == 0) return handlers[i].compute;
    }
    return NULL;
}

static PyObject *xla_handlers(PyObject *module, PyObject *unused)
{
    (void)unused;
    if (!state) {
        Py_INCREF(module); /* XLA keeps handlers for good */
        state = am_state_of(module);
    }
    PyObject *capsules = PyDict_New();
    for (int i = 0; capsules && i < HANDLERS; i++) {
        void *pointer;
        memcpy(&pointer, &handlers[i].handler, sizeof pointer);
        am_owned PyObject *capsule = PyCapsule_New(pointer, NULL, NULL);
        if (!capsule || PyDict_SetItemString(capsules, handlers[i].name, capsule) < 0) Py_CLEAR(capsules);
    }
    return capsules;
}

static PyObject *dict_of(const am_xla_word *words)
{
    PyObject *dict = PyDict_New();
    for (; dict && words->name; words++) {
        am_owned PyObject *value = PyLong_FromLongLong(words->value);
        if (!value || PyDict_SetItemString(dict, words->name, value) < 0) Py_CLEAR(dict);
    }
    return dict;
}

static PyObject *xla_words(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return Py_BuildValue("{s:N,s:N,s:N,s:N,s:N}", "attention", dict_of(attention_words), "cache",
                         dict_of(am_xla_cache_words), "linear", dict_of(am_xla_linear_words), "sums",
                         dict_of(am_xla_sum_words), "weights", dict_of(am_xla_weight_words));
}

PyMethodDef am_xla_methods[] = {
    {"xla_handlers", xla_handlers, METH_NOARGS,
     "xla_handlers($module, /)\n--\n\nHandlers of XLA's foreign function interface, as capsules by name."},
    {"xla_words", xla_words, METH_NOARGS,
     "xla_words($module, /)\n--\n\nThe versions and flags of the handlers' attributes, by kind and name."},
    {.ml_name = NULL},
};
