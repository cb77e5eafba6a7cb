/* ffi.h – what handlers need of XLA's foreign function interface, whose binary layout is stable: version
 * 0.1. tests/jax/test_ffi.py compares sizes, offsets and values with jaxlib's own header. */
#ifndef AM_BIND_XLA_FFI_H
#define AM_BIND_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

typedef struct am_xla_extension {
    size_t struct_size;
    int type;
    struct am_xla_extension *next;
} am_xla_extension;

enum { AM_XLA_METADATA = 1 }; /* types of extensions */

enum { AM_XLA_MAJOR = 0, AM_XLA_MINOR = 1 };

typedef struct {
    size_t struct_size;
    am_xla_extension *extensions;
    int major, minor;
} am_xla_version;

/* Asked for before the first call; the rest of the struct is left as it is. */
typedef struct {
    size_t struct_size;
    am_xla_version version;
    uint32_t traits;
} am_xla_metadata;

typedef struct {
    am_xla_extension base;
    am_xla_metadata *metadata;
} am_xla_metadata_extension;

typedef struct am_xla_error am_xla_error;

typedef enum {
    AM_XLA_INVALID_ARGUMENT = 3,
    AM_XLA_RESOURCE_EXHAUSTED = 8,
    AM_XLA_ABORTED = 10,
} am_xla_code;

typedef struct {
    size_t struct_size;
    am_xla_extension *extensions;
    const char *message;
    am_xla_code code;
} am_xla_error_args;

typedef struct {
    size_t struct_size;
    am_xla_extension *extensions;
    am_xla_version version;
    const void *internal;
    am_xla_error *(*create_error)(am_xla_error_args *args);
} am_xla_api; /* its beginning */

typedef enum {
    AM_XLA_PRED = 1,
    AM_XLA_S8 = 2,
    AM_XLA_S16 = 3,
    AM_XLA_S32 = 4,
    AM_XLA_S64 = 5,
    AM_XLA_U8 = 6,
    AM_XLA_U16 = 7,
    AM_XLA_U32 = 8,
    AM_XLA_U64 = 9,
    AM_XLA_F16 = 10,
    AM_XLA_F32 = 11,
    AM_XLA_F64 = 12,
    AM_XLA_BF16 = 16,
} am_xla_dtype;

/* A dense array in C order. */
typedef struct {
    size_t struct_size;
    am_xla_extension *extensions;
    am_xla_dtype dtype;
    void *data;
    int64_t rank;
    int64_t *shape;
} am_xla_buffer;

enum { AM_XLA_BUFFER = 1 }; /* types of arguments and results */

/* Of arguments, and of results. */
typedef struct {
    size_t struct_size;
    am_xla_extension *extensions;
    int64_t count;
    int *types;
    am_xla_buffer **buffers;
} am_xla_buffers;

enum { AM_XLA_ARRAY = 1 }; /* types of attributes */

typedef struct {
    am_xla_dtype dtype;
    size_t size;
    void *data;
} am_xla_array;

typedef struct {
    const char *text;
    size_t length;
} am_xla_name;

typedef struct {
    size_t struct_size;
    am_xla_extension *extensions;
    int64_t count;
    int *types;
    am_xla_name **names;
    void **values;
} am_xla_attributes;

enum { AM_XLA_EXECUTE = 3 }; /* stages */

typedef struct {
    size_t struct_size;
    am_xla_extension *extensions;
    const am_xla_api *api;
    void *context;
    int stage;
    am_xla_buffers arguments, results;
    am_xla_attributes attributes;
} am_xla_call_frame; /* its beginning */

typedef am_xla_error *am_xla_handler(am_xla_call_frame *frame);

#endif
