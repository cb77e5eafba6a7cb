/* attention.c – com.attnmask.Attention, an operator of ONNX Runtime: ONNX's Attention (opsets 23 to 26) with
 * packed sequences, segments and ALiBi. It needs the C library and the C header of ONNX Runtime:
 *
 *     cc -shared -fPIC -O2 attention.c -I/usr/include/onnxruntime -lattnmask -o libattnmask_onnx.so
 *
 * In Python: options.register_custom_ops_library("./libattnmask_onnx.so"), of a SessionOptions. */
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <attnmask.h>
#include <onnxruntime_c_api.h>

#define DOMAIN "com.attnmask"
#define ONNX(type) ONNX_TENSOR_ELEMENT_DATA_TYPE_##type

/* --- Inputs, outputs and attributes --- */

/* Axes in comments: B batch rows, Tq queries, Tk keys with those of the past, H heads, D channels. OWN: the
 * type of Q. */
enum { OWN = -1, ANY = ONNX(UNDEFINED), INT64 = ONNX(INT64) };
enum { Q, K, V, ATTN_MASK, PAST_KEY, PAST_VALUE, NONPAD, CU_Q, CU_K, IDS_Q, IDS_K, SLOPES, INPUTS };
static const struct {
    const char *name;
    int type;
    const char *axes;
} inputs[INPUTS] = {
    [Q] = {"Q", OWN, "3 or 4"}, /* [B, H, Tq, D] or [B, Tq, H D]; keys and values likewise */
    [K] = {"K", OWN, "3 or 4"},
    [V] = {"V", OWN, "3 or 4"},
    [ATTN_MASK] = {"attn_mask", ANY, "1, 2, 3 or 4"}, /* [B, H, Tq, at most Tk]; axes are 1 if shared */
    [PAST_KEY] = {"past_key", OWN, "4"},
    [PAST_VALUE] = {"past_value", OWN, "4"},
    [NONPAD] = {"nonpad_kv_seqlen", INT64, "1"},
    [CU_Q] = {"cu_seqlens_q", ANY, "1"}, /* where packed sequences begin, and the end; B = 1 */
    [CU_K] = {"cu_seqlens_k", ANY, "1"},
    [IDS_Q] = {"q_segment_ids", ANY,
               "2"}, /* [B, Tq]: attends to keys of the same id, unless it is negative */
    [IDS_K] = {"kv_segment_ids", ANY, "2"},
    [SLOPES] = {"alibi_slopes", ANY, "1"}, /* [H] of float32 or float64 */
};

enum { Y, PRESENT_KEY, PRESENT_VALUE, QK_MATMUL, OUTPUTS };

enum { IS_CAUSAL, Q_HEADS, KV_HEADS, LEFT, RIGHT, PRECISION, SCALE, SOFTCAP, ATTRIBUTES };
static const struct {
    const char *name;
    int is_float;
    double missing, least, most;
} attributes[ATTRIBUTES] = {
    [IS_CAUSAL] = {"is_causal", 0, 0, 0, 1},
    [Q_HEADS] = {"q_num_heads", 0, 0, 1, INT32_MAX},
    [KV_HEADS] = {"kv_num_heads", 0, 0, 1, INT32_MAX},
    [LEFT] = {"left_window_size", 0, -1, -1, INT32_MAX},
    [RIGHT] = {"right_window_size", 0, -1, -1, INT32_MAX},
    [PRECISION] = {"softmax_precision", 0, 0, 1, 16}, /* a type of ONNX */
    [SCALE] = {"scale", 1, NAN, -1e38, 1e38},
    [SOFTCAP] = {"softcap", 1, 0, 0, 1e38},
};

typedef struct {
    OrtCustomOp base;
    ONNXTensorElementDataType type;
} typed_op;

typedef struct {
    const OrtApi *api;
    double attribute[ATTRIBUTES];
} kernel;

static OrtStatus *refuse(const OrtApi *api, const char *format, ...)
{
    char text[640] = DOMAIN ".Attention: ";
    const size_t begin = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + begin, sizeof text - begin, format, arguments);
    va_end(arguments);
    return api->CreateStatus(ORT_INVALID_ARGUMENT, text);
}

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        OrtStatus *failed_ = (call);                                                                         \
        if (failed_) return failed_;                                                                         \
    } while (0)
#define NEED(of, condition, ...) TRY((condition) ? NULL : refuse((of)->api, __VA_ARGS__))
#define N(integer) ((long long)(integer)) /* to print */

/* Whether an attribute was found. */
static int is_found(const OrtApi *api, OrtStatus *status)
{
    if (status) api->ReleaseStatus(status);
    return !status;
}

static OrtStatus *read_attribute(kernel *k, const OrtKernelInfo *info, int i)
{
    const char *name = attributes[i].name;
    const double least = attributes[i].least, most = attributes[i].most;
    int64_t integer = 0;
    float number = 0;
    const int has_integer = is_found(k->api, k->api->KernelInfoGetAttribute_int64(info, name, &integer)),
              has_float = is_found(k->api, k->api->KernelInfoGetAttribute_float(info, name, &number));
    k->attribute[i] = attributes[i].missing;
    if (!has_integer && !has_float) return NULL;
    NEED(k, attributes[i].is_float == has_float, "%s must be %s", name, has_float ? "an integer" : "a float");
    const double given = k->attribute[i] = has_float ? (double)number : (double)integer;
    NEED(k, given >= least && given <= most, "%s must be from %.9g to %.9g, got %.9g", name, least, most,
         given);
    return NULL;
}

static OrtStatus *read_attributes(kernel *k, const OrtKernelInfo *info, ONNXTensorElementDataType type)
{
    size_t outputs;
    TRY(k->api->KernelInfo_GetOutputCount(info, &outputs));
    NEED(k, outputs <= QK_MATMUL, "qk_matmul_output is not supported: logits are not stored");
    for (int i = 0; i < ATTRIBUTES; i++) TRY(read_attribute(k, info, i));
    NEED(k, k->attribute[SCALE] != 0, "scale must not be 0; leave it out for 1 / sqrt(head_size)");
    NEED(k, k->attribute[PRECISION] != ONNX(DOUBLE) || type == ONNX(DOUBLE),
         "softmax_precision 11 needs double");
    return NULL;
}

static void destroy(void *given) { free(given); }

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **made)
{
    kernel *k = calloc(1, sizeof *k);
    if (!k) return refuse(api, "out of memory");
    k->api = api;
    OrtStatus *status = read_attributes(k, info, ((const typed_op *)op)->type);
    if (status) free(k);
    *made = status ? NULL : k;
    return status;
}

/* --- Arrays --- */

typedef struct {
    const kernel *k;
    const OrtApi *api;
    OrtKernelContext *context;
    attnmask_array input[INPUTS], offsets;
    int64_t keys; /* Tk */
    attnmask_node nodes[3];
    attnmask_term terms[3];
    attnmask_mask mask;
    attnmask_attention call;
    void *offset_memory, *mask_memory;
} request;

static int is_given(const attnmask_array *array) { return array->axes > 0; }

/* [B, H, T, D] as [B, T, H, D], and back. */
static attnmask_array swapped(attnmask_array a)
{
    const int64_t length = a.shape[1], stride = a.stride[1];
    a.shape[1] = a.shape[2], a.stride[1] = a.stride[2];
    a.shape[2] = length, a.stride[2] = stride;
    return a;
}

static OrtStatus *read_tensor(request *r, const OrtValue *value, const OrtTensorTypeAndShapeInfo *info,
                              size_t i)
{
    static const char types[] = {
        [ONNX(BOOL)] = ATTNMASK_BOOL + 1,        [ONNX(INT32)] = ATTNMASK_INT32 + 1,
        [ONNX(INT64)] = ATTNMASK_INT64 + 1,      [ONNX(FLOAT16)] = ATTNMASK_FLOAT16 + 1,
        [ONNX(FLOAT)] = ATTNMASK_FLOAT32 + 1,    [ONNX(DOUBLE)] = ATTNMASK_FLOAT64 + 1,
        [ONNX(BFLOAT16)] = ATTNMASK_BFLOAT16 + 1}; /* 0: none */
    const char *name = inputs[i].name, *wanted = inputs[i].axes;
    ONNXTensorElementDataType type;
    size_t axes;
    int64_t shape[4];
    void *data;
    TRY(r->api->GetTensorElementType(info, &type));
    TRY(r->api->GetDimensionsCount(info, &axes));
    NEED(r, (size_t)type < sizeof types && types[type], "%s has a type that is not supported", name);
    NEED(r, axes < 10 && strchr(wanted, '0' + (int)axes), "%s must have %s axes, got %zu", name, wanted,
         axes);
    TRY(r->api->GetDimensions(info, shape, axes));
    TRY(r->api->GetTensorMutableData((OrtValue *)value, &data)); /* only read */
    r->input[i] = attnmask_array_of(data, (attnmask_type)(types[type] - 1), (int32_t)axes, shape);
    return NULL;
}

static OrtStatus *read_inputs(request *r)
{
    size_t count;
    TRY(r->api->KernelContext_GetInputCount(r->context, &count));
    for (size_t i = 0; i < count; i++) {
        const OrtValue *value;
        OrtTensorTypeAndShapeInfo *info;
        TRY(r->api->KernelContext_GetInput(r->context, i, &value));
        if (!value) continue;
        TRY(r->api->GetTensorTypeAndShape(value, &info));
        OrtStatus *status = read_tensor(r, value, info, i);
        r->api->ReleaseTensorTypeAndShapeInfo(info);
        TRY(status);
    }
    return NULL;
}

/* NULL in *data: nobody wants this output. */
static OrtStatus *output(request *r, size_t index, const int64_t *shape, int32_t axes, void **data)
{
    size_t count;
    OrtValue *value = NULL;
    *data = NULL;
    TRY(r->api->KernelContext_GetOutputCount(r->context, &count));
    if (index < count) TRY(r->api->KernelContext_GetOutput(r->context, index, shape, (size_t)axes, &value));
    return value ? r->api->GetTensorMutableData(value, data) : NULL;
}

/* Makes [B, T, H, D] of Q, K or V without a copy. */
static OrtStatus *read_heads(request *r, int index, int attribute)
{
    attnmask_array *a = &r->input[index];
    const int64_t heads = (int64_t)r->k->attribute[attribute], *shape = a->shape;
    const char *name = inputs[index].name, *count = attributes[attribute].name;
    NEED(r, a->axes == r->input[Q].axes, "Q, K and V must have as many axes as each other");
    if (a->axes == 4) {
        NEED(r, !heads || shape[1] == heads, "%s is %lld, but %s has %lld heads", count, N(heads), name,
             N(shape[1]));
        *a = swapped(*a);
    } else {
        NEED(r, heads && shape[2] % heads == 0, "%s must divide the last axis of %s, %lld, got %lld", count,
             name, N(shape[2]), N(heads));
        const int64_t split[4] = {shape[0], shape[1], heads, shape[2] / heads};
        *a = attnmask_array_of(a->data, (attnmask_type)a->type, 4, split);
    }
    return NULL;
}

/* Copies [B, T, H, D] to the tokens that begin at `at`. */
static void copy_tokens(const attnmask_array *to, int64_t at, const attnmask_array *from)
{
    const int64_t *shape = from->shape, *in = from->stride, *out = to->stride, row = shape[3] * in[3];
    const int joined = in[1] == row && out[1] == row;
    const int64_t rows = joined ? 1 : shape[1], bytes = joined ? row * shape[1] : row;
    for (int64_t i = 0; i < shape[0] * shape[2] * rows && bytes; i++) {
        const int64_t b = i / rows / shape[2], h = i / rows % shape[2], t = i % rows;
        memcpy((char *)to->data + b * out[0] + h * out[2] + (at + t) * out[1],
               (const char *)from->data + b * in[0] + h * in[2] + t * in[1], (size_t)bytes);
    }
}

/* The past and what is new become the present, which is attended to. */
static OrtStatus *append(request *r, int index, int past_index, size_t present)
{
    attnmask_array *a = &r->input[index], past = swapped(r->input[past_index]);
    const int64_t before = past.shape[1],
                  shape[4] = {a->shape[0], a->shape[2], before + a->shape[1], a->shape[3]};
    void *data;
    const char *name = inputs[past_index].name;
    const int fits = past.shape[0] == shape[0] && past.shape[2] == shape[1] && past.shape[3] == shape[3];
    NEED(r, fits || !is_given(&past), "%s must be of shape (%lld, %lld, past, %lld)", name, N(shape[0]),
         N(shape[1]), N(shape[3]));
    TRY(output(r, present, shape, 4, &data));
    NEED(r, data || before == 0, "%s needs the outputs present_key and present_value", name);
    if (!data) return NULL;
    const attnmask_array whole = swapped(attnmask_array_of(data, (attnmask_type)a->type, 4, shape));
    if (before) copy_tokens(&whole, 0, &past);
    copy_tokens(&whole, before, a);
    *a = whole;
    return NULL;
}

/* --- Masks --- */

static attnmask_operand *add_node(request *r, attnmask_kind kind)
{
    r->nodes[r->mask.node_count].kind = kind;
    return r->nodes[r->mask.node_count++].operand;
}

static attnmask_term *add_term(request *r, attnmask_term_kind kind)
{
    r->terms[r->call.term_count].kind = kind;
    return &r->terms[r->call.term_count++];
}

/* How many keys are before the first query: the past, or what there is but the queries' own. */
static OrtStatus *read_offsets(request *r)
{
    const attnmask_array *lengths = &r->input[NONPAD], *past = &r->input[PAST_KEY];
    const int64_t rows = r->input[Q].shape[0], *length = lengths->data;
    r->mask.offset = attnmask_number(past->shape[2]);
    if (!is_given(lengths)) return NULL;
    NEED(r, !is_given(past), "nonpad_kv_seqlen does not go with past_key");
    NEED(r, lengths->shape[0] == rows, "nonpad_kv_seqlen must have %lld numbers, got %lld", N(rows),
         N(lengths->shape[0]));
    int64_t *offset = r->offset_memory = calloc((size_t)rows + 1, sizeof *offset);
    NEED(r, offset, "out of memory");
    for (int64_t b = 0; b < rows; b++) {
        NEED(r, length[b] >= 0 && length[b] <= r->keys, "nonpad_kv_seqlen must be from 0 to %lld, got %lld",
             N(r->keys), N(length[b]));
        offset[b] = length[b] - r->input[Q].shape[1];
    }
    r->offsets = attnmask_array_of(offset, ATTNMASK_INT64, 1, &rows);
    r->mask.offset = attnmask_numbers(&r->offsets);
    add_node(r, ATTNMASK_KEYS)[1] = attnmask_numbers(lengths);
    return NULL;
}

static OrtStatus *read_sequences(request *r)
{
    attnmask_array *q_ids = &r->input[IDS_Q], *k_ids = &r->input[IDS_K], *starts = &r->input[CU_Q];
    const int cached = is_given(&r->input[PAST_KEY]) || is_given(&r->input[NONPAD]);
    NEED(r, is_given(starts) || !is_given(&r->input[CU_K]), "cu_seqlens_k needs cu_seqlens_q");
    NEED(r, is_given(q_ids) || !is_given(k_ids), "kv_segment_ids needs q_segment_ids");
    NEED(r, !is_given(starts) || !cached, "cu_seqlens_q goes with neither past_key nor nonpad_kv_seqlen");
    r->mask.cum_seqlens_q = *starts;
    r->mask.cum_seqlens_k = r->input[CU_K];
    if (!is_given(q_ids)) return NULL;
    if (!is_given(k_ids)) *k_ids = *q_ids;
    attnmask_operand *ids = add_node(r, ATTNMASK_EQUAL);
    ids[0] = attnmask_numbers(q_ids);
    ids[1] = attnmask_numbers(k_ids);
    return NULL;
}

/* Whether a mask of floats holds 0 and -inf alone, or with a soft cap the lowest number, whose bits are those
 * of -inf less 1. Then it is a mask of bool, to which it is changed. */
static OrtStatus *read_infinities(request *r, attnmask_array *a, int *alone)
{
    static const uint64_t infinities[] = {0xFC00, 0xFF80, 0xFF800000, 0xFFF0000000000000}; /* -inf by type */
    const int64_t size = a->stride[3], count = a->shape[0] * a->shape[1] * a->shape[2] * a->shape[3];
    const uint64_t infinity = infinities[a->type - ATTNMASK_FLOAT16];
    uint8_t *allowed = r->mask_memory = malloc((size_t)count + 1);
    NEED(r, allowed, "out of memory");
    *alone = 1;
    for (int64_t i = 0; i < count && *alone; i++) {
        uint64_t bits = 0; /* little-endian, as all processors of the library are */
        memcpy(&bits, (const char *)a->data + i * size, (size_t)size);
        allowed[i] = bits << (65 - 8 * size) == 0; /* 0 of either sign */
        *alone = allowed[i] || infinity - bits <= (r->k->attribute[SOFTCAP] > 0);
    }
    if (*alone) *a = attnmask_array_of(allowed, ATTNMASK_BOOL, 4, a->shape);
    return NULL;
}

static OrtStatus *read_attn_mask(request *r)
{
    attnmask_array *mask = &r->input[ATTN_MASK], *k_ids = &r->input[IDS_K];
    const int64_t *q = r->input[Q].shape, whole[4] = {q[0], q[2], q[1], r->keys};
    const int missing = 4 - mask->axes, is_bool = mask->type == ATTNMASK_BOOL;
    int64_t shape[4] = {1, 1, 1, 1};
    int alone = 0;
    if (!is_given(mask)) return NULL;
    NEED(r, is_bool || mask->type >= ATTNMASK_FLOAT16, "attn_mask must be bool or floating-point");
    for (int i = missing; i < 4; i++) {
        shape[i] = mask->shape[i - missing];
        NEED(r, shape[i] == whole[i] || (i == 3 ? shape[i] < whole[i] : shape[i] == 1),
             "attn_mask must broadcast to (%lld, %lld, %lld, %lld), got %lld at axis %d", N(whole[0]),
             N(whole[1]), N(whole[2]), N(whole[3]), N(shape[i]), i - missing);
    }
    NEED(r, shape[3] != 1 || r->keys == 1,
         "attn_mask must have more than 1 key: opset 23 of ONNX would repeat it, and opset 24 pad it");
    /* Keys behind those of the mask are masked out, as if there were none. */
    if (k_ids->shape[1] == r->keys) k_ids->shape[1] = shape[3];
    r->input[K].shape[1] = r->input[V].shape[1] = shape[3];
    *mask = attnmask_array_of(mask->data, (attnmask_type)mask->type, 4, shape);
    if (!is_bool) TRY(read_infinities(r, mask, &alone));
    if (is_bool || alone) return add_node(r, ATTNMASK_DENSE)[0] = attnmask_numbers(mask), NULL;
    NEED(r, r->k->attribute[SOFTCAP] == 0,
         "attn_mask must be bool, or 0 and -inf, with softcap: other numbers come before the soft cap");
    add_term(r, ATTNMASK_BIAS)->array = *mask;
    return NULL;
}

/* --- Computing --- */

static OrtStatus *run(request *r)
{
    const double *attribute = r->k->attribute;
    attnmask_array *q = &r->input[Q], *v = &r->input[V], *slopes = &r->input[SLOPES];
    TRY(read_inputs(r));
    const int32_t axes = q->axes;
    TRY(read_heads(r, V, KV_HEADS));
    TRY(read_heads(r, K, KV_HEADS));
    TRY(read_heads(r, Q, Q_HEADS));
    NEED(r, r->input[PAST_KEY].axes == r->input[PAST_VALUE].axes,
         "past_key and past_value must come together");
    TRY(append(r, K, PAST_KEY, PRESENT_KEY));
    TRY(append(r, V, PAST_VALUE, PRESENT_VALUE));
    r->keys = r->input[K].shape[1];
    NEED(r, v->shape[1] == r->keys, "V must have the tokens of K, %lld, got %lld", N(r->keys),
         N(v->shape[1]));

    r->mask.size = sizeof r->mask;
    r->mask.nodes = r->nodes;
    if (attribute[LEFT] >= 0) r->mask.low = attnmask_number(-(int64_t)attribute[LEFT]);
    if (attribute[RIGHT] >= 0) r->mask.high = attnmask_number((int64_t)attribute[RIGHT]);
    if (attribute[IS_CAUSAL] == 1) r->mask.high = attnmask_number(0);
    TRY(read_offsets(r));
    TRY(read_sequences(r));
    TRY(read_attn_mask(r));
    if (is_given(slopes)) {
        const int64_t shape[4] = {1, slopes->shape[0], 1, 1};
        NEED(r, shape[1] == q->shape[2], "alibi_slopes must have %lld numbers, one for each head, got %lld",
             N(q->shape[2]), N(shape[1]));
        add_term(r, ATTNMASK_ALIBI)->array =
            attnmask_array_of(slopes->data, (attnmask_type)slopes->type, 4, shape);
    }
    if (attribute[SOFTCAP] > 0) add_term(r, ATTNMASK_SOFT_CAP)->number = attribute[SOFTCAP];

    void *data;
    const int64_t tokens[4] = {q->shape[0], q->shape[1], q->shape[2], v->shape[3]},
                  flat[3] = {tokens[0], tokens[1], tokens[2] * tokens[3]},
                  heads[4] = {tokens[0], tokens[2], tokens[1], tokens[3]};
    TRY(output(r, Y, axes == 3 ? flat : heads, axes, &data));
    attnmask_attention *call = &r->call;
    attnmask_message message;
    call->size = sizeof *call;
    call->query = *q, call->key = r->input[K], call->value = *v;
    call->out = attnmask_array_of(data, (attnmask_type)q->type, 4, axes == 3 ? tokens : heads);
    if (axes == 4) call->out = swapped(call->out);
    call->scale = isnan(attribute[SCALE]) ? 0 : attribute[SCALE];
    call->mask = &r->mask;
    call->terms = r->terms;
    NEED(r, attnmask_forward(call, &message) == ATTNMASK_OK, "%s", message.text);
    return NULL;
}

static OrtStatus *compute(void *given, OrtKernelContext *context)
{
    request r = {.k = given, .api = ((const kernel *)given)->api, .context = context};
    OrtStatus *status = run(&r);
    free(r.offset_memory);
    free(r.mask_memory);
    return status;
}

/* --- The operator --- */

typedef const OrtCustomOp op;
static const char *name_of(op *o) { return (void)o, "Attention"; }
static const char *provider_of(op *o) { return (void)o, NULL; } /* CPUs */
static size_t count_inputs(op *o) { return (void)o, INPUTS; }
static size_t count_outputs(op *o) { return (void)o, OUTPUTS; }
static ONNXTensorElementDataType output_type(op *o, size_t i) { return (void)i, ((const typed_op *)o)->type; }
static ONNXTensorElementDataType input_type(op *o, size_t i)
{
    return inputs[i].type == OWN ? output_type(o, Y) : (ONNXTensorElementDataType)inputs[i].type;
}
static OrtCustomOpInputOutputCharacteristic input_use(op *o, size_t i)
{
    return (void)o, i <= V ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
}
static OrtCustomOpInputOutputCharacteristic output_use(op *o, size_t i)
{
    return (void)o, i == Y ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
}
static OrtMemType memory_of(op *o, size_t i) { return (void)o, (void)i, OrtMemTypeDefault; }

static OrtStatus *make_domain(const OrtApi *api, OrtCustomOpDomain **made)
{
    static const ONNXTensorElementDataType types[] = {ONNX(FLOAT), ONNX(FLOAT16), ONNX(BFLOAT16),
                                                      ONNX(DOUBLE)};
    enum { TYPES = sizeof types / sizeof *types };
    static typed_op ops[TYPES];
    TRY(api->CreateCustomOpDomain(DOMAIN, made));
    for (int i = 0; i < TYPES; i++) {
        OrtCustomOp *o = &ops[i].base;
        ops[i].type = types[i];
        o->version = ORT_API_VERSION;
        o->GetName = name_of, o->GetExecutionProviderType = provider_of;
        o->GetInputType = input_type, o->GetInputTypeCount = count_inputs;
        o->GetInputCharacteristic = input_use, o->GetInputMemoryType = memory_of;
        o->GetOutputType = output_type, o->GetOutputTypeCount = count_outputs;
        o->GetOutputCharacteristic = output_use;
        o->CreateKernelV2 = create, o->KernelComputeV2 = compute, o->KernelDestroy = destroy;
        TRY(api->CustomOpDomain_Add(*made, o));
    }
    return NULL;
}

/* The domain must outlive all sessions, which share it. */
ORT_EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static OrtCustomOpDomain *domain;
    static const OrtApi *owner; /* a process may have more than one ONNX Runtime */
    const OrtApi *api = base->GetApi(ORT_API_VERSION);
    if (!api) return refuse(base->GetApi(1), "built with the header of ONNX Runtime 1.%d", ORT_API_VERSION);
    pthread_mutex_lock(&lock);
    OrtStatus *status = owner == api ? NULL : make_domain(api, &domain);
    if (!status) owner = api;
    OrtCustomOpDomain *const found = domain;
    pthread_mutex_unlock(&lock);
    return status ? status : api->AddCustomOpDomain(options, found);
}
