"""attnmask.jax: MaskInfo as a pytree."""

import sys

import numpy as np
import pytest

from attnmask import MaskInfo


def test_without_jax(monkeypatch):
    """The error says what is missing, and nothing is left half done."""
    monkeypatch.delitem(sys.modules, "attnmask.jax", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "jax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ImportError, match=r"attnmask\.jax needs JAX"):
        import attnmask.jax  # noqa: F401
    assert "attnmask.jax" not in sys.modules


IDS = np.array([[0, 0, 0, 1, 1, -1], [0, 0, 1, 1, 2, 2]], np.int32)
DENSE = np.random.default_rng(0).random((2, 3, 6, 6)) < 0.5
MASKS = {
    "no base": MaskInfo(q_segment_ids=IDS),
    "segments": MaskInfo.from_segments(IDS, q_positions=IDS),
    "packed": MaskInfo.from_cu_seqlens([0, 2, 2, 5], packed=True),
    "offsets by row": MaskInfo.from_segments(IDS).apply_causal(np.array([0, 2])).apply_chunked(2),
    "dense": MaskInfo.from_attention_mask(DENSE).apply_sliding_window((2, 1)),
    "floats": MaskInfo(DENSE.astype(np.float64)),
    "or": ~MaskInfo.from_segments(IDS) | MaskInfo.from_attention_mask(DENSE),
    "lengths": MaskInfo(DENSE).apply_kv_lengths([2, 5], q_len=2, sliding_window=3),
    "empty": MaskInfo.from_segments(np.zeros((0, 6), int)),
}
each_mask = pytest.mark.parametrize("info", MASKS.values(), ids=MASKS)


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax")
    import attnmask.jax  # noqa: F401

    return jax


@each_mask
def test_round_trip(jax, info):
    leaves, structure = jax.tree.flatten(info)
    assert len(leaves) == sum(child is not None for child in info.tree_flatten()[0])
    again = jax.tree.unflatten(structure, leaves)
    assert again == info
    assert jax.tree.structure(again) == structure
    assert jax.tree.map(lambda leaf: leaf, info) == info
    assert jax.tree.map(jax.numpy.asarray, info) == info


@each_mask
def test_through_jit(jax, info):
    """There and back; what comes back answers with NumPy's arrays as before."""
    through = jax.jit(lambda mask: mask)(info)
    assert through == info
    assert repr(through.tree_flatten()[1]) == repr(info.tree_flatten()[1])
    for array in (through.q_segment_ids, through.q_attention_mask):
        assert array is None or type(array) is np.ndarray


def test_leaves_may_be_anything(jax):
    """JAX puts numbers, shapes, None and bare objects where arrays were."""
    info = MASKS["segments"]
    leaves, structure = jax.tree.flatten(info)
    for make in (lambda leaf: object(), np.shape, lambda leaf: None, lambda leaf: 0, lambda leaf: [leaf]):
        jax.tree.map(make, info)
    holes = jax.tree.unflatten(structure, [None] * len(leaves))
    assert jax.tree.leaves(holes) == []
    assert jax.tree.leaves(jax.eval_shape(lambda mask: mask, info)) == [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves
    ]


def test_what_compiles_again(jax):
    """Other arrays do not, other terms do."""
    compiled = []

    @jax.jit
    def tokens(mask):
        compiled.append(mask)
        return (mask.tree_flatten()[0][1] >= 0).sum()

    segments, others = MaskInfo.from_segments(IDS), MaskInfo.from_segments(IDS[::-1] - 1)
    assert int(tokens(segments)) == 11
    assert int(tokens(others)) == 6
    assert len(compiled) == 1
    assert int(tokens(segments.apply_causal())) == 11
    assert len(compiled) == 2


def test_reading_under_jit(jax):
    """Tracers cannot be read: JAX's own error, at the line that does. In a callback, or closed over, a mask can."""
    info = MASKS["offsets by row"]
    for read in (lambda mask: mask.attention_mask, lambda mask: mask.shape, lambda mask: mask.apply_causal()):
        with pytest.raises(jax.errors.TracerArrayConversionError):
            jax.jit(read)(info)
    live = int(info.attention_mask.sum())
    shape = jax.ShapeDtypeStruct(info.attention_mask.shape, bool)
    called = jax.jit(lambda mask: jax.pure_callback(lambda mask: mask.attention_mask, shape, mask).sum())
    assert int(called(info)) == live
    assert int(jax.jit(lambda: info.attention_mask.sum())()) == live


def test_masks_of_jax_arrays(jax):
    """They are array_like as any others."""
    dense = MaskInfo(jax.numpy.tri(4)[None]).apply_sliding_window(1)
    assert dense == MaskInfo(np.tri(4)[None]).apply_sliding_window(1)
    assert jax.jit(lambda mask: mask)(dense) == dense
    assert MaskInfo.from_segments(jax.numpy.zeros((1, 4), int)).shape == (1, 4, 4)
