/* call.c – how a call from C begins and ends, and how its structs and arrays are looked at. */
#include "bind/c/call.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arrays/convert.h"
#include "core/runtime/isa.h"
#include "core/runtime/openmp.h"
#include "core/runtime/sizes.h"

#define SAME(type) &&(int)ATTNMASK_##type == (int)AM_##type
_Static_assert(true SAME(BOOL) SAME(INT8) SAME(UINT8) SAME(INT16) SAME(UINT16) SAME(INT32) SAME(UINT32)
                   SAME(INT64) SAME(UINT64) SAME(FLOAT16) SAME(BFLOAT16) SAME(FLOAT32) SAME(FLOAT64)
                       SAME(FLOAT8_E4M3) SAME(FLOAT8_E5M2),
               "types have the numbers of the core");
enum { TYPES = ATTNMASK_FLOAT8_E5M2 + 1 };

/* --- The library --- */

static const am_kernels *kernels; /* NULL: ATTNMASK_ISA names no level of this processor */
static atomic_int threads;        /* 0: as many as OpenMP gives */

static void initialize(void)
{
    am_threads_init();
    am_isa_begin();
    const char *wanted = getenv("ATTNMASK_ISA");
    kernels = wanted && *wanted ? am_isa_find(wanted) : am_isa_best();
}

static const am_kernels *kernels_here(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, initialize);
    return kernels;
}

int32_t attnmask_threads(void)
{
    kernels_here();
    return am_openmp_threads(atomic_load(&threads));
}

attnmask_status attnmask_set_threads(int32_t count, attnmask_message *message)
{
    am_c_call c;
    bool done = am_c_begin(&c);
    if (done && (count < 0 || count > AM_MAX_THREADS))
        done = am_refuse(&c.request, AM_WRONG_VALUE, NULL, "threads must be from 0 to %d, got %d",
                         AM_MAX_THREADS, (int)count);
    if (done) atomic_store(&threads, (int)count);
    return am_c_end(&c, done, message);
}

attnmask_status attnmask_config(attnmask_configuration *configuration, attnmask_message *message)
{
    am_c_call c;
    attnmask_configuration found;
    const bool done = am_c_begin(&c) && am_c_read(&c, &found, configuration, "configuration");
    if (done) {
        found.version = AM_VERSION;
        found.level = c.context.kernels->name;
        found.openmp = am_openmp_info() ? am_openmp_info()->name : NULL;
        memcpy(configuration, &found, found.size);
    }
    return am_c_end(&c, done, message);
}

/* --- A call --- */

bool am_c_begin(am_c_call *c)
{
    const am_float_mode mode = am_float_mode_get();
    *c = (am_c_call){.mode = mode, .context = {.kernels = kernels_here()}};
    if (!c->context.kernels) {
        char names[256] = "";
        const am_kernels *level;
        for (int i = 0; (level = am_isa_level(i)); i++) {
            const size_t end = strlen(names);
            snprintf(names + end, sizeof names - end, "%s%s", i ? ", " : "", level->name);
        }
        return am_refuse(&c->request, AM_WRONG_VALUE, NULL,
                         "ATTNMASK_ISA must be one of plain, %s on this machine, got '%s'", names,
                         getenv("ATTNMASK_ISA"));
    }
    c->context.threads = attnmask_threads();
    am_float_mode_set(am_float_mode_quiet(mode));
    return true;
}

attnmask_status am_c_end(am_c_call *c, bool done, attnmask_message *message)
{
    static const attnmask_status statuses[] = {[AM_NO_MEMORY] = ATTNMASK_NO_MEMORY,
                                               [AM_OVERFLOW] = ATTNMASK_OVERFLOW,
                                               [AM_FORKED] = ATTNMASK_FORKED};
    attnmask_status status = ATTNMASK_OK;
    if (!done) {
        status = c->request.status == AM_OK ? ATTNMASK_INVALID : statuses[c->request.status];
        const char *words =
            status == ATTNMASK_OVERFLOW ? "an integer does not fit its type" : am_request_words(&c->request);
        if (message) snprintf(message->text, sizeof message->text, "%s", words);
    } else if (message) {
        message->text[0] = '\0';
    }
    am_request_free(&c->request);
    am_float_mode_set(c->mode);
    return status;
}

bool am_c_read_struct(am_c_call *c, void *to, size_t size, const void *from, const char *name)
{
    size_t given;
    if (!from) return am_refuse(&c->request, AM_WRONG_VALUE, NULL, "%s must be given, got NULL", name);
    memcpy(&given, from, sizeof given);
    if (given != size) /* every struct is still as long as in its first version */
        return am_refuse(&c->request, AM_WRONG_VALUE, NULL,
                         "%s must begin with its size, %zu bytes in attnmask %s, got %zu", name, size,
                         AM_VERSION, given);
    memcpy(to, from, size);
    return true;
}

/* --- Arrays --- */

static bool is_none(const attnmask_array *a)
{
    static const attnmask_array none;
    return memcmp(a, &none, sizeof none) == 0;
}

/* False if strides lead farther than any memory is long. */
static bool has_extent(const attnmask_array *a, ptrdiff_t size)
{
    ptrdiff_t before = 0, behind = size;
    for (int i = 0; i < a->axes; i++) {
        ptrdiff_t reach;
        ptrdiff_t *const end = a->stride[i] < 0 ? &before : &behind;
        if (a->stride[i] == INT64_MIN || __builtin_mul_overflow(a->shape[i] - 1, a->stride[i], &reach) ||
            __builtin_add_overflow(*end, a->stride[i] < 0 ? -reach : reach, end))
            return false;
    }
    return before <= AM_LONGEST && behind <= AM_LONGEST;
}

static bool check_array(am_c_call *c, const attnmask_array *a, const char *name)
{
    am_request *r = &c->request;
    if (a->type < 0 || a->type >= TYPES)
        return am_refuse(r, AM_WRONG_TYPE, NULL, "%s must have a type of attnmask_type, got %d", name,
                         (int)a->type);
    if (a->axes < 0 || a->axes > AM_MOST_AXES)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must have from 0 to %d axes, got %d", name,
                         (int)AM_MOST_AXES, (int)a->axes);
    const ptrdiff_t size = (ptrdiff_t)am_size_of((am_dtype)a->type);
    bool empty = false;
    uintptr_t places = (uintptr_t)a->data;
    for (int i = 0; i < a->axes; i++) {
        if (a->shape[i] < 0)
            return am_refuse(r, AM_WRONG_VALUE, NULL,
                             "%s must have lengths of at least 0, got %lld at axis %d", name,
                             (long long)a->shape[i], i);
        empty |= a->shape[i] == 0;
        places |= a->shape[i] > 1 ? (uintptr_t)a->stride[i] : 0;
    }
    if (empty) return true;
    if (!a->data) return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must have data, got NULL", name);
    if (!has_extent(a, size))
        return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must have strides that fit memory", name);
    return places % (uintptr_t)size == 0 ||
           am_refuse(r, AM_WRONG_VALUE, NULL, "%s must have data and strides that are multiples of %td bytes",
                     name, size);
}

bool am_c_look(am_c_call *c, const attnmask_array *a, const char *name, am_view *v)
{
    static max_align_t nothing; /* where empty arrays are */
    *v = (am_view){0};
    if (is_none(a)) return true;
    if (!check_array(c, a, name)) return false;
    *v = (am_view){.data = a->data ? a->data : (char *)&nothing, .type = (am_dtype)a->type, .axes = a->axes};
    for (int i = 0; i < AM_MOST_AXES; i++) {
        v->shape[i] = i < a->axes ? a->shape[i] : 1;
        v->stride[i] = i < a->axes ? a->stride[i] : 0;
    }
    return true;
}

bool am_c_need(am_c_call *c, const attnmask_array *a, const char *name, am_view *v)
{
    return am_c_look(c, a, name, v) &&
           (v->data || am_refuse(&c->request, AM_WRONG_VALUE, NULL, "%s must be given, got NULL", name));
}

bool am_c_look_in_order(am_c_call *c, const attnmask_array *a, const char *name, am_view *v)
{
    if (!am_c_need(c, a, name, v)) return false;
    ptrdiff_t stride = (ptrdiff_t)am_size_of(v->type);
    for (int i = v->axes - 1; i >= 0; stride = am_product(stride, v->shape[i--], 1)) {
        if (v->shape[i] > 1 && v->stride[i] != stride)
            return am_refuse(&c->request, AM_WRONG_VALUE, v, "%s must be in C order", name);
    }
    return true;
}

bool am_c_is_like(am_c_call *c, const am_view *v, const char *name, const am_view *like)
{
    if (v->type != like->type)
        return am_refuse(&c->request, AM_WRONG_TYPE, v, "%s must be %s", name, am_dtype_name(like->type));
    if (v->axes == like->axes && memcmp(v->shape, like->shape, sizeof v->shape) == 0) return true;
    char shape[128] = "";
    for (int i = 0; i < like->axes; i++) {
        const size_t end = strlen(shape);
        snprintf(shape + end, sizeof shape - end, i ? ", %td" : "%td", like->shape[i]);
    }
    return am_refuse(&c->request, AM_WRONG_VALUE, v, "%s must be of shape (%s)", name, shape);
}

bool am_c_read_starts(am_c_call *c, const attnmask_array *a, const char *name, ptrdiff_t tokens,
                      const ptrdiff_t **starts, ptrdiff_t *sequences)
{
    am_operand o = {.kind = AM_ARRAY};
    *starts = NULL;
    if (!am_c_look(c, a, name, &o.view)) return false;
    if (!o.view.data) return true;
    if (!am_is_integer(o.view.type))
        return am_refuse(&c->request, AM_WRONG_TYPE, &o.view, "%s must be integers", name);
    *starts = am_read_starts_of(&c->request, name, &o, tokens, sequences);
    return *starts;
}

bool am_c_operand(am_c_call *c, const attnmask_operand *given, const char *name, am_operand *o)
{
    am_request *r = &c->request;
    *o = (am_operand){.number = given->number, .name = name};
    if (given->given == 0) return true;
    if (given->given == 1) return o->kind = AM_INTEGER, true;
    if (given->given != 2)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be given as 0, 1 or 2, got %d", name,
                         (int)given->given);
    if (!given->array) return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must have an array, got NULL", name);
    o->kind = AM_ARRAY;
    return am_c_need(c, given->array, name, &o->view);
}

bool am_c_scale(am_c_call *c, double given, ptrdiff_t channels, double *scale)
{
    *scale = given != 0 ? given : channels > 0 ? 1 / sqrt((double)channels) : 1;
    return fabs(given) <= 1e38 || /* times log2 e it is a float32 */
           am_refuse(&c->request, AM_WRONG_VALUE, NULL, "scale must be from -1e38 to 1e38, got %g", given);
}
