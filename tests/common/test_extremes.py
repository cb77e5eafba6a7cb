"""Huge inputs that take no memory, because strides are zero, soon lead to an error or a result, never to a crash."""

import subprocess
import sys

import numpy as np
import pytest
from environment import SANITIZED
from numpy.lib.stride_tricks import as_strided

import attnmask


def endless(*shape: int, value=0, dtype=np.float16) -> np.ndarray:
    return as_strided(np.full(1, value, dtype), shape, (0,) * len(shape))


def attend(q_shape, k_shape, v_shape, dtype=np.float16):
    shapes = q_shape, k_shape, v_shape
    return attnmask.flash_attention(*(endless(*shape, dtype=dtype) for shape in shapes))


def test_what_is_empty_takes_no_time():
    """The inputs have more rows than any loop could visit."""
    ids = np.zeros((2**40, 0), np.int32)
    assert attnmask.positions_from_segment_ids(ids).shape == ids.shape
    assert attnmask.segment_ids_to_cu_seqlens(ids).max() == 0
    many = (2**20, 2**20, 2**20, 0)
    assert attnmask.dropout_keep_mask(0, 0.5, many).shape == many
    assert attend((1, 2**50, 1, 8), (1, 2**50, 1, 8), (1, 2**50, 1, 0)).shape == (1, 2**50, 1, 0)
    few, lse = endless(1, 3, 1, 0), endless(1, 1, 3, dtype=np.float32)
    long = endless(1, 2**50, 1, 0)
    assert attnmask.flash_attention_bwd(few, few, long, long, few, lse).key.shape == long.shape


def test_the_first_large_id_is_the_last_one_looked_at():
    with pytest.raises(ValueError, match=r"segment_ids must be below max_segments = 128, got 200 at index"):
        attnmask.segment_ids_to_cu_seqlens(endless(2**40, 1, value=200, dtype=np.int32))


def test_pairs_beyond_all_numbers():
    for pairs in ([0, 2**64 - 1], [2**63, 2**63 + 5]):
        with pytest.raises(OverflowError, match=r"pairs must be below 2\*\*63, got uint64 array"):
            attnmask.pairs_to_cu_seqlens(np.array(pairs, np.uint64))
    most = np.array([0, 2**63 - 1], np.uint64)
    np.testing.assert_array_equal(attnmask.pairs_to_cu_seqlens(most), most)


def test_uneven_lists_are_told_by_their_name():
    with pytest.raises(ValueError, match="cu_seqlens must be array_like"):
        attnmask.prepare_lens([[0], [1, 2]])
    with pytest.raises(ValueError, match="pairs must be a 1-D array"):
        attnmask.pairs_to_cu_seqlens([[]])


LONG_AMONG_MANY = """
import attnmask, numpy as np
from numpy.lib.stride_tricks import as_strided

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmPeak"))

count, keys = 20_000, 2**23
tokens = as_strided(np.ones(1, np.float16), (1, 2 * count + keys, 1, 1), (0,) * 4)
starts = np.arange(count + 2)
ends = np.append(2 * starts[:-1], 2 * count + keys)
before = peak()
out = attnmask.flash_attention(tokens[:, : count + 1], tokens, tokens, cum_seqlens_q=starts, cum_seqlens_k=ends)
print((out == 1).all(), (peak() - before) >> 20)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or SANITIZED, reason="asks Linux for the memory of a plain process"
)
def test_a_long_sequence_among_many():
    """Its keys are split, and only this sequence needs accumulators of splits."""
    command = [sys.executable, "-c", LONG_AMONG_MANY]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["True", "0"]  # GB


def test_many_short_segments():
    """The search for the keys of one segment must not visit all segments."""
    ids = np.repeat(np.arange(20_000, dtype=np.int32), 5)[None]
    tokens = endless(1, ids.size, 1, 1, value=1)
    out = attnmask.flash_attention(tokens, tokens, tokens, q_segment_ids=ids, kv_segment_ids=ids)
    assert (out == 1).all()
