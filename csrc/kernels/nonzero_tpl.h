/* nonzero_tpl.h – counts the elements of type T that have a bit of MASK set.
 *
 * Counters are as narrow as the elements, so that a vector of one feeds a vector of the other, and are
 * emptied before they can overflow.
 */
static ptrdiff_t FN(nonzero)(const void *src, ptrdiff_t count)
{
    enum { WIDTH = 128 / sizeof(T), ROUNDS = 255 };
    const T *p = src;
    ptrdiff_t total = 0, i = 0;
    while (i + WIDTH <= count) {
        T counters[WIDTH] = {0};
        ptrdiff_t rounds = (count - i) / WIDTH < ROUNDS ? (count - i) / WIDTH : ROUNDS;
        for (ptrdiff_t r = 0; r < rounds; r++, i += WIDTH) {
            for (int k = 0; k < (int)WIDTH; k++) counters[k] = (T)(counters[k] + ((p[i + k] & MASK) != 0));
        }
        for (int k = 0; k < (int)WIDTH; k++) total += (ptrdiff_t)counters[k];
    }
    for (; i < count; i++) total += (p[i] & MASK) != 0;
    return total;
}

#undef T
#undef MASK
#undef FN
