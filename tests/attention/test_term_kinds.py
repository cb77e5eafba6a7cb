"""Kinds of logit terms that the package does not have: which compile, and what their functions are given."""

import shutil
import subprocess
import sysconfig

import pytest
from environment import ROOT

CC = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
KINDS = ROOT / "csrc/core/attention/terms/kinds.h"
LAST = 'ARRAY(GRID_BIAS, ("grid_bias", AM_ADDS_BY_POINT, no_bound), (1, H, 1, N))'
pytestmark = pytest.mark.skipif(not CC or not KINDS.exists(), reason="needs a C compiler and the sources")


def run_with(folder, rows: str, *command: str):
    """Runs the compiler on sources in which these rows follow the last one."""
    place = folder / KINDS.relative_to(ROOT / "csrc")
    place.parent.mkdir(parents=True, exist_ok=True)
    table = KINDS.read_text()
    assert table.count(LAST) == 1
    place.write_text(table.replace(LAST, f"{LAST} {rows}"))
    flags = ["-std=c11", "-Wall", "-Wextra", f"-I{folder}", f"-I{ROOT / 'csrc'}"]
    return subprocess.run([CC, *flags, *command], capture_output=True, text=True, timeout=120)


ROWS = {
    # Right
    'LINE(MORE, ("m", AM_ADDS_BY_KEY, no_bound), (R, KV, K, alibi_add))': None,
    'LINE(MORE, ("m", AM_ADDS_BY_KEY, no_bound), (1, 1, N, alibi_add))': None,
    'LINE(MORE, ("m", AM_ADDS_BY_DISTANCE, no_bound), (R, H, N, alibi_add))': None,
    'LEARNED(MORE, ("m", AM_ADDS_BY_KEY, no_bound), (K, alibi_add, relative_bias_learn))': None,
    # A gradient of one batch row
    'LINE(MORE, ("m", AM_ADDS_BY_KEY, no_bound), (R, H, K, alibi_add), .learn = relative_bias_learn)': "overrid",
    'LEARNED(MORE, ("m", AM_ADDS_BY_KEY, no_bound), (K, alibi_add, relative_bias_learn), .axes = {2})': "overrid",
    'LEARNED(MORE, ("m", AM_CAPS, no_bound), (N, alibi_add, relative_bias_learn))': "MORE: what acts so has no lines",
    # Axes that nobody reads so
    'LINE(MORE, ("m", AM_ADDS_BY_KEY, no_bound), (B, H, K, alibi_add))': "MORE: lines have axes R, H or KV",
    'LINE(MORE, ("m", AM_ADDS_BY_KEY, no_bound), (R, K, K, alibi_add))': "MORE: lines have axes R, H or KV",
    'LINE(MORE, ("m", AM_ADDS_BY_DISTANCE, no_bound), (R, H, K, alibi_add))': "last axis of a line is N, or by key K",
    'LINE(MORE, ("m", AM_ADDS_BY_KEY, no_bound), (R, H, Q, alibi_add))': "last axis of a line is N, or by key K",
    'LINE(MORE, ("m", AM_ADDS_PAIRS, no_bound), (R, H, K, alibi_add))': "MORE: what acts so has no lines",
    'ARRAY(MORE, ("m", AM_ADDS_BY_KEY, no_bound), (1, H, 1, K))': "MORE: what acts so is no ARRAY",
    'ARRAY(MORE, ("m", AM_ADDS_PAIRS, no_bound), (R, H, Q, K))': "MORE: pairs have axes B, H, Q, K",
    'ARRAY(MORE, ("m", AM_SINKS, no_bound), (B, H, 1, N))': "MORE: what acts so has axes 1, H, 1, N",
    'ARRAY(MORE, ("m", AM_ADDS_BY_POINT, no_bound), (R, H, 1, N))': "MORE: what acts so has axes 1, H, 1, N",
    'NUMBER(MORE, ("m", AM_ADDS_BY_KEY, no_bound))': "MORE: what acts so has an array",
    # What every row has
    'NUMBER(MORE, ("m", AM_CAPS))': "arguments",
    'ARRAY(MORE, ("m", AM_ADDS_PAIRS), (B, H, Q, K))': "arguments",
    # Functions that nobody calls
    'NUMBER(MORE, ("m", AM_CAPS, no_bound), .add = alibi_add)': "overrid",
    'ARRAY(MORE, ("m", AM_ADDS_PAIRS, no_bound), (B, H, Q, K), .finite = true)': "overrid",
    # The second of a kind of which there is one
    'NUMBER(MORE, ("m", AM_CAPS, no_bound))': "several kinds that act alike",
    'ARRAY(MORE, ("m", AM_ADDS_PAIRS, no_bound), (B, H, Q, K))': "several kinds that act alike",
    'ARRAY(MORE, ("m", AM_ADDS_BY_POINT, no_bound), (1, H, 1, N))': "several kinds that act alike",
}


@pytest.mark.parametrize("row", ROWS)
def test_what_cannot_be_combined_does_not_compile(tmp_path, row):
    source = str(ROOT / "csrc/core/attention/terms/kinds.c")
    result = run_with(tmp_path, row, "-fsyntax-only", source)
    if ROWS[row] is None:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode != 0
        assert ROWS[row] in result.stderr


PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/attention/terms/terms.h"

/* The terms by key of this test: the sum of what they add is that of two arrays, [rows][key heads][keys] and
 * [heads][keys]. am_line_index ends the program if it is asked for what lies beyond. */
static void keyed_add(const am_line *line, double *numbers)
{
    for (ptrdiff_t i = 0; i < line->count; i++) numbers[i] += am_line_number(line, line->first + i);
}
static void keyed_learn(const am_line *line, const double *d_numbers, am_line_sums *sums)
{
    const am_range touched = {am_line_index(line, line->first),
                              am_line_index(line, line->first + line->count - 1) + 1};
    double *to = am_line_sums_in(sums, touched);
    for (ptrdiff_t i = 0; i < line->count; i++) to[am_line_index(line, line->first + i)] += d_numbers[i];
}

#include "core/attention/terms/kinds.c"
#include "core/attention/terms/terms.c"
#include "core/attention/terms/lines.c"

am_status am_await(am_team *team, const atomic_ptrdiff_t *number, ptrdiff_t value)
{
    return (void)team, (void)number, (void)value, AM_OK;
}
ptrdiff_t am_sequence_of(const ptrdiff_t *starts, ptrdiff_t sequences, ptrdiff_t token)
{
    for (ptrdiff_t s = 0; s < sequences; s++)
        if (token < starts[s + 1]) return s;
    abort();
}
static void add_rows(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t src_stride, ptrdiff_t rows,
                     ptrdiff_t columns)
{
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < columns; c++)
            ((double *)dst)[r * dst_stride + c] += ((const double *)src)[r * src_stride + c];
}
static bool load_rows(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t src_stride, ptrdiff_t rows,
                      ptrdiff_t columns)
{
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < columns; c++)
            ((double *)dst)[r * dst_stride + c] = ((const double *)src)[r * src_stride + c];
    return true;
}

enum { ROWS = 2, HEADS = 4, KV = 2, KEYS = 70, QUERIES = 6, TILE_SIZE = AM_FLASH_TILE };

static void check(bool right, const char *what)
{
    if (!right) printf("%s\n", what), exit(1);
}

/* Batch rows with all keys, or sequences one behind the other, in a tile that holds keys of both. */
static void try(bool packed)
{
    static const ptrdiff_t key_starts[] = {0, 40, KEYS}, query_starts[] = {0, 2, QUERIES};
    const ptrdiff_t longest = packed ? 40 : KEYS;
    double *by_row = malloc(sizeof *by_row * (size_t)(ROWS * KV * longest)); /* ends where its numbers do */
    double *by_head = malloc(sizeof *by_head * (size_t)(HEADS * longest));
    double gradient[HEADS * KEYS] = {0}, right[HEADS * KEYS] = {0};
    for (int i = 0; i < ROWS * KV * longest; i++) by_row[i] = 1000 + i;
    for (int i = 0; i < HEADS * longest; i++) by_head[i] = 1e6 * (1 + i);
    const ptrdiff_t size = sizeof(double);
    static const ptrdiff_t lengths[] = {40, KEYS - 40};
    static const int32_t pages[1];
    const am_attn attn = {
        .batch = packed ? 1 : ROWS, .heads = HEADS, .kv_heads = KV, .queries = QUERIES, .keys = KEYS,
        .pages = packed ? (am_pages){.table = pages, .lengths = lengths, .starts = key_starts,
                                     .sequences = ROWS} : (am_pages){0},
        .terms = {.count = 2,
                  .list = {{.kind = AM_LOGIT_KEYED,
                            .array = {.data = (char *)by_row, .type = AM_FLOAT64,
                                      .shape = {.batch = ROWS, .head = KV, .token = 1, .channel = longest},
                                      .stride = {.batch = KV * longest * size, .head = longest * size,
                                                 .channel = size}}},
                           {.kind = AM_LOGIT_TAUGHT, .gradient = gradient,
                            .array = {.data = (char *)by_head, .type = AM_FLOAT64,
                                      .shape = {.batch = 1, .head = HEADS, .token = 1, .channel = longest},
                                      .stride = {.head = longest * size, .channel = size}}}},
                  .places = {.starts = packed ? query_starts : NULL, .sequences = ROWS}},
    };
    for (int i = 0; i < 2; i++) check(am_term_fits(&attn, &attn.terms.list[i]), "does not fit");
    const am_arithmetic arithmetic = {.load_rows = load_rows, .add_rows = add_rows};
    const am_attn_base base = {.attn = &attn, .arithmetic = &arithmetic, .type = AM_FLOAT64, .size = size,
                               .heads_per_kv = HEADS / KV, .unit = AM_LOG2_E, .terms = am_find_terms(&attn)};
    am_line_gradients gradients;
    check(am_line_gradients_make(&gradients, &base) == AM_OK, "memory");
    for (ptrdiff_t b = 0; b < attn.batch; b++) {
        for (ptrdiff_t head = 0; head < HEADS; head++) {
            am_attn_place at = {.b = b, .kv_head = head / (HEADS / KV), .head = head, .heads = 1,
                                .queries = QUERIES, .rows = QUERIES};
            ptrdiff_t used = 0;
            am_line_sums_take(&gradients, NULL, &used);
            char *memory = aligned_alloc(64, (size_t)(used + 63) / 64 * 64);
            used = 0;
            am_line_sums *sums = am_line_sums_take(&gradients, memory, &used);
            for (ptrdiff_t k = 0; k < KEYS; k += TILE_SIZE) {
                static char bias[8 * TILE_SIZE * (TILE_SIZE + 1)], row[8 * 2 * TILE_SIZE];
                static double d_s[QUERIES * TILE_SIZE];
                uint64_t live[QUERIES] = {0};
                const am_logit_scratch scratch = {.bias = bias, .row = row, .live = live};
                const am_range keys = {k, am_min(k + TILE_SIZE, KEYS)};
                am_added added = {NULL, TILE_SIZE};
                am_add_lines(&base, &at, k, &scratch, &added);
                memset(d_s, 0, sizeof d_s);
                for (ptrdiff_t q = 0; q < QUERIES; q++) {
                    const ptrdiff_t x = packed ? am_sequence_of(query_starts, ROWS, q) : b;
                    const am_range own = am_keys_of_row(&attn, x);
                    for (ptrdiff_t i = am_max(keys.begin, own.begin); i < am_min(keys.end, own.end); i++) {
                        const ptrdiff_t at_key = i - own.begin;
                        const double got = ((const double *)added.rows)[q * added.stride + i - k];
                        const double wanted = by_row[(x * KV + at.kv_head) * longest + at_key] +
                                              by_head[head * longest + at_key];
                        check(fabs(got - wanted) < 1e-6, "a number differs");
                        d_s[q * TILE_SIZE + i - k] = (double)(1 + q + 7 * i);
                        right[head * longest + at_key] += (double)(1 + q + 7 * i);
                    }
                }
                am_learn_lines(&gradients, &at, keys, (const char *)d_s, row, sums);
            }
            check(am_end_line_sums(&gradients, &at, 0, sums, NULL) == AM_OK, "sums");
            free(memory);
        }
    }
    for (int i = 0; i < HEADS * longest; i++) check(fabs(gradient[i] - right[i]) < 1e-6, "a gradient");
    am_line_gradients_free(&gradients);
    free(by_row), free(by_head);
}

int main(void)
{
    try(false);
    try(true);
    return 0;
}
"""


def test_lines_end_where_their_arrays_do(tmp_path):
    """Terms by key, of key heads, and learned; tiles hold more keys than there are, or of other sequences."""
    rows = """LINE(KEYED, ("keyed", AM_ADDS_BY_KEY, no_bound), (R, KV, K, keyed_add))
        LEARNED(TAUGHT, ("taught", AM_ADDS_BY_KEY, no_bound), (K, keyed_add, keyed_learn))"""
    (tmp_path / "program.c").write_text(PROGRAM)
    program = tmp_path / "program"
    points = ROOT / "csrc/core/attention/terms/points.c"
    sources = (str(tmp_path / "program.c"), str(points), "-o", str(program), "-lm")
    for sanitizer in (
        ["-fsanitize=address,undefined", "-fno-sanitize-recover"],
        [],
    ):  # which may lack a library
        result = run_with(tmp_path, " ".join(rows.split()), "-g", *sanitizer, *sources)
        if result.returncode == 0:
            break
    assert result.returncode == 0, result.stderr
    result = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
