/* unroll.h – UNROLL unrolls a loop whose length is known once functions are inlined, so that the arrays that
 * it indexes become registers. Clang up to 16 unrolls a loop by a given count only after it has put such
 * arrays in memory, so it is told to unroll the whole loop. NO_UNROLL is for one that is seldom taken. */
#ifndef AM_UNROLL_H
#define AM_UNROLL_H

#ifdef __clang__
#    pragma clang diagnostic ignored "-Wpass-failed" /* some lengths are not known after all */
#    define UNROLL(most) _Pragma("clang loop unroll(full)")
#    define NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#    define AM_PRAGMA(text) _Pragma(#text)
#    define UNROLL(most) AM_PRAGMA(GCC unroll most)
#    define NO_UNROLL AM_PRAGMA(GCC unroll 1)
#endif

/* For a function that becomes part of each of its callers, so that constant arguments make other code; and
 * for one that does not, so that it takes no registers from them. Not every type calls these. */
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline, unused))

#endif
