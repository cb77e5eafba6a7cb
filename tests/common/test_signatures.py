"""Arguments that several functions take have the same names, defaults and kinds, in the same order."""

import copy
import inspect
import pickle
import re
import runpy

import numpy as np
import pytest
from environment import ROOT
from public_names import OFFERED, public_modules

import attnmask
from attnmask import MaskInfo
from attnmask._attention.arguments import ARGUMENTS, DEFAULTS, type_of

pytestmark = pytest.mark.levels("once")

OWN = {  # arguments of a function that are not those of attention
    "flash_attention": {"return_lse", "out"},
    "flash_attention_fwd": {"out"},
    "flash_attention_bwd": {
        "dout",
        "out",
        "lse",
        "dlse",
        "grad_bias",
        "grad_softmax_aux",
        "grad_relative_bias",
        "grad_grid_bias",
    },
    "flash_attention_vjp": {
        "return_lse",
        "grad_bias",
        "grad_softmax_aux",
        "grad_relative_bias",
        "grad_grid_bias",
    },
    "flash_attention_bwd_vjp": {
        "dout",
        "out",
        "lse",
        "dlse",
        "query_cotangent",
        "key_cotangent",
        "value_cotangent",
    },
    "flash_attention_jvp": {
        "query_tangent",
        "key_tangent",
        "value_tangent",
        "return_lse",
        "bias_tangent",
        "softmax_aux_tangent",
    },
}
DETAILS = (
    "q_positions", "kv_positions", "batch_axis_name", "qheads_axis_name", "kvheads_axis_name",
    "sequence_axis_name",
)  # fmt: skip


def parameters(function) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def shared(name: str) -> list[inspect.Parameter]:
    return [value for key, value in parameters(getattr(attnmask, name)).items() if key not in OWN[name]]


@pytest.mark.parametrize("name", OWN)
def test_attention_functions_take_the_same_arguments(name):
    """The same names, order, defaults and types; all but the arrays of the backward pass also by position."""
    assert shared(name) == shared("flash_attention")
    assert OWN[name] <= parameters(getattr(attnmask, name)).keys()


@pytest.mark.parametrize("name", ["attention_weights", "attention_statistics"])
def test_weights_take_what_concerns_them(name):
    """By name, with the same order, defaults and types."""
    taken, whole = parameters(getattr(attnmask, name)), parameters(attnmask.flash_attention)
    own = {"queries", "of", "heads", "lse"}
    rest = {"value", "dropout_prob", "dropout_seed", "normalize_output", "return_lse", "out"}
    rest |= {"fwd_params", "bwd_params", "precision", "logits_dtype"}
    assert taken.keys() - own == whole.keys() - rest
    assert [x for x in taken if x not in own][3:] == [x for x in whole if x in taken and x not in own][3:]
    for key in taken.keys() - own:
        assert (taken[key].default, taken[key].annotation) == (whole[key].default, whole[key].annotation)
        assert key in ("query", "key", "attention_mask") or taken[key].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("count", range(6, 12))
def test_arguments_of_a_cache_after_the_fifth_are_given_by_name(count):
    """Even those that would fit."""
    x = np.ones((1, 4, 1, 8), np.float32)
    with pytest.raises(TypeError, match=f"takes up to 5 positional arguments but {count} were given"):
        attnmask.flash_attention_with_kvcache(x, x, x, *[None] * (count - 3))
    assert attnmask.flash_attention_with_kvcache(x, x, x, None, None).shape == x.shape


MAKER = ROOT / ".ci" / "make_signatures.py"


@pytest.mark.skipif(not MAKER.exists(), reason="the tests run without the sources")
def test_type_checkers_read_what_follows_from_the_table():
    made = runpy.run_path(str(MAKER))
    for path, contents in made["STUBS"].items():
        assert path.read_text() == made["stub"](*contents), "run python .ci/make_signatures.py"


def test_signatures_follow_from_the_table():
    expected = [(row.name, row.default, type_of(row)) for row in ARGUMENTS]
    given = [(row.name, row.default, row.annotation) for row in shared("flash_attention")]
    assert given == expected


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_faces_show_all_arguments(framework):
    """In its own order, by name from `softmax_scale` on, and with the same defaults."""
    pytest.importorskip(framework)
    face = parameters(getattr(attnmask, framework).flash_attention)
    assert {name: row.default for name, row in face.items() if name in DEFAULTS} == DEFAULTS
    assert [name for name in face if name not in DEFAULTS][:4] == ["query", "key", "value", "return_lse"]
    assert face["softmax_scale"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", ["from_segments", "from_attention_mask", "from_cu_seqlens", "from_random"])
def test_constructors_take_the_same_details(name):
    """They take these arguments of `MaskInfo`, in the same order; only some of them by position."""
    expected, given = parameters(MaskInfo), parameters(getattr(MaskInfo, name))
    assert [key for key in given if key in DETAILS] == list(DETAILS)
    for key in DETAILS:
        assert (given[key].default, given[key].annotation) == (
            expected[key].default,
            expected[key].annotation,
        )


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_completion_shows_public_names_only(module):
    below = {name.rpartition(".")[2] for name in OFFERED if name.rpartition(".")[0] == module.__name__}
    assert set(dir(module)) == below | set(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


def test_public_names_are_known_by_where_they_are_imported_from():
    things = [getattr(attnmask, name) for name in attnmask.__all__ if name != "__version__"]
    plain = [thing for thing in things if not isinstance(thing, type) or issubclass(thing, Warning)]
    assert {thing.__module__ for thing in plain} == {"attnmask"}


INSTANCES = [
    attnmask.MaskInfo.causal(4),
    attnmask.MaskInfo.from_segments([[0, 0, 1]]).apply_causal().apply_kv_lengths([2]),
    attnmask.MaskInfo.from_random(2, 70).apply_sliding_window((np.array([1, 2]), 0)),
    attnmask.MaskInfo.from_function(lambda b, h, q, k: q >= k, 70, 70),
    attnmask.MaskInfo(q_segment_ids=[[0]]),
    attnmask.KVCache(2, 8, pages=4, dtype="float32"),
    attnmask.plan_shards(attnmask.MaskInfo.causal(8), 2),
    attnmask.MaskInfo.get_empty_sharding(),
    attnmask.FwdParams(),
    attnmask.BwdParams(),
    attnmask.FlashAttentionGrads(*[np.ones(1)] * 6),
    attnmask.LinearAttentionGrads(*[np.ones(1)] * 6),
    attnmask.ShortConvolutionGrads(*[np.ones(1)] * 4),
]


@pytest.mark.parametrize("thing", INSTANCES, ids=lambda thing: type(thing).__name__)
def test_classes_show_their_source_and_are_pickled_by_public_paths(thing):
    """Files may move; what is pickled stays."""
    kind = type(thing)
    assert re.search(rf"^class {kind.__name__}\b", inspect.getsource(kind), re.M)
    for protocol in range(0 if isinstance(thing, MaskInfo) else 2, pickle.HIGHEST_PROTOCOL + 1):
        text = pickle.dumps(thing, protocol)
        assert b"attnmask." not in text
        assert repr(pickle.loads(text)) == repr(thing)
    assert repr(copy.deepcopy(thing)) == repr(thing)


@pytest.mark.parametrize("thing", INSTANCES[:7], ids=lambda thing: type(thing).__name__)
def test_pickles_have_a_version(thing):
    state, made = thing.__getstate__(), copy.deepcopy(thing)
    made.__setstate__(state)
    assert (repr(made), getattr(made, "__dict__", {}).keys()) == (
        repr(thing),
        getattr(thing, "__dict__", {}).keys(),
    )
    if isinstance(thing, MaskInfo):
        assert pickle.loads(pickle.dumps(thing)) == thing
    for version, message in (
        (
            99,
            f"the {type(thing).__name__} was pickled by a later version of attnmask, in form 99; .* up to 1",
        ),
        ("1", "must have a version, got '1'"),
        (None, "must have a version, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            made.__setstate__(state | {"version": version})


class OwnMask(MaskInfo):
    pass


def test_subclasses_are_pickled_as_they_are():
    mask = OwnMask.causal(4)
    made = pickle.loads(pickle.dumps(mask))
    assert type(made) is OwnMask
    assert made == mask
