/* unroll.h – loops of a length that is known once functions are inlined, and whose arrays are registers if
 * nothing is left of the loop. Clang up to 16 unrolls by count only after it has put such arrays in memory.
 */
#ifndef AM_UNROLL_H
#define AM_UNROLL_H

#ifdef __clang__
#    pragma clang diagnostic ignored "-Wpass-failed" /* where a length is not known after all */
#    define UNROLL(most) _Pragma("clang loop unroll(full)")
#else
#    define AM_PRAGMA(text) _Pragma(#text)
#    define UNROLL(most) AM_PRAGMA(GCC unroll most)
#endif

#endif
