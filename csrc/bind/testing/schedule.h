/* schedule.h – how a call of attention is divided, as plain data. */
#ifndef AM_BIND_TESTING_SCHEDULE_H
#define AM_BIND_TESTING_SCHEDULE_H

#include "bind/python/numpy.h"
#include "core/attention/attention.h"

/* New dicts of what tests/_support/schedules.py lists; NULL with an exception. That of backward is without
 * gradients of terms. */
PyObject *am_attention_schedule(PyObject *module, const am_attn *attn, int threads);
PyObject *am_backward_schedule(PyObject *module, const am_attn *attn, int threads);

#endif
