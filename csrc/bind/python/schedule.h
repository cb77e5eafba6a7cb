/* schedule.h – how a call of attention is divided, as plain data. */
#ifndef AM_BIND_PYTHON_SCHEDULE_H
#define AM_BIND_PYTHON_SCHEDULE_H

#include "bind/python/numpy.h"
#include "core/attention/backward_plan.h"
#include "core/attention/plan/schedule.h"

/* A schedule of attention forward, and what it was made from. */
typedef struct {
    const am_attn_base *base;
    const am_sections *sections;
    const am_schedule *schedule;
} am_schedule_view;

/* A new dict of what the docstring of attention_schedule in attention.c lists; NULL with an exception. */
PyObject *am_schedule_data(const am_schedule_view *view, int threads);

/* The result of backward_schedule; NULL with an exception. */
PyObject *am_backward_schedule_data(const am_backward_plan *plan);

#endif
