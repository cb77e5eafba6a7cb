"""attnmask.jax: `MaskInfo` as a pytree, and attention as a function of JAX."""

import numpy as np
import pytest
from random_masks import every_mask

import attnmask
from attnmask import MaskInfo

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402

IDS = np.array([[0, 0, 0, 1, 1, -1], [0, 0, 1, 1, 2, 2]], np.int32)
MASKS = every_mask(6, 5) | {
    "no base": MaskInfo(q_segment_ids=IDS),
    "no rows": MaskInfo.from_segments(np.zeros((0, 6), int)),
}
each_mask = pytest.mark.parametrize("info", MASKS.values(), ids=MASKS)


@each_mask
def test_round_trip(info):
    leaves, structure = jax.tree.flatten(info)
    assert len(leaves) == sum(child is not None for child in info.tree_flatten()[0])
    again = jax.tree.unflatten(structure, leaves)
    assert again == info
    assert jax.tree.structure(again) == structure
    assert jax.tree.map(lambda leaf: leaf, info) == info
    assert jax.tree.map(jax.numpy.asarray, info) == info


@each_mask
def test_through_jit(info):
    """A mask that passes through jit is the same, and its arrays are NumPy's."""
    through = jax.jit(lambda mask: mask)(info)
    assert through == info
    assert repr(through.tree_flatten()[1]) == repr(info.tree_flatten()[1])
    for array in (through.q_segment_ids, through.q_attention_mask):
        assert array is None or type(array) is np.ndarray


def test_leaves_may_be_anything():
    """JAX replaces arrays by numbers, shapes, None and plain objects."""
    info = MASKS["positions"]
    leaves, structure = jax.tree.flatten(info)
    for make in (lambda leaf: object(), np.shape, lambda leaf: None, lambda leaf: 0, lambda leaf: [leaf]):
        jax.tree.map(make, info)
    holes = jax.tree.unflatten(structure, [None] * len(leaves))
    assert jax.tree.leaves(holes) == []
    assert jax.tree.leaves(jax.eval_shape(lambda mask: mask, info)) == [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves
    ]


def test_what_compiles_again():
    """Masks with other arrays use the same compiled function; masks with other terms need another one."""
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


def test_reading_under_jit():
    """Reading a tracer is an error at that line. In a callback, or in a closure, a mask can be read."""
    info = MASKS["causal"]
    for read in (lambda mask: mask.attention_mask, lambda mask: mask.shape, lambda mask: mask.apply_causal()):
        with pytest.raises(TypeError, match="trace"):
            jax.jit(read)(info)
    assert jax.jit(lambda mask: mask.apply_causal())(MaskInfo.full(3)) == MaskInfo.causal(
        3
    )  # it holds no array
    live = int(info.attention_mask.sum())
    shape = jax.ShapeDtypeStruct(info.attention_mask.shape, bool)
    called = jax.jit(lambda mask: jax.pure_callback(lambda mask: mask.attention_mask, shape, mask).sum())
    assert int(called(info)) == live
    assert int(jax.jit(lambda: info.attention_mask.sum())()) == live


# Attention


@pytest.fixture
def arrays():
    """Query, key, value, bias and sinks."""
    rng = np.random.default_rng(0)
    shapes = (2, 5, 2, 3), (2, 6, 1, 3), (2, 6, 1, 4), (2, 5, 6), (2, 1)
    return [jax.numpy.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]


def test_bad_attention(arrays):
    query, key, value, *_ = arrays
    with pytest.raises(TypeError, match="return_lse must be True or False"):
        attnmask.jax.flash_attention(query, key, value, return_lse=1)
    for attend in (attnmask.jax.flash_attention, jax.jit(attnmask.jax.flash_attention)):
        with pytest.raises(ValueError, match="query must have at least three axes, got shape"):
            attend(query[0, 0], key, value)
        with pytest.raises(TypeError, match="key must be an array, got None"):
            attend(query, None, value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sliding_windows'"):
        attnmask.jax.flash_attention(query, key, value, sliding_windows=1)
    with pytest.raises(TypeError, match="sliding_window must be known at compile time"):
        jax.jit(lambda width: attnmask.jax.flash_attention(query, key, value, sliding_window=width))(3)


# Sums and merges


def test_types_of_sums():
    """Those of 64 bits are there if they are asked for; an integer that does not fit is an error when it runs."""
    x = np.full((1, 3, 1), 100, np.int8)
    add_up = attnmask.jax.chunk_global_cumsum
    for call in (add_up, jax.jit(add_up, static_argnames="output_dtype")):
        for enabled, dtype in ((False, np.float32), (True, np.float64)):
            with jax.enable_x64(enabled):
                assert call(x, output_dtype=np.float64).dtype == dtype
        assert call(x, output_dtype=np.int16).ravel().tolist() == [100, 200, 300]
        with pytest.raises(TypeError, match="output_dtype"):
            call(x, output_dtype="nonsense")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a sum of s does not fit"):
        jax.block_until_ready(jax.jit(add_up)(x))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda outs, lses: ([], []), ValueError, "outs must be one array or more"),
        (lambda outs, lses: (outs[0, 0, 0, 0, 0], lses), TypeError, "outs must be a sequence of arrays"),
        (lambda outs, lses: (outs[:2], lses[:1]), ValueError, "lses must be 2 arrays as outs, got 1"),
        (lambda outs, lses: (outs, lses[:, :, :1]), ValueError, r"lses\[0\] must be of shape"),
        (lambda outs, lses: ([outs[0], outs[1] > 0], lses[:2]), TypeError, r"outs\[1\] must be"),
    ],
)
def test_bad_merges(change, error, words):
    arrays = jax.numpy.ones((3, 2, 4, 2, 8)), jax.numpy.ones((3, 2, 2, 4))
    merge = lambda *arrays: attnmask.jax.merge_attention_states(*change(*arrays))  # noqa: E731
    for call in (merge, jax.jit(merge)):
        with pytest.raises(error, match=words):
            call(*arrays)
