"""The operator of ONNX Runtime in examples/onnxruntime: ONNX's own vectors, the package's bits, and what it refuses.

The C header of ONNX Runtime is looked for in ORT_INCLUDE, by pkg-config, and where Debian has it.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import c_library as c
import numpy as np
import pytest
from environment import ROOT, SANITIZED

import attnmask
from attnmask._common.types import Array

SOURCE = ROOT / "examples/onnxruntime/attention.c"
DOMAIN = "com.attnmask"
CC = os.environ.get("CC", "cc")
F16, F32, F64 = np.float16, np.float32, np.float64
INPUTS = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]
INPUTS += ["cu_seqlens_q", "cu_seqlens_k", "q_segment_ids", "kv_segment_ids", "alibi_slopes"]

onnx = pytest.importorskip("onnx", minversion="1.23")  # earlier vectors have NaN for queries without keys
ort = pytest.importorskip("onnxruntime")


def header() -> Path | None:
    """The folder of onnxruntime_c_api.h."""
    folders = [os.environ.get("ORT_INCLUDE", ""), "/usr/include/onnxruntime"]
    if shutil.which("pkg-config"):
        asked = subprocess.run(
            ["pkg-config", "--variable=includedir", "libonnxruntime"], capture_output=True, text=True
        )
        folders.insert(1, asked.stdout.strip())
    found = [Path(f) for f in folders if f and (Path(f) / "onnxruntime_c_api.h").exists()]
    return found[0] if found else None


pytestmark = [
    c.needs_make,
    pytest.mark.usefixtures("level_of_the_library"),
    pytest.mark.skipif(not SOURCE.exists(), reason="the tests run without the examples"),
    pytest.mark.skipif(header() is None, reason="the C header of ONNX Runtime is not there: set ORT_INCLUDE"),
    pytest.mark.skipif(SANITIZED, reason="ONNX Runtime is not built for sanitizers"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("operator"), header())


def compiled(folder: Path, include: Path | None) -> Path:
    """The operator, built by the line in its comment under strict warnings."""
    line = re.search(r"^ \*\s+(cc .*)", SOURCE.read_text(), re.M).group(1)
    command = shlex.split(line.replace("-I/usr/include/onnxruntime", "").replace("attention.c", str(SOURCE)))
    build = c.built()
    command += ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-isystem", str(include)]
    command += [f"-I{ROOT}/include", f"-L{build}", f"-Wl,-rpath,{build}"]
    subprocess.run([CC, *command[1:]], cwd=folder, check=True, timeout=300)
    return folder / "libattnmask_onnx.so"


def session(library: Path, model: Any) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # errors are looked at below
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def model_of(node: Any, inputs: dict[str, Array], outputs: list[str]) -> Any:
    """A model of one node. bfloat16, which Python cannot hand over, enters and leaves as float32."""
    helper, types = onnx.helper, onnx.TensorProto
    own = onnx.NodeProto()
    own.CopyFrom(node)
    own.domain = DOMAIN
    nodes, given, results = [own], [], []
    numbers = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in inputs.items()}
    of_results = types.FLOAT if numbers["Q"] == types.BFLOAT16 else numbers["Q"]
    for name, x in inputs.items():
        narrow = numbers[name] == types.BFLOAT16
        given.append(
            helper.make_tensor_value_info(name, types.FLOAT if narrow else numbers[name], [None] * x.ndim)
        )
        if narrow:
            nodes.insert(0, helper.make_node("Cast", [name], [name + "_narrow"], to=types.BFLOAT16))
            for i, used in enumerate(own.input):
                own.input[i] = name + "_narrow" if used == name else used
    for name in outputs:
        results.append(helper.make_tensor_value_info(name, of_results, None))
        if numbers["Q"] == types.BFLOAT16:
            nodes.append(helper.make_node("Cast", [name + "_narrow"], [name], to=types.FLOAT))
            for i, made in enumerate(own.output):
                own.output[i] = name + "_narrow" if made == name else made
    graph = helper.make_graph(nodes, "graph", given, results)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def fed(inputs: dict[str, Array]) -> dict[str, Array]:
    return {name: x.astype(F32) if x.dtype.name == "bfloat16" else x for name, x in inputs.items()}


def made(library: Path, outputs: list[str], attributes: dict[str, Any], inputs: dict[str, Array]) -> Any:
    node = onnx.helper.make_node(
        "Attention", [name if name in inputs else "" for name in INPUTS], outputs, **attributes
    )
    return session(library, model_of(node, inputs, [name for name in outputs if name]))


def attend(
    library: Path, attributes: dict[str, Any] | None = None, outputs: tuple = ("Y",), **inputs: Array
) -> Any:
    results = made(library, list(outputs), attributes or {}, inputs).run(None, fed(inputs))
    return results[0] if len(results) == 1 else results


# ONNX's vectors


def vectors() -> dict[str, Any]:
    importlib.import_module("onnx.backend.test.case.node.attention")
    cases = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases  # collecting all takes 10 s
    return {
        case.name.removeprefix("test_attention_"): case
        for case in cases
        if case.name.startswith("test_attention_") and not case.name.endswith("_expanded")
    }


VECTORS = vectors()
# They ask for qk_matmul_output, the logits or weights of all pairs, which are never stored.
REFUSED = [
    "4d_with_qk_matmul",
    "4d_with_qk_matmul_bias",
    "4d_with_qk_matmul_softcap",
    "4d_with_qk_matmul_softmax",
    "4d_with_past_and_present_qk_matmul",
    "4d_with_past_and_present_qk_matmul_bias",
    "4d_with_past_and_present_qk_matmul_bias_3d_mask",
    "4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "4d_with_past_and_present_qk_matmul_bias_4d_mask",
    "4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    "3d_with_past_and_present_qk_matmul",
    "3d_with_past_and_present_qk_matmul_bias",
    "3d_with_past_and_present_qk_matmul_softcap",
    "3d_with_past_and_present_qk_matmul_softmax",
    "23_fullymasked_qk_matmul_output_mode3_zero",
    "24_fullymasked_qk_matmul_output_mode3_zero",
    "24_qk_matmul_output_mode3_softmax_precision",
    "local_window_gqa_rank4_mask",
]
# Without that output, three of them are refused for what they ask besides.
BESIDES = {
    "3d_with_past_and_present_qk_matmul_softcap": "attn_mask must be bool, or 0 and -inf, with softcap",
    "4d_with_qk_matmul_softcap": "attn_mask must be bool, or 0 and -inf, with softcap",
    "local_window_gqa_rank4_mask": "softmax_precision 11 needs double",
}


def of_vector(name: str, count: int) -> tuple[Any, dict[str, Array], dict[str, Array], Any]:
    """The node with its first outputs, the inputs and the results wanted."""
    case = VECTORS[name]
    (node,) = case.model.graph.node
    inputs = dict(zip([i for i in node.input if i], map(np.asarray, case.data_sets[0][0]), strict=True))
    wanted = dict(zip([o for o in node.output if o], map(np.asarray, case.data_sets[0][1]), strict=True))
    own = onnx.NodeProto()
    own.CopyFrom(node)
    del own.output[count:]
    return own, inputs, {o: wanted[o] for o in own.output if o}, case


def compare(library: Path, name: str) -> None:
    node, inputs, wanted, case = of_vector(name, 3)
    got = session(library, model_of(node, inputs, list(wanted))).run(None, fed(inputs))
    for x, (output, want) in zip(got, wanted.items(), strict=True):
        assert x.shape == want.shape
        rtol = max(case.rtol, 2**-6) if want.dtype.name == "bfloat16" else case.rtol  # as ONNX compares them
        np.testing.assert_allclose(x, want.astype(x.dtype), rtol=rtol, atol=case.atol, err_msg=output)


@pytest.mark.parametrize("name", [name for name in VECTORS if name not in REFUSED])
def test_vectors(library, name):
    compare(library, name)


@pytest.mark.parametrize("name", REFUSED)
def test_vectors_with_logits(library, name):
    node, inputs, wanted, _ = of_vector(name, 4)
    with pytest.raises(Exception, match="qk_matmul_output is not supported"):
        session(library, model_of(node, inputs, list(wanted)))
    if not BESIDES.get(name):
        return compare(library, name)
    with pytest.raises(Exception, match=BESIDES[name]):
        compare(library, name)


# The package's bits


def numbers(rng, *shape, dtype=F32):
    return rng.standard_normal(shape).astype(dtype)


def qkv(rng, batch=2, heads=4, kv_heads=2, queries=70, keys=90, dim=16, value_dim=24, dtype=F32):
    """Tokens first, as the package has them."""
    return (
        numbers(rng, batch, queries, heads, dim, dtype=dtype),
        numbers(rng, batch, keys, kv_heads, dim, dtype=dtype),
        numbers(rng, batch, keys, kv_heads, value_dim, dtype=dtype),
    )


def heads_first(*arrays: Array) -> list[Array]:
    return [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]


def check(library, attributes, arrays, wanted, **inputs):
    """In four axes and in three."""
    q, k, v = arrays
    wanted = wanted.astype(F32) if wanted.dtype.name == "bfloat16" else wanted
    four = dict(zip("QKV", heads_first(q, k, v), strict=True))
    np.testing.assert_array_equal(attend(library, attributes, **four, **inputs), wanted.swapaxes(1, 2))
    three = {
        name: x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) for name, x in zip("QKV", arrays, strict=True)
    }
    counts = {"q_num_heads": q.shape[2], "kv_num_heads": k.shape[2]}
    got = attend(library, attributes | counts, **three, **inputs)
    np.testing.assert_array_equal(got, wanted.reshape(got.shape))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_types(library, dtype):
    import ml_dtypes

    arrays = qkv(np.random.default_rng(0), dtype=getattr(np, dtype, None) or getattr(ml_dtypes, dtype))
    check(library, {}, arrays, attnmask.flash_attention(*arrays))
    check(library, {"is_causal": 1}, arrays, attnmask.flash_attention(*arrays, causal=True))


@pytest.mark.parametrize("left", [-1, 0, 20])
@pytest.mark.parametrize("right", [-1, 0, 5])
@pytest.mark.parametrize("causal", [0, 1])
def test_windows(library, left, right, causal):
    arrays = qkv(np.random.default_rng(1))
    window = tuple(None if x < 0 else x for x in (left, right))
    wanted = attnmask.flash_attention(
        *arrays, causal=bool(causal), sliding_window=None if window == (None, None) else window
    )
    attributes = {"is_causal": causal, "left_window_size": left, "right_window_size": right}
    check(library, attributes, arrays, wanted)


def test_scale_and_soft_cap(library):
    arrays = qkv(np.random.default_rng(2))
    wanted = attnmask.flash_attention(*arrays, softmax_scale=0.25, logits_soft_cap=2)
    check(library, {"scale": 0.25, "softcap": 2.0}, arrays, wanted)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_alibi(library, dtype):
    rng = np.random.default_rng(3)
    arrays, slopes = qkv(rng, dtype=dtype), np.array([0.5, 0.25, 0.125, 0], F32)
    wanted = attnmask.flash_attention(*arrays, causal=True, alibi_slopes=slopes)
    check(library, {"is_causal": 1}, arrays, wanted, alibi_slopes=slopes)


@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_segments(library, ids):
    rng = np.random.default_rng(4)
    arrays = qkv(rng)
    q_ids, kv_ids = (
        np.sort(rng.integers(-1, 4, (2, 70))).astype(ids),
        np.sort(rng.integers(0, 4, (2, 90))).astype(ids),
    )
    wanted = attnmask.flash_attention(*arrays, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    check(library, {}, arrays, wanted, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    arrays = qkv(rng, keys=70)
    wanted = attnmask.flash_attention(*arrays, q_segment_ids=q_ids, kv_segment_ids=q_ids, causal=True)
    check(library, {"is_causal": 1}, arrays, wanted, q_segment_ids=q_ids)


@pytest.mark.parametrize("starts", [np.int32, np.int64])
def test_packed_sequences(library, starts):
    rng = np.random.default_rng(5)
    arrays = qkv(rng, batch=1, keys=70)
    of_q, of_k = np.array([0, 10, 10, 45, 70], starts), np.array([0, 20, 21, 30, 70], starts)
    wanted = attnmask.flash_attention(*arrays, cum_seqlens_q=of_q, cum_seqlens_k=of_q, causal=True)
    check(library, {"is_causal": 1}, arrays, wanted, cu_seqlens_q=of_q)
    wanted = attnmask.flash_attention(*arrays, cum_seqlens_q=of_q, cum_seqlens_k=of_k, sliding_window=(7, 3))
    attributes = {"left_window_size": 7, "right_window_size": 3}
    check(library, attributes, arrays, wanted, cu_seqlens_q=of_q, cu_seqlens_k=of_k)
    slopes = np.array([0.5, 0.25, 0.125, 0], F32)
    wanted = attnmask.flash_attention(*arrays, cum_seqlens_q=of_q, cum_seqlens_k=of_k, alibi_slopes=slopes)
    check(library, {}, arrays, wanted, cu_seqlens_q=of_q, cu_seqlens_k=of_k, alibi_slopes=slopes)


MASKS = [(90,), (70, 90), (1, 90), (4, 70, 90), (2, 1, 70, 90), (2, 4, 1, 90), (2, 4, 70, 90)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(library, shape):
    """Of bool; of 0 and -inf, which give the same; and biases."""
    rng = np.random.default_rng(6)
    arrays, allowed = qkv(rng), rng.random(shape) < 0.6
    if shape[-2:-1] == (70,):
        allowed[..., 0, :] = False  # a query without keys
    whole = np.broadcast_to(allowed, (2, 4, 70, 90))
    wanted = attnmask.flash_attention(*arrays, attention_mask=whole, causal=True, logits_soft_cap=3)
    attributes = {"is_causal": 1, "softcap": 3.0}
    check(library, attributes, arrays, wanted, attn_mask=allowed)
    for dtype in (F16, F32, F64):
        infinite = np.where(allowed, rng.choice([0.0, -0.0], shape), -np.inf).astype(dtype)
        check(library, attributes, arrays, wanted, attn_mask=infinite)
        lowest = np.where(allowed, 0, np.finfo(dtype).min).astype(dtype)
        check(library, attributes, arrays, wanted, attn_mask=lowest)
        bias = np.where(allowed, numbers(rng, *shape), -np.inf).astype(dtype)
        wide = np.ascontiguousarray(np.broadcast_to(bias, (2, 4, 70, 90)))
        of_bias = attnmask.flash_attention(*arrays, bias=wide, causal=True)
        assert of_bias[:, 0].any() != (shape[-2:-1] == (70,))
        check(library, {"is_causal": 1}, arrays, of_bias, attn_mask=bias)


def test_masks_of_fewer_keys(library):
    rng = np.random.default_rng(7)
    q, k, v = qkv(rng)
    allowed, ids = rng.random((2, 1, 70, 60)) < 0.6, rng.integers(0, 3, (2, 90))
    q_ids = rng.integers(0, 3, (2, 70))
    wanted = attnmask.flash_attention(
        q, k[:, :60], v[:, :60], attention_mask=allowed, q_segment_ids=q_ids, kv_segment_ids=ids[:, :60]
    )
    check(library, {}, (q, k, v), wanted, attn_mask=allowed, q_segment_ids=q_ids, kv_segment_ids=ids)
    lengths = np.array([75, 50])
    kept = allowed & (np.arange(60) < lengths[:, None, None, None])
    wanted = attnmask.flash_attention(q, k[:, :60], v[:, :60], attention_mask=kept)
    check(library, {}, (q, k, v), wanted, attn_mask=allowed, nonpad_kv_seqlen=lengths)


@pytest.mark.parametrize("past", [0, 1, 33])
@pytest.mark.parametrize("axes", [3, 4])
def test_past(library, past, axes):
    """Causal at the past's end, as without a cache the first query is at the first key."""
    rng = np.random.default_rng(8)
    q, k, v = qkv(rng, queries=5, keys=past + 5)
    wanted = attnmask.flash_attention(q, k, v, causal=True, sliding_window=(9, None), causal_offset=past)
    past_key, past_value = heads_first(k[:, :past], v[:, :past])
    new = [q, k[:, past:], v[:, past:]]
    given = heads_first(*new) if axes == 4 else [x.reshape(2, 5, -1) for x in new]
    attributes = {"is_causal": 1, "left_window_size": 9}
    attributes |= {"q_num_heads": 4, "kv_num_heads": 2} if axes == 3 else {}
    outputs = ("Y", "present_key", "present_value")
    y, key, value = attend(
        library,
        attributes,
        outputs,
        **dict(zip("QKV", given, strict=True)),
        past_key=past_key,
        past_value=past_value,
    )
    np.testing.assert_array_equal(y, heads_first(wanted)[0] if axes == 4 else wanted.reshape(y.shape))
    np.testing.assert_array_equal(key, heads_first(k)[0])
    np.testing.assert_array_equal(value, heads_first(v)[0])


def test_padded_cache(library):
    """The last query is at the last key that is no padding; of the first row, two come before all keys."""
    rng = np.random.default_rng(9)
    q, k, v = qkv(rng, batch=3, queries=5)
    lengths = np.array([3, 0, 90])
    places = lengths[:, None, None, None] - 5 + np.arange(5)[:, None]
    wanted = attnmask.flash_attention(q, k, v, attention_mask=np.arange(90) <= places)
    assert not wanted[0, :2].any()
    assert not wanted[1].any()
    check(library, {"is_causal": 1}, (q, k, v), wanted, nonpad_kv_seqlen=lengths)


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"queries": 0}, {"keys": 0}, {"queries": 1, "keys": 1}, {"value_dim": 0}]
)
def test_small(library, sizes):
    arrays = qkv(np.random.default_rng(10), **sizes)
    check(library, {"is_causal": 1}, arrays, attnmask.flash_attention(*arrays, causal=True))


# Errors


Q, K, V = (np.ones((2, 2, tokens, 8), F32) for tokens in (4, 6, 6))
BAD_ATTRIBUTES = [
    ({"is_causal": 2}, "is_causal must be from 0 to 1, got 2"),
    ({"is_causal": 1.0}, "is_causal must be an integer"),
    ({"scale": 1}, "scale must be a float"),
    ({"scale": 0.0}, "scale must not be 0"),
    ({"scale": float("nan")}, "scale must be from"),
    ({"softcap": -1.0}, "softcap must be from 0"),
    ({"left_window_size": -2}, "left_window_size must be from -1"),
    ({"kv_num_heads": 0}, "kv_num_heads must be from 1"),
    ({"softmax_precision": 11}, "softmax_precision 11 needs double"),
]
ID = np.zeros((2, 4), np.int64)
PAST = np.ones((2, 2, 3, 8), F32)
BAD_INPUTS = [
    ({"Q": Q[0, 0]}, {}, "Q must have 3 or 4 axes, got 2"),
    ({"K": K[0]}, {}, "Q, K and V must have as many axes"),
    ({"V": V[:, :, :5]}, {}, "V must have the tokens of K, 6, got 5"),
    ({"K": K[:1], "V": V[:1]}, {}, "key must have batch size"),
    ({"K": K[..., :7]}, {}, "key must have batch size"),
    ({}, {"q_num_heads": 4}, "q_num_heads is 4, but Q has 2 heads"),
    ({"Q": Q[0], "K": K[0], "V": V[0]}, {}, "kv_num_heads must divide the last axis of V, 8, got 0"),
    (
        {"Q": Q[0], "K": K[0], "V": V[0]},
        {"q_num_heads": 3, "kv_num_heads": 2},
        "q_num_heads must divide the last axis of Q, 8, got 3",
    ),
    (
        {"attn_mask": np.ones((3, 6), bool)},
        {},
        r"attn_mask must broadcast to \(2, 2, 4, 6\), got 3 at axis 0",
    ),
    ({"attn_mask": np.ones((4, 7), bool)}, {}, "got 7 at axis 1"),
    ({"attn_mask": np.ones((4, 1), bool)}, {}, "attn_mask must have more than 1 key"),
    ({"attn_mask": np.ones((4, 6), np.int32)}, {}, "attn_mask must be bool or floating-point"),
    ({"attn_mask": np.ones((4, 6), np.uint8)}, {}, "attn_mask has a type that is not supported"),
    (
        {"attn_mask": np.ones((4, 6), F32)},
        {"softcap": 2.0},
        "attn_mask must be bool, or 0 and -inf, with softcap",
    ),
    ({"past_key": PAST}, {}, "past_key and past_value must come together"),
    ({"past_key": PAST, "past_value": PAST}, {}, "past_key needs the outputs present_key and present_value"),
    ({"past_key": PAST[..., :5], "past_value": PAST}, {}, r"past_key must be of shape \(2, 2, past, 8\)"),
    ({"nonpad_kv_seqlen": np.array([3])}, {}, "nonpad_kv_seqlen must have 2 numbers, got 1"),
    ({"nonpad_kv_seqlen": np.array([3, 7])}, {}, "nonpad_kv_seqlen must be from 0 to 6, got 7"),
    ({"nonpad_kv_seqlen": np.array([-1, 6])}, {}, "nonpad_kv_seqlen must be from 0 to 6, got -1"),
    ({"kv_segment_ids": ID}, {}, "kv_segment_ids needs q_segment_ids"),
    ({"q_segment_ids": ID, "kv_segment_ids": ID[:, :3]}, {}, r"ATTNMASK_EQUAL: k_ids must be \[B, 6\]"),
    ({"q_segment_ids": ID.astype(F32)}, {}, "ATTNMASK_EQUAL: q_ids must be integers"),
    ({"cu_seqlens_k": np.array([0, 6])}, {}, "cu_seqlens_k needs cu_seqlens_q"),
    ({"cu_seqlens_q": np.array([0, 4])}, {}, "one batch row, got 2"),
    (
        {"cu_seqlens_q": np.array([0, 4]), "nonpad_kv_seqlen": np.array([3, 6])},
        {},
        "cu_seqlens_q goes with neither past_key nor nonpad_kv_seqlen",
    ),
    ({"alibi_slopes": np.ones(3, F32)}, {}, "alibi_slopes must have 2 numbers, one for each head, got 3"),
    ({"alibi_slopes": np.ones(2, np.int64)}, {}, "ATTNMASK_ALIBI must be .* float32 or float64"),
    ({"alibi_slopes": np.array([np.inf, 0], F32)}, {}, "ATTNMASK_ALIBI must be finite"),
]


@pytest.mark.parametrize(("attributes", "words"), BAD_ATTRIBUTES, ids=str)
def test_bad_attributes(library, attributes, words):
    with pytest.raises(Exception, match=words) as caught:
        made(library, ["Y"], attributes, {"Q": Q, "K": K, "V": V})
    assert "com.attnmask.Attention: " in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "attributes", "words"), BAD_INPUTS, ids=[words for *_, words in BAD_INPUTS]
)
def test_bad_inputs(library, inputs, attributes, words):
    given = {"Q": Q, "K": K, "V": V} | {name: np.ascontiguousarray(x) for name, x in inputs.items()}
    with pytest.raises(Exception, match=words) as caught:
        attend(library, attributes, **given)
    assert "com.attnmask.Attention: " in str(caught.value)


@pytest.mark.parametrize("inputs", [{"K": K.astype(F64)}, {"V": V.astype(F16)}, {"Q": Q.astype(np.int32)}])
def test_types_that_differ(library, inputs):
    """ONNX Runtime itself refuses them."""
    with pytest.raises(Exception, match=r"[tT]ype"):
        attend(library, **({"Q": Q, "K": K, "V": V} | inputs))


# Sessions


def test_sessions_in_threads(library):
    rng = np.random.default_rng(11)
    runs = []
    for _ in range(2):
        arrays = qkv(rng, queries=150, keys=150)
        given = dict(zip("QKV", heads_first(*arrays), strict=True))
        wanted = heads_first(attnmask.flash_attention(*arrays, causal=True))[0]
        runs.append((made(library, ["Y"], {"is_causal": 1}, given), given, wanted))

    def repeat(run):
        own, given, wanted = run
        return all(np.array_equal(own.run(None, given)[0], wanted) for _ in range(30))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, runs * 2))


def test_a_header_that_is_too_new(tmp_path):
    text = (header() / "onnxruntime_c_api.h").read_text()
    (tmp_path / "onnxruntime_c_api.h").write_text(re.sub(r"(#define ORT_API_VERSION) \d+", r"\1 999", text))
    with pytest.raises(Exception, match=r"built with the header of ONNX Runtime 1\.999"):
        made(compiled(tmp_path, tmp_path), ["Y"], {}, {"Q": Q, "K": K, "V": V})


def test_exports_one_name(library):
    if not shutil.which("nm"):
        pytest.skip("nm is not there")
    names = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in names.stdout.splitlines()] == ["RegisterCustomOps"]


def test_source_is_short():
    assert len(SOURCE.read_text().splitlines()) <= 500
