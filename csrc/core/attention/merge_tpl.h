/* merge_tpl.h – merges rows of partial attention results, and computes their gradients. */
#if !defined T || !defined TYPE || !defined FN || !defined EXP || !defined LOG
#    error "merge_tpl.h needs T and TYPE (what it computes in), FN(name), EXP(x) and LOG(x) (of a T)"
#endif

/* Finds the weight of each part in the row at `place` (batch, token, head); it is negative for a part without
 * a live pair. Returns the row's lse. */
static T FN(find_weights)(const am_merge *m, const ptrdiff_t *place, T *weights)
{
    T largest = -INFINITY, sum = 0;
    for (ptrdiff_t i = 0; i < m->count; i++) {
        const T lse = *(const T *)row_of(&m->parts[i].lse, place);
        weights[i] = lse == INFINITY ? -INFINITY : lse;
        if (weights[i] > largest || weights[i] != weights[i])
            largest = weights[i]; /* a NaN stays, since comparisons with it are false */
    }
    for (ptrdiff_t i = 0; i < m->count; i++) {
        if (weights[i] == -INFINITY) {
            weights[i] = -1;
            continue;
        }
        weights[i] = EXP(weights[i] - largest);
        sum += weights[i];
    }
    if (largest == -INFINITY) return largest;
    for (ptrdiff_t i = 0; i < m->count; i++) {
        if (!(weights[i] < 0)) weights[i] /= sum; /* which a NaN makes NaN */
    }
    return largest + LOG(sum);
}

/* Returns `count` channels of a row in the type T: in place if they are contiguous and of that type, else in
 * `scratch`. */
static const T *FN(channels)(const merge_job *job, const am_array *out, const ptrdiff_t *place,
                             ptrdiff_t first, ptrdiff_t count, T *scratch)
{
    const ptrdiff_t stride = out->stride.channel;
    const am_array row = am_one_row(row_of(out, place) + first * stride, out->type, stride, count);
    return am_read_rows(job->kernels, TYPE, 1, &row, count, scratch).data;
}

static void FN(weighted_sum)(const merge_job *job, const ptrdiff_t *place, const T *weights, ptrdiff_t first,
                             ptrdiff_t count, T *restrict sums)
{
    const am_merge *m = job->merge;
    bool any = false;
    T scratch[PIECE];
    for (ptrdiff_t c = 0; c < count; c++) sums[c] = (T)-0.0; /* -0.0 + x is x for every x, even -0.0 */
    for (ptrdiff_t i = 0; i < m->count; i++) {
        const T weight = weights[i];
        if (weight < 0) continue;
        const T *values = FN(channels)(job, &m->parts[i].out, place, first, count, scratch);
        for (ptrdiff_t c = 0; c < count; c++) sums[c] += weight * values[c];
        any = true;
    }
    if (!any) memset(sums, 0, (size_t)count * sizeof *sums);
}

static T FN(dot)(const T *a, const T *b, ptrdiff_t count)
{
    T lanes[LANES] = {0}, sum = 0;
    ptrdiff_t c = 0;
    for (; c + LANES <= count; c += LANES) {
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += a[c + lane] * b[c + lane];
    }
    for (int lane = 0; c < count; c++, lane++) lanes[lane] += a[c] * b[c];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

/* Writes `count` channels of each d out_i, and adds what they contribute to d out · out_i to `dots`. */
static void FN(channel_gradients)(const merge_job *job, const ptrdiff_t *place, ptrdiff_t row,
                                  const T *weights, ptrdiff_t first, ptrdiff_t count, T *dots)
{
    const am_merge *m = job->merge;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(m->type), channels = m->shape[3];
    T dout_scratch[PIECE], scratch[PIECE], d_part[PIECE];
    const T *dout = FN(channels)(job, &m->gradient->out, place, first, count, dout_scratch);
    for (ptrdiff_t i = 0; i < m->count; i++) {
        char *to = m->out + ((i * job->rows + row) * channels + first) * size;
        const T weight = weights[i];
        if (weight < 0) {
            memset(to, 0, (size_t)(count * size));
            continue;
        }
        const T *values = FN(channels)(job, &m->parts[i].out, place, first, count, scratch);
        dots[i] += FN(dot)(dout, values, count);
        for (ptrdiff_t c = 0; c < count; c++) d_part[c] = weight * dout[c];
        am_convert(job->kernels, m->type, to, TYPE, d_part, count);
    }
}

/* Writes each d lse_i. The weighted mean of the dots is d out · out. */
static void FN(lse_gradients)(const merge_job *job, const ptrdiff_t *place, const T *weights, const T *dots)
{
    const am_merge *m = job->merge;
    T mean = 0, dlse = m->gradient->lse.data ? *(const T *)row_of(&m->gradient->lse, place) : 0;
    for (ptrdiff_t i = 0; i < m->count; i++) {
        if (!(weights[i] < 0)) mean += weights[i] * dots[i];
    }
    T *to = (T *)m->lse + (place[0] * m->shape[2] + place[2]) * m->shape[1] + place[1];
    for (ptrdiff_t i = 0; i < m->count; i++)
        to[i * job->rows] = weights[i] < 0 ? 0 : weights[i] * (dots[i] - mean + dlse);
}

/* Merges rows begin … end - 1. Rows are numbered like those of the result: batch, token, head. */
static am_status FN(merge_rows)(const merge_job *job, ptrdiff_t begin, ptrdiff_t end, T *weights,
                                am_team *team)
{
    const am_merge *m = job->merge;
    const ptrdiff_t tokens = m->shape[1], heads = m->shape[2], channels = m->shape[3];
    const ptrdiff_t size = (ptrdiff_t)am_size_of(m->type);
    const bool backward = m->gradient;
    T *dots = weights + m->count;
    ptrdiff_t done = 0;
    for (ptrdiff_t row = begin; row < end; row++) {
        const ptrdiff_t place[3] = {row / heads / tokens, row / heads % tokens, row % heads};
        T lse = FN(find_weights)(m, place, weights);
        if (backward)
            memset(dots, 0, (size_t)m->count * sizeof *dots);
        else
            ((T *)m->lse)[(place[0] * heads + place[2]) * tokens + place[1]] = lse;
        for (ptrdiff_t first = 0; first < channels; first += PIECE) {
            T sums[PIECE];
            ptrdiff_t count = am_min(PIECE, channels - first);
            if (backward) {
                FN(channel_gradients)(job, place, row, weights, first, count, dots);
            } else {
                FN(weighted_sum)(job, place, weights, first, count, sums);
                am_convert(job->kernels, m->type, m->out + (row * channels + first) * size, TYPE, sums,
                           count);
            }
            done += m->count * count;
            if (done < CHECK) continue;
            am_status status = am_checkpoint(team);
            if (status != AM_OK) return status;
            done = 0;
        }
        if (backward) FN(lse_gradients)(job, place, weights, dots);
    }
    return AM_OK;
}

#undef T
#undef TYPE
#undef FN
#undef EXP
#undef LOG
