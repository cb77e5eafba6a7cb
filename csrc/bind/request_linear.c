/* request_linear.c – checks linear attention and short convolutions. */
#include "bind/request_linear.h"

#include <stdio.h>
#include <string.h>

#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"

am_view am_with_token(am_view v)
{
    if (v.axes < 2) return v;
    for (int i = AM_MOST_AXES - 1; i > 1; i--) v.shape[i] = v.shape[i - 1], v.stride[i] = v.stride[i - 1];
    v.shape[1] = 1, v.stride[1] = 0, v.axes++;
    return v;
}

static bool has_shape(const am_view *v, int axes, const ptrdiff_t *shape)
{
    return v->axes == axes && memcmp(v->shape, shape, (size_t)axes * sizeof *shape) == 0;
}

bool am_check_shape(am_request *r, const am_view *v, const char *name, const char *words, int axes,
                    const ptrdiff_t *shape, bool step)
{
    char text[128] = "";
    if (has_shape(v, axes, shape)) return true;
    for (int i = 0; i < axes; i++) {
        const size_t end = strlen(text);
        if (!step || i != 1) snprintf(text + end, sizeof text - end, i ? ", %td" : "%td", shape[i]);
    }
    return am_refuse(r, AM_WRONG_VALUE, v, "%s must be %sof shape (%s%s)", name, words, text,
                     axes - step == 1 ? am_words_of_door.comma : "");
}

bool am_check_packed(am_request *r, const char *name, const am_view *v, const ptrdiff_t *starts,
                     ptrdiff_t sequences)
{
    const ptrdiff_t batch = v->shape[0], tokens = v->shape[1], end = starts ? starts[sequences] : tokens;
    if (starts && batch != 1)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must have batch size 1 when %s is given, got %td", name,
                         am_words_of_door.starts, batch);
    return end == tokens ||
           am_refuse(r, AM_WRONG_VALUE, NULL, "%s must end at the %td tokens of %s, got %td at index %td",
                     am_words_of_door.starts, tokens, name, end, sequences);
}

bool am_has_numbers(const am_view *v)
{
    return v->data && v->shape[0] && v->shape[1] && v->shape[2] && v->shape[3];
}

const ptrdiff_t *am_read_slots(am_request *r, const am_view *indices, ptrdiff_t rows, ptrdiff_t slots)
{
    const am_operand given = {.kind = AM_ARRAY, .view = *indices};
    if (indices->axes == 1 && indices->shape[0] != rows) {
        am_refuse(r, AM_WRONG_VALUE, NULL, "state_indices must be of shape (%td%s), got %td entries", rows,
                  am_words_of_door.comma, indices->shape[0]);
        return NULL;
    }
    if (indices->axes != 1 || (rows && !am_is_integer(indices->type))) {
        am_refuse(r, indices->axes != 1 ? AM_WRONG_VALUE : AM_WRONG_TYPE, indices,
                  "state_indices must be a 1-D array of integers");
        return NULL;
    }
    bool *taken = am_keep(r, slots, sizeof *taken);
    const ptrdiff_t *found = !taken ? NULL : rows ? am_read_integers(r, &given, rows, 0) : am_keep(r, 1, 8);
    for (ptrdiff_t i = 0; found && i < rows; i++) {
        const ptrdiff_t slot = found[i];
        if (slot < -1 || slot >= slots) {
            am_refuse(r, AM_WRONG_INDEX, NULL, "state_indices must be from -1 to %td, got %td at index %td",
                      slots - 1, slot, i);
            return NULL;
        }
        if (slot >= 0 && taken[slot]) {
            am_refuse(r, AM_WRONG_VALUE, NULL,
                      "state_indices must name each slot once, got %td again at index %td", slot, i);
            return NULL;
        }
        if (slot >= 0) taken[slot] = true;
    }
    return found;
}

/* --- Linear attention --- */

static const char *const names[] = {
    [AM_QUERY] = "query", [AM_KEY] = "key",   [AM_VALUE] = "value",
    [AM_DECAY] = "decay", [AM_BETA] = "beta", [AM_STATE] = "initial_state",
};

static bool check_types(am_request *r, const am_view *in)
{
    const am_dtype type = in[AM_QUERY].type, wide = am_wide_type(type);
    if (!am_is_floating(type))
        return am_refuse(r, AM_WRONG_TYPE, in, "query must be of float16, bfloat16, float32 or float64");
    for (int i = AM_KEY; i < AM_LINEAR_INPUTS; i++) {
        const am_view *v = &in[i];
        const bool gate = i == AM_DECAY || i == AM_BETA;
        const am_dtype wanted = i == AM_STATE ? wide : type;
        if (!v->data || v->type == wanted || (gate && v->type == AM_FLOAT32)) continue;
        am_refuse(r, AM_WRONG_TYPE, v,
                  gate && wanted != AM_FLOAT32 ? "%s must be float32, or %s as query" : "%s must be %s",
                  names[i], am_dtype_name(wanted));
        return gate && am_hint(r, "; write %s.astype(query.dtype)", names[i]);
    }
    return true;
}

/* Sets the sizes. */
static bool check_tokens(am_request *r, const am_view *in, bool step, am_linear *linear)
{
    const ptrdiff_t *q = in[AM_QUERY].shape, *v = in[AM_VALUE].shape, value[] = {q[0], q[1], v[2], v[3]};
    for (int i = AM_QUERY; i <= AM_VALUE; i++) {
        if (in[i].axes != 4)
            return am_refuse(r, AM_WRONG_VALUE, &in[i], "%s must be %s", names[i],
                             i == AM_VALUE ? (step ? "[B, H, V]" : "[B, T, H, V]")
                             : step        ? "[B, Hk, K]"
                                           : "[B, T, Hk, K]");
        if (!am_check_axes(r, &in[i], names[i])) return false;
    }
    if (!am_check_shape(r, &in[AM_KEY], "key", "an array ", 4, q, step) ||
        !am_check_shape(r, &in[AM_VALUE], "value", "an array ", 4, value, step))
        return false;
    linear->heads = v[2], linear->key_heads = q[2], linear->key_dim = q[3], linear->value_dim = v[3];
    linear->tokens = q[1];
    return (q[2] == 0 ? v[2] == 0 : v[2] % q[2] == 0) ||
           am_refuse(r, AM_WRONG_VALUE, NULL, "value must have a multiple of the %td heads of key, got %td",
                     q[2], v[2]);
}

static bool check_gates(am_request *r, const am_view *in, bool step, am_linear *linear)
{
    const am_view *decay = &in[AM_DECAY], *beta = &in[AM_BETA];
    const ptrdiff_t shape[] = {in->shape[0], linear->tokens, linear->heads, linear->key_dim};
    linear->by_channel = decay->axes == 4;
    if (decay->data && !has_shape(decay, 1, &shape[2]) && !has_shape(decay, 3, shape) &&
        !am_check_shape(r, decay, "decay",
                        step ? "[H], [B, H], or [B, H, K] " : "[H], [B, T, H], or [B, T, H, K] ", 4, shape,
                        step))
        return false;
    return !beta->data || am_check_shape(r, beta, "beta", step ? "[B, H] " : "[B, T, H] ", 3, shape, step);
}

am_array am_linear_array_of(am_view v)
{
    if (!v.data) return (am_array){0};
    if (v.axes == 1) return am_array_of(&v, (am_by_axis){.batch = -1, .token = -1, .head = 0, .channel = -1});
    return am_array_of(&v, AM_TOKENS_FIRST);
}

bool am_read_linear(am_request *r, const am_view in[AM_LINEAR_INPUTS], bool step, am_linear *linear)
{
    if (!check_types(r, in) || !check_tokens(r, in, step, linear) || !check_gates(r, in, step, linear) ||
        !am_check_packed(r, "query", in, linear->starts, linear->sequences))
        return false;
    if (!linear->starts) linear->sequences = in->shape[0];
    const ptrdiff_t state[] = {linear->sequences, linear->heads, linear->key_dim, linear->value_dim};
    if (in[AM_STATE].data &&
        !am_check_shape(r, &in[AM_STATE], "initial_state", "[N, H, K, V] ", 4, state, false))
        return false;
    am_array *const places[] = {&linear->query, &linear->key, &linear->value, &linear->decay, &linear->beta};
    for (int i = 0; i < AM_STATE; i++) *places[i] = am_linear_array_of(in[i]);
    linear->state = am_linear_states_of(in[AM_STATE]);
    return true;
}

bool am_set_linear_gradients(am_linear_back *back, const am_view results[AM_LINEAR_INPUTS])
{
    am_array *const places[] = {
        [AM_QUERY] = &back->query, [AM_KEY] = &back->key,   [AM_VALUE] = &back->value,
        [AM_DECAY] = &back->decay, [AM_BETA] = &back->beta,
    };
    bool any = am_has_numbers(&results[AM_STATE]);
    for (int i = 0; i < AM_STATE; i++) {
        *places[i] = am_linear_array_of(results[i]);
        any = any || am_has_numbers(&results[i]);
    }
    back->state = am_linear_states_of(results[AM_STATE]);
    back->decay_of_heads = results[AM_DECAY].axes == 1;
    return any;
}

/* --- Short convolutions --- */

/* How to write what other libraries take. */
static const char *weight_hint(const am_view *x, const am_view *weight, bool step)
{
    if (weight->axes == 3 && weight->shape[1] == 1) return "; write weight[:, 0] for [C, 1, W]";
    if (weight->axes != 2) return "";
    if (weight->shape[1] == x->shape[2]) return "; write weight.T for [W, C]";
    return !step && weight->shape[0] == x->shape[1] ? "; write x.swapaxes(1, 2) for [B, C, T]" : "";
}

/* Weights are of the type of x, or float32. */
static bool check_weight_type(am_request *r, const am_view *x, const am_view *v, const char *name)
{
    if (v->type == x->type || v->type == AM_FLOAT32) return true;
    am_refuse(r, AM_WRONG_TYPE, v, "%s must be %s as x, or float32", name, am_dtype_name(x->type));
    return am_hint(r, "; write %s.astype(x.dtype)", name);
}

bool am_read_conv(am_request *r, const am_view *x, const am_view *weight, const am_view *bias, bool step,
                  am_short_conv *conv)
{
    if (x->axes != 3) return am_refuse(r, AM_WRONG_VALUE, x, "x must be %s", step ? "[B, C]" : "[B, T, C]");
    if (!am_is_floating(x->type)) return am_refuse(r, AM_WRONG_TYPE, x, "x must be a floating-point array");
    conv->type = am_wide_type(x->type);
    conv->channels = x->shape[2], conv->width = weight->shape[1];
    if (weight->axes != 2 || weight->shape[0] != conv->channels || conv->width < 1) {
        am_refuse(r, AM_WRONG_VALUE, weight,
                  "weight must be [C, W] with the %td channels of x and W at least 1", conv->channels);
        return am_hint(r, "%s", weight_hint(x, weight, step));
    }
    if (!check_weight_type(r, x, weight, "weight")) return false;
    if (bias->data && (!am_check_shape(r, bias, "bias", "", 1, &conv->channels, false) ||
                       !check_weight_type(r, x, bias, "bias")))
        return false;
    conv->weight = am_conv_weights_of(*weight), conv->bias = am_conv_weights_of(*bias);
    return true;
}

bool am_check_tail(am_request *r, const am_view *v, const char *name, const am_short_conv *conv,
                   ptrdiff_t rows, const am_view *x)
{
    const ptrdiff_t shape[] = {rows, conv->channels, conv->width - 1};
    if (!am_check_shape(r, v, name, "", 3, shape, false)) return false;
    if (x)
        return v->type == x->type ||
               am_refuse(r, AM_WRONG_TYPE, v, "%s must be %s as x", name, am_dtype_name(x->type));
    return am_is_floating(v->type) ||
           am_refuse(r, AM_WRONG_TYPE, v, "%s must be a floating-point array", name);
}
