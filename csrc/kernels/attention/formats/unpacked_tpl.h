/* unpacked_tpl.h – attention of few rows to unpacked keys and values. */
#if !defined T || !defined S || !defined W || !defined UNIT || !defined FROM || !defined STEP
#    error "unpacked_tpl.h needs f32.h or f64.h, S (an element), W (as it is read, 1 / UNIT of it), FROM"
#    error "and STEP(name) (turns logits into P)"
#endif
#if !defined LOAD_WIDE || !defined LOAD_PART_WIDE || !defined FMA || !(defined AT_ONCE || defined NUMBERS)
#    error "unpacked_tpl.h needs LOAD_WIDE, LOAD_PART_WIDE (lanes of W), FMA (multiplies, adds) and AT_ONCE"
#    error "(whether add_values, which adds P V, takes the values of all runs at once if all are live)"
#endif
#if defined NUMBERS && !(defined SUMS && defined ROW_UNIT && defined QUERIES && defined QUERY_STEP)
#    error "unpacked_tpl.h: lanes of NUMBERS of S need ROW_UNIT (by what the sums of a row are multiplied),"
#    error "SUMS(name) (adds up lanes), QUERIES and QUERY_STEP (such queries, zero behind the last number)"
#endif
#if defined PARTS && !(defined PART_OF && defined LOAD_PART && defined QUERIES && defined QUERY_STEP)
#    error "unpacked_tpl.h: loads of PARTS vectors need PART_OF (takes one), LOAD_PART (a rest of one vector,"
#    error "in order), QUERIES and QUERY_STEP (such queries, zero behind the last number)"
#endif

#ifndef NUMBERS
#    define NUMBERS 1
#    define SUMS VOP
#    define ROW_UNIT(block, r) UNIT
#endif
#ifndef MOST_SUMS /* where products take registers as well: fewer than DOT_SUMS */
#    define MOST_SUMS DOT_SUMS
#endif
#ifndef PARTS
#    define PARTS 1
#    define PART_OF(x, part) (x)
#endif
#ifndef FIND_P
#    define FIND_P STEP(find_p)
#endif
#ifndef QUERIES
#    define QUERIES(block) ((const T *)(block)->q)
#    define QUERY_STEP(head_dim) (head_dim)
#endif

/* PAIR sums become one vector in the first step of adding up lanes. */
#ifdef V_PAIRS
#    define PAIR 2
#    define ADD_PAIR SUMS(add_pair)
#    define TOTALS SUMS(totals_of_pairs)
#else
#    define PAIR 1
#    define ADD_PAIR(sums) (*(sums))
#    define TOTALS SUMS(totals)
#endif

/* Some queries, and keys from k on in the same run. */
typedef struct {
    ptrdiff_t head_dim;
    const T *q;
    const W *k;
    ptrdiff_t stride; /* from key to key */
} FROM(factors);

/* Keys of which the first are factors, and the others in runs. */
typedef struct {
    FROM(factors) first;
    ptrdiff_t keys, in_first_run;
    const row_runs *runs;
    T *logits;
} FROM(dot_operands);

#if PARTS > 1
/* Adds products of what was loaded of some keys and the queries at q, of which `count` lanes are left. */
INLINE void FROM(add_dots)(const ptrdiff_t rows, const ptrdiff_t keys, const V *x, const T *q,
                           ptrdiff_t q_stride, ptrdiff_t count, const int parts, V *sums)
{
    UNROLL(4)
    for (int part = 0; part < parts; part++, q += LANES) {
        V some[DOT_SUMS];
        UNROLL(32)
        for (ptrdiff_t j = 0; j < keys; j++) some[j] = parts > 1 ? PART_OF(x[j], part) : x[j];
        UNROLL(4)
        for (ptrdiff_t r = 0; r < rows; r++) {
            const T *row = q + r * q_stride;
            V y = count >= LANES ? VOP(load)(row) : VOP(load_part)(row, count);
            UNROLL(32)
            for (ptrdiff_t j = 0; j < keys; j++) sums[r * keys + j] = FMA(some[j], y, sums[r * keys + j]);
        }
    }
}
#endif

/* Sums of products of up to four rows with so many keys that they fit the registers and do not wait for each
 * other; keys behind the last are read as the last. Unless `prefetch` is NULL, it prefetches as many lines as
 * it reads of keys, which are `straight` if the caller knows that they are. */
INLINE void FROM(multiply)(const ptrdiff_t rows, const ptrdiff_t keys, const FROM(factors) factors,
                           ptrdiff_t last, V *sums, prefetch_lines *prefetch, const bool straight)
{
#define KEY(j) (k + ((j) < last ? (j) : last) * stride)
    const ptrdiff_t head_dim = factors.head_dim, stride = factors.stride, q_stride = QUERY_STEP(head_dim);
    const T *q = factors.q;
    const W *k = factors.k;
    prefetch_lines current = prefetch ? *prefetch : (prefetch_lines){0};
    V x[DOT_SUMS];
    UNROLL(64)
    for (ptrdiff_t j = 0; j < (rows * keys + LANES - 1) / LANES * LANES; j++) sums[j] = VOP(set1)(0);
    ptrdiff_t i = 0;
    for (; (i + LANES * PARTS) * NUMBERS <= head_dim; i += LANES * PARTS) {
        UNROLL(32)
        for (ptrdiff_t j = 0; j < keys; j++) x[j] = LOAD_WIDE(KEY(j));
        k += LANES * PARTS * NUMBERS;
        HIDE(k); /* one register for all keys */
        if (prefetch && i * NUMBERS * sizeof(S) % CACHE_LINE == 0) {
            if (straight)
                prefetch_straight(&current, keys);
            else
                prefetch_each(&current, keys, rows == 1 || sizeof(S) == sizeof(T));
        }
#if PARTS > 1
        FROM(add_dots)(rows, keys, x, q, q_stride, LANES, PARTS, sums);
#else
        UNROLL(4)
        for (ptrdiff_t r = 0; r < rows; r++) {
            V y = VOP(load)(q + r * q_stride);
            UNROLL(32)
            for (ptrdiff_t j = 0; j < keys; j++) sums[r * keys + j] = FMA(x[j], y, sums[r * keys + j]);
        }
#endif
        q += LANES * PARTS;
        HIDE(q);
    }
    if (prefetch && straight)
        prefetch_end_straight(prefetch, &current);
    else if (prefetch)
        *prefetch = current;
    const ptrdiff_t left = head_dim - i * NUMBERS;
#if PARTS > 1
    if (0 < left && left <= LANES) {
        UNROLL(32)
        for (ptrdiff_t j = 0; j < keys; j++) x[j] = LOAD_PART(KEY(j), left);
        FROM(add_dots)(rows, keys, x, q, q_stride, left, 1, sums);
        return;
    }
#endif
    if (left <= 0) return;
    UNROLL(32)
    for (ptrdiff_t j = 0; j < keys; j++) x[j] = LOAD_PART_WIDE(KEY(j), left);
#if PARTS > 1
    FROM(add_dots)(rows, keys, x, q, q_stride, 2 * LANES, PARTS, sums);
#else
    UNROLL(4)
    for (ptrdiff_t r = 0; r < rows; r++) {
        V y = NUMBERS > 1 ? VOP(load)(q + r * q_stride) : VOP(load_part)(q + r * q_stride, left);
        UNROLL(32)
        for (ptrdiff_t j = 0; j < keys; j++) sums[r * keys + j] = FMA(x[j], y, sums[r * keys + j]);
    }
#endif
#undef KEY
}

/* The first step of adding up their lanes. */
INLINE void FROM(add_pairs_of)(const ptrdiff_t count, const V *sums, V *pairs)
{
    UNROLL(32)
    for (ptrdiff_t i = 0; i < (count + LANES - 1) / LANES * LANES / PAIR; i++)
        pairs[i] = ADD_PAIR(sums + PAIR * i);
}

/* The other steps. */
INLINE void FROM(store_dots)(const ptrdiff_t rows, const ptrdiff_t keys, ptrdiff_t last, const V *pairs,
                             T *logits)
{
    T dots[DOT_SUMS + LANES];
    UNROLL(32)
    for (ptrdiff_t begin = 0; begin < rows * keys; begin += LANES)
        VOP(store)(dots + begin, TOTALS(pairs + begin / PAIR));
    UNROLL(4)
    for (ptrdiff_t r = 0; r < rows; r++, logits += AM_FLASH_TILE) {
        if (last + 1 >= keys) {
            memcpy(logits, dots + r * keys, (size_t)keys * sizeof *dots);
            continue;
        }
        for (ptrdiff_t j = 0; j <= last; j++) logits[j] = dots[r * keys + j];
    }
}

/* Logits of some rows and keys. */
INLINE void FROM(dots_of)(const ptrdiff_t rows, const ptrdiff_t keys, const FROM(factors) factors,
                          ptrdiff_t last, T *logits, prefetch_lines *prefetch)
{
    V sums[DOT_SUMS + LANES], pairs[DOT_SUMS + LANES];
    FROM(multiply)(rows, keys, factors, last, sums, prefetch, false);
    FROM(add_pairs_of)(rows * keys, sums, pairs);
    FROM(store_dots)(rows, keys, last, pairs, logits);
}

/* Logits of all keys. It takes `most` at a time, and at the end of a run as many, of which some may not be
 * there. Where rows take turns, it prefetches once in `turns` times, first after `wait` times without. The
 * steps that add up lanes wait for one another: if the registers have room, all but the first are left until
 * the next keys are multiplied. Lines are counted one by one for one row, which waits for memory: counted at
 * once, float32 takes 1.04 to 1.08 of the time there. */
INLINE void FROM(dots_of_rows)(const ptrdiff_t rows, const ptrdiff_t most, const FROM(dot_operands) x,
                               prefetch_lines *prefetch, ptrdiff_t wait, const ptrdiff_t turns)
{
    const ptrdiff_t head_dim = x.first.head_dim, stride = x.first.stride, run = x.runs->rows,
                    lines = (head_dim * (ptrdiff_t)sizeof(S) + CACHE_LINE - 1) / CACHE_LINE;
    const T *q = x.first.q;
    const W *k = x.first.k;
    const void *const *next = x.runs->next;
    ptrdiff_t keys = x.keys;
    T *logits = x.logits;
    V sums[DOT_SUMS + LANES], pairs[DOT_SUMS + LANES];
    T *before = NULL;
    for (ptrdiff_t left = x.in_first_run;; left = keys < run ? keys : run) {
        keys -= left;
        for (; left >= most; left -= most, k += most * stride, logits += most) {
            const bool prefetches = turns == 1 || wait == 0;
            wait = prefetches ? turns - 1 : wait - 1;
            const FROM(factors) some = {.head_dim = head_dim, .q = q, .k = k, .stride = stride};
            if (!prefetches)
                FROM(multiply)(rows, most, some, most - 1, sums, NULL, false);
            else if (rows > 1 && prefetch_is_straight(prefetch, most * lines))
                FROM(multiply)(rows, most, some, most - 1, sums, prefetch, true);
            else
                FROM(multiply)(rows, most, some, most - 1, sums, prefetch, false);
            if (PAIR > 1 && before) FROM(store_dots)(rows, most, most - 1, pairs, before);
            FROM(add_pairs_of)(rows * most, sums, pairs);
            if (PAIR == 1) FROM(store_dots)(rows, most, most - 1, pairs, logits);
            before = logits;
        }
        if (left > 0)
            FROM(dots_of)(rows, most, (FROM(factors)){.head_dim = head_dim, .q = q, .k = k, .stride = stride},
                          left - 1, logits, prefetch);
        if (keys == 0) break;
        logits += left;
        k = (const W *)((const char *)*next++ + x.runs->offset);
    }
    if (PAIR > 1 && before) FROM(store_dots)(rows, most, most - 1, pairs, before);
}

/* Logits of one to four rows, which prefetch each time. */
static __attribute__((nonnull)) void FROM(dots)(ptrdiff_t rows, const FROM(dot_operands) * x,
                                                prefetch_lines *prefetch)
{
#define DOTS(n, most)                                                                                        \
    case n: FROM(dots_of_rows)(n, most, *x, prefetch, 0, 1); break;
/* 2, 4 or 8, but at most n, which divides most runs: five or six keys at a time would leave a rest. */
#define DIVISOR(n) ((n) >= 8 ? 8 : (n) >= 4 ? 4 : 2)
    switch (rows) {
        DOTS(1, 8)
        DOTS(2, DIVISOR(MOST_SUMS / 2))
        DOTS(3, DIVISOR(MOST_SUMS / 3))
        DOTS(4, MOST_SUMS / 4)
    }
#undef DIVISOR
#undef DOTS
}

/* Logits of four of more rows, which take turns at prefetching: if the first four prefetched all, they
 * would wait for memory, which would then be idle while the others are multiplied. */
static __attribute__((nonnull)) void
FROM(dots_of_four)(const FROM(dot_operands) * x, prefetch_lines *prefetch, ptrdiff_t wait, ptrdiff_t turns)
{
    FROM(dots_of_rows)(4, MOST_SUMS / 4, *x, prefetch, wait, turns);
}

/* Where value 0 of a tile would be if all were in the run of value i. */
static inline const S *FROM(origin)(const am_flash_tile *tile, ptrdiff_t i)
{
    return (const S *)((uintptr_t)row_at(&tile->v, i) - (uintptr_t)(i * tile->v.stride));
}

/* Logits of the live keys of a tile. */
static void FROM(find_logits)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch)
{
    ptrdiff_t begin, end;
    find_live(block, tile, &begin, &end);
    prefetch_lines none = prefetch_nothing(tile->k.data);
    const T *q = QUERIES(block);
#ifdef HALVES /* sums of each row of halves, before they are joined */
    T sums[HALVES > 1 ? HALVES * AM_FLASH_ROWS * AM_FLASH_TILE : 1];
    am_flash_rows halves = *block;
    const am_flash_rows *of_rows = block;
    halves.rows *= HALVES;
    if (HALVES > 1) halves.logits = sums;
    block = &halves;
#endif
    const row_runs runs = runs_behind(&tile->k, begin, 1, 0);
    /* Turns would take 1.02 of the time for keys of one byte, of which memory delivers enough. */
    const ptrdiff_t turns = sizeof(S) > 1 ? block->rows / 4 : 1;
#ifdef WIDEN
    W widened[SOME_KEYS * AM_MOST_WIDENED];
    const ptrdiff_t k_stride = whole_f8(block->head_dim);
#else
    const ptrdiff_t k_stride = tile->k.stride / (ptrdiff_t)sizeof(S);
    /* More than four rows read keys again. Whole tiles that fill a first-level cache of 32 KB would take 1.06
     * of the time. */
    const bool by_runs =
        block->rows > 4 && AM_FLASH_TILE * block->head_dim * (ptrdiff_t)sizeof(S) >= 32 << 10;
#endif
    for (ptrdiff_t next; begin < end; begin = next) {
        const S *k = row_at(&tile->k, begin);
        ptrdiff_t first = end_of_run(&tile->k, begin, end) - begin;
#ifdef WIDEN
        if (first > SOME_KEYS) first = SOME_KEYS;
        const W *from = widened;
        WIDEN(widened, k_stride, k, tile->k.stride / (ptrdiff_t)sizeof(S), first, block->head_dim);
        next = begin + first;
#else
        const W *from = k;
        next = by_runs ? begin + first : end;
#endif
        for (ptrdiff_t r = 0; r < block->rows; r += 4) {
            const ptrdiff_t rows = block->rows - r;
            const FROM(dot_operands) x = {.first = {.head_dim = block->head_dim,
                                                    .q = q + r * QUERY_STEP(block->head_dim),
                                                    .k = from,
                                                    .stride = k_stride},
                                          .keys = next - begin,
                                          .in_first_run = first,
                                          .runs = &runs,
                                          .logits = (T *)block->logits + r * AM_FLASH_TILE + begin};
            if (turns > 1 && rows >= 4)
                FROM(dots_of_four)(&x, prefetch, r / 4, turns);
            else
                FROM(dots)(rows < 4 ? rows : 4, &x, r == 0 ? prefetch : &none);
        }
    }
#ifdef HALVES
    for (ptrdiff_t r = 0; HALVES > 1 && r < of_rows->rows; r++) {
        const T *high = sums + HALVES * r * AM_FLASH_TILE, *low = high + AM_FLASH_TILE;
        T *to = (T *)of_rows->logits + r * AM_FLASH_TILE;
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES)
            VOP(store)(to + i, VOP(fma)(VOP(set1)(256), VOP(load)(high + i), VOP(load)(low + i)));
    }
#endif
}

/* Multiplies products by the units of their rows, or P by UNIT, and both by the scales of keys or values. P
 * of a dead pair is 0, and stays so whatever is its scale. */
INLINE void FROM(scale_columns)(const am_flash_rows *block, const T *scales, const bool of_p)
{
    T *row = block->logits;
    if (UNIT == 1 && NUMBERS == 1 && !scales) return;
    for (ptrdiff_t r = 0; r < block->rows; r++, row += AM_FLASH_TILE) {
        const V unit = VOP(set1)(of_p ? UNIT : ROW_UNIT(block, r));
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
            const V scale = scales ? VOP(mul)(unit, VOP(load)(scales + i)) : unit, x = VOP(load)(row + i),
                    zero = VOP(set1)(0), y = VOP(mul)(x, scale);
            VOP(store)(row + i, of_p ? VOP(pick_equal)(x, zero, zero, y) : y);
        }
    }
}

#if NUMBERS == 1
/* O + P V of all runs of a tile, at once or one after the other. */
static inline void FROM(add_tile)(const am_flash_rows *block, const am_flash_tile *tile,
                                  prefetch_lines *prefetch)
{
    ptrdiff_t begin, end;
    find_live(block, tile, &begin, &end);
    const bool at_once = !tile->terms.live && AT_ONCE(block, tile);
    for (ptrdiff_t next; begin < end; begin = next) {
        next = at_once ? end : end_of_run(&tile->v, begin, end);
        FROM(add_values)(block, tile, begin, next, FROM(origin)(tile, begin), prefetch);
    }
}
#endif

/* Logits and P, then values. Keys of a head may lie far apart, where hardware does not prefetch them. So the
 * loop over keys prefetches their values, and the loop over values the next keys, in the order of memory. */
static void FROM(step_unpacked)(const am_flash_rows *const *blocks, const am_flash_tile *tiles,
                                ptrdiff_t heads)
{
    prefetch_runs runs;
    prefetch_lines prefetch = lines_behind_keys(blocks, tiles, heads, &runs);
    for (ptrdiff_t h = 0; h < heads; h++) {
        const am_flash_tile *tile = &tiles[h];
        assert(tile->layout == AM_ROWS);
        FROM(find_logits)(blocks[h], tile, &prefetch);
        FROM(scale_columns)(blocks[h], tile->k_scales, false);
        FIND_P(blocks[h], tile);
        if (!has_values(blocks)) continue;
#if NUMBERS == 1
        FROM(scale_columns)(blocks[h], tile->v_scales, true);
#endif
    }
    if (!has_values(blocks)) return;
    prefetch = lines_of_next_keys(tiles, &runs);
    for (ptrdiff_t h = 0; h < heads; h++) FROM(add_tile)(blocks[h], &tiles[h], &prefetch);
}

#undef AT_ONCE
#undef HALVES
#undef MOST_SUMS
#undef FIND_P
#undef PARTS
#undef PART_OF
#undef NUMBERS
#undef QUERIES
#undef QUERY_STEP
#undef SUMS
#undef PAIR
#undef ADD_PAIR
#undef TOTALS
#undef ROW_UNIT
#undef S
#undef W
#undef WIDEN
#undef UNIT
#undef LOAD_WIDE
#undef LOAD_PART_WIDE
#undef LOAD_PART
#undef FMA
#undef STEP
#undef FROM
