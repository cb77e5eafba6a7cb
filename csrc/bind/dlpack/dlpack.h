/* dlpack.h – what is needed of DLPack (github.com/dmlc/dlpack), version 1.3 and later ones of that layout:
 * tensors of other libraries, and the table of functions that such a library gives for them.
 * tests/torch/test_plain.py compares sizes and offsets with the header that PyTorch brings. */
#ifndef AM_BIND_DLPACK_DLPACK_H
#define AM_BIND_DLPACK_DLPACK_H

#include <stdint.h>

enum { AM_DL_MAJOR = 1, AM_DL_MINOR = 3 };
enum { AM_DL_CPU = 1 };                     /* kinds of devices */
enum { AM_DL_FLOAT = 2, AM_DL_BFLOAT = 4 }; /* kinds of numbers */

typedef struct {
    uint32_t major, minor;
} am_dl_version;

typedef struct {
    int32_t kind, index;
} am_dl_device;

typedef struct {
    uint8_t kind, bits;
    uint16_t lanes;
} am_dl_type;

typedef struct {
    void *data;
    am_dl_device device;
    int32_t axes;
    am_dl_type type;
    int64_t *shape, *strides; /* strides in elements */
    uint64_t byte_offset;
} am_dl_tensor;

/* A tensor that lives until its last owner calls `release`. */
typedef struct am_dl_managed {
    am_dl_version version;
    void *context;
    void (*release)(struct am_dl_managed *managed);
    uint64_t flags;
    am_dl_tensor tensor;
} am_dl_managed;

/* The table of a class of tensors. The functions return 0, or -1 with an exception set. */
typedef struct {
    am_dl_version version;
    void *previous;
    void (*allocate)(void), (*share)(void);                  /* not used here */
    int (*to_object)(am_dl_managed *managed, void **object); /* takes over `managed` */
    int (*look)(void *object, am_dl_tensor *tensor);         /* valid while the object is left as it is */
    void (*stream)(void);                                    /* not used here */
} am_dl_exchange;

#endif
