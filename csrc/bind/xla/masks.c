/* masks.c – the mask of a call: terms and operators of `words`, and their operands. */
#include "bind/xla/buffers.h"
#include "core/arrays/additive.h"

/* Only here are the numbers of a mask known. */
static bool check_additive(am_xla_call *c, const am_view *v)
{
    if (!am_is_floating(v->type)) return true;
    const am_numbers numbers = {
        .data = v->data, .type = v->type, .axes = v->axes, .shape = v->shape, .strides = v->stride};
    am_additive found;
    if (!am_refuse_status(&c->request, am_find_additive(&c->context, &numbers, &found))) return false;
    if (found.index >= 0)
        return am_xla_fail(
            c, "attention_mask must be zero for what is masked out and positive for the rest; if it "
               "is to be added to logits, pass it as `bias`");
    return !found.none_allowed ||
           am_xla_fail(
               c, "attention_mask must have a number other than zero, or be bool if nothing may attend; if "
                  "it is to be added to logits, pass it as `bias`");
}

static bool read_term(am_xla_call *c, const am_node_row *term)
{
    am_operand operands[AM_MOST_OPERANDS];
    for (int i = 0; term->operands[i]; i++) {
        if (!am_xla_next_operand(c, term->operands[i] == 'b', AM_INT64, &operands[i])) return false;
    }
    return am_mask_add(&c->request, term, operands) &&
           (term->kind != AM_TERM_DENSE || check_additive(c, &operands[0].view));
}

bool am_xla_read_mask(am_xla_call *c, const am_node *more, int more_count)
{
    am_request *r = &c->request;
    if (!am_mask_begin(r, c->words_end - c->words + 2 * more_count)) return false;
    while (c->words < c->words_end) {
        const am_node_row *row = am_node_row_at(*c->words++);
        if (!row) return am_xla_fail(c, "words: the mask is no expression");
        if (row->operands ? !read_term(c, row) : !am_mask_join(r, row->kind)) return false;
    }
    return am_mask_end(r, more, more_count);
}
