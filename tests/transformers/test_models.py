"""attnmask.transformers: models give what they give with attn_implementation="eager"."""

import re
import runpy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from derivative_ways import WAYS, near  # noqa: E402
from environment import ROOT  # noqa: E402
from tiny_models import (  # noqa: E402
    BOTH_SIDES,
    DECODERS,
    ENCODERS,
    FIRST,
    TOKENS,
    VOCABULARY,
    assert_close,
    later,
    model_of,
    padding,
    random_ids,
)
from transformers import masking_utils as masks  # noqa: E402

import attnmask.transformers  # noqa: E402
from attnmask._faces.attention import ATTENTION  # noqa: E402
from attnmask.transformers import attention, attention_mask  # noqa: E402
from attnmask.transformers._masks import SymbolicMask  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnmask.transformers.register()


def by_both(model, compute):
    """What `compute` gives with each of the two implementations."""
    results = []
    for implementation in ("eager", "attnmask"):
        model.set_attn_implementation(implementation)
        results.append(compute())
    return results


def logits_and_gradients(model, rows, **inputs):
    """The gradients are those of the rows that are not padding, each with a weight of its own."""
    model.zero_grad()
    logits = model(**inputs).logits * rows[..., None]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | grads


def source(name, rows):
    if name == "Whisper":
        return {"input_features": torch.randn(2, 8, 2 * TOKENS)}
    return {"input_ids": random_ids(2, TOKENS), "attention_mask": rows}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS | ENCODERS | BOTH_SIDES)
def test_logits_and_gradients(name, side):
    model, rows = model_of(name), padding(side)
    inputs = source(name, rows)
    if name in BOTH_SIDES:
        inputs |= {"decoder_input_ids": random_ids(2, TOKENS), "decoder_attention_mask": rows}
    expected, actual = by_both(model, lambda: logits_and_gradients(model, rows, **inputs))
    # Eager attention in float32 has gradients of these models 1.4e-5 off; in float64 other models have NaN.
    if name in BOTH_SIDES:
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        model.set_attn_implementation("eager")
        expected = logits_and_gradients(model.double(), rows, **inputs)
    assert_close(actual, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "error"), [("GPT2", 1e-12), ("Bert", 1e-12), ("Gemma2", 2e-5)])
def test_second_derivatives(name, error, way):
    """By embeddings of tokens. Gemma2's own attention is in float32."""
    model, rows = model_of(name).double().requires_grad_(False), padding("right")
    embeddings = model.get_input_embeddings()(random_ids(2, TOKENS)).detach().double()

    def logits(x):
        return model(inputs_embeds=x, attention_mask=rows).logits * rows[..., None]

    right, got = by_both(model, lambda: way(torch, logits, [embeddings], [embeddings.flip(1)]))
    near(torch, got, right, error)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS | BOTH_SIDES)
def test_greedy_generation(name, cache):
    """Past the window, and in decoders the first row behind padding."""
    model, given = model_of(name), source(name, padding("left" if name in DECODERS else "right"))
    more = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    expected, actual = by_both(model, lambda: model.generate(**given, **more))
    assert actual.tolist() == expected.tolist()
    assert name in BOTH_SIDES or len(set(actual[0, TOKENS:].tolist())) > 1


LENGTHS = (5, 1, 9, 6)


@pytest.mark.parametrize("told", ["positions", "positions with a cache", "cu_seq_lens"])
@pytest.mark.parametrize("name", DECODERS)
def test_packed_training(name, told):
    """Documents in one row are trained on as each for itself."""
    if name == "Llama4" and told == "positions with a cache":
        pytest.skip("where there is a cache, chunks are counted from where the row begins")
    if FIRST and name == "Llama4":
        pytest.skip("chunks are counted from where the row begins")
    model = model_of(name)
    documents = [random_ids(1, length) for length in LENGTHS]
    weights = torch.randn(1, sum(LENGTHS), VOCABULARY)
    starts = np.cumsum([0, *LENGTHS])

    def compute(ids, begin, **more):
        logits = model(input_ids=ids, **more).logits
        (logits * weights[:, begin : begin + ids.shape[1]]).sum().backward()
        return logits.detach()

    def results(*logits):
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return {"logits": torch.cat(logits, dim=1)} | grads

    pairs = zip(documents, starts[:-1], strict=True)
    expected = results(*(compute(ids, begin, use_cache=False) for ids, begin in pairs))
    model.set_attn_implementation("attnmask")
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    more = {"position_ids": positions, "use_cache": told == "positions with a cache"}
    if told == "cu_seq_lens":
        cu = torch.from_numpy(starts).int()
        longest = max(LENGTHS)
        more |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    actual = results(compute(torch.cat(documents, dim=1), 0, **more))
    assert_close(actual, expected)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss", "T5"])
def test_bfloat16(name):
    """As near to float32 as eager attention is."""
    model, rows = model_of(name), padding("right")
    inputs = {"input_ids": random_ids(2, TOKENS), "attention_mask": rows}
    if name == "T5":
        inputs["decoder_input_ids"] = random_ids(2, TOKENS)
    with torch.no_grad():
        exact = model(**inputs).logits
        model.bfloat16()
        errors = [
            ((logits.float() - exact) * rows[..., None]).abs().mean().item()
            for logits in by_both(model, lambda: model(**inputs).logits)
        ]
    assert 0 < errors[1] < 1.25 * errors[0]


def test_checkpointing_and_dropout():
    """Layers that are computed again drop the same weights, which PyTorch's seed decides."""
    model, ids = model_of("Llama", attention_dropout=0.5).train(), random_ids(2, TOKENS)
    model.set_attn_implementation("attnmask")

    def compute(seed):
        torch.manual_seed(seed)
        return logits_and_gradients(model, torch.ones(2, TOKENS), input_ids=ids)

    expected, other = compute(0), compute(1)
    assert_close(compute(0), expected, 0)
    assert (other["logits"] - expected["logits"]).abs().max() > 0.01
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_close(compute(0), expected, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama", pytest.param("GptOss", marks=later)])
def test_compiled(name):
    """In one graph, where masks are arrays."""
    model, rows = model_of(name), padding("left")
    inputs = {"input_ids": random_ids(2, TOKENS), "attention_mask": rows, "use_cache": False}
    with torch.no_grad():
        expected = model(**inputs).logits * rows[..., None]
        model.set_attn_implementation("attnmask")
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        actual = compiled(**inputs).logits * rows[..., None]
    assert_close({"logits": actual}, {"logits": expected})


EXAMPLE = ROOT / "examples" / "transformers_packed.py"


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the tests run without the examples")
def test_the_example():
    """Both ways learn the same."""
    module = runpy.run_path(str(EXAMPLE))
    (actual, seconds), (expected, _) = (module["train"](name, 200, 2) for name in ("attnmask", "sdpa"))
    assert actual == pytest.approx(expected, rel=1e-4)
    assert actual[1] != actual[0]
    assert len(seconds) == 2


# Masks


def even_distance(batch, head, q, k):
    return (q - k) % 2 == 0


ROWS = 2
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 9 + [0] * 2]).bool()
HOLES = PADDING.clone()
HOLES[:, 4] = False
IMAGES = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1, -1, -1, -1], [-1] * 8 + [3] * 3])
FUNCTIONS = (
    {}
    if FIRST
    else {
        "causal": masks.causal_mask_function,
        "bidirectional": masks.bidirectional_mask_function,
        "window": masks.sliding_window_causal_mask_function(3),
        "window, bidirectional": masks.sliding_window_bidirectional_mask_function(2),
        "chunks": masks.chunked_causal_mask_function(3, torch.tensor([2, 0])),
        "padding": masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(PADDING)),
        "images": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(IMAGES)),
        "any": masks.or_masks(masks.bidirectional_mask_function, masks.causal_mask_function),
        "another": even_distance,
        "and another": masks.and_masks(masks.causal_mask_function, even_distance),
        "or another": masks.or_masks(masks.sliding_window_causal_mask_function(2), even_distance),
    }
)
PLACES = {  # queries, keys, and the places of the first ones
    "all": (TOKENS, TOKENS, 0, 0),
    "one": (1, TOKENS, TOKENS - 1, 0),
    "some": (4, 6, 7, 5),
    "static": (3, TOKENS, 0, 0),
    "static, later": (2, TOKENS, 5, 0),
}


def kinds(mask):
    return {node[0] for node in mask.info._state.program if isinstance(node, tuple)}


@pytest.mark.parametrize(
    "tokens", [None, PADDING, HOLES, PADDING[:, :9]], ids=["", "padded", "holes", "short"]
)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks(name, place, tokens):
    """The pairs that transformers' own masks have, and no array that need not be."""
    q_length, kv_length, q_offset, kv_offset = place
    given = {"batch_size": ROWS, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset}
    given |= {"mask_function": FUNCTIONS[name], "attention_mask": tokens, "use_vmap": "another" in name}
    expected = masks.sdpa_mask(
        **given, q_offset=q_offset, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
    ).expand(ROWS, 1, q_length, kv_length)
    for offset in (q_offset, torch.tensor(q_offset)):
        actual = attention_mask(**given, q_offset=offset)
        assert isinstance(actual, SymbolicMask)
        assert actual.shape == expected.shape
        np.testing.assert_array_equal(actual.info.attention_mask, expected)
        assert ("dense" in kinds(actual)) == ("another" in name)


@later
@pytest.mark.parametrize("name", ["causal", "window", "chunks", "images", "and another"])
def test_masks_of_packed_rows(name):
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3], [3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2]])
    numbers = masks.find_packed_sequence_indices(positions)
    function = FUNCTIONS[name]
    images = name == "images"
    remapped = masks.remap_positions_for_packed_sequence(
        FUNCTIONS["causal"] if images else function, positions
    )
    if images:
        remapped = masks.or_masks(remapped, masks.blockwise_overlay(IMAGES))
    packed = masks.and_masks(remapped, masks.packed_sequence_mask_function(numbers))
    given = {"batch_size": ROWS, "q_length": TOKENS, "kv_length": TOKENS, "mask_function": packed}
    expected = masks.sdpa_mask(**given, allow_is_causal_skip=False)
    actual = attention_mask(**given)
    np.testing.assert_array_equal(actual.info.attention_mask, expected)
    assert ("dense" in kinds(actual)) == ("another" in name)


def test_masks_of_long_rows_are_small():
    tokens = torch.ones(1, 2**17, dtype=torch.bool)
    tokens[:, :5] = False
    mask = attention_mask(batch_size=1, q_length=2**17, kv_length=2**17, attention_mask=tokens)
    assert mask.shape == (1, 1, 2**17, 2**17)
    assert mask.info.density() == pytest.approx(0.5, rel=1e-4)


@later
def test_a_mask_is_given_back():
    mask = attention_mask(batch_size=2, q_length=3, kv_length=5, q_offset=2)
    assert (mask.ndim, mask.shape, mask.dtype) == (4, (2, 1, 3, 5), torch.bool)
    assert attention_mask(batch_size=2, q_length=3, kv_length=5, attention_mask=mask) is mask
    embeds = torch.empty(2, 3, 0)
    config = model_of("Llama").config
    config._attn_implementation = "attnmask"
    assert masks.create_causal_mask(config, embeds, mask, None) is mask
    assert mask.contiguous() is mask
    assert mask.detach().info is mask.info
    assert repr(mask) == f"SymbolicMask({mask.info!r})"


def test_a_mask_is_an_array_to_whatever_computes_with_it():
    mask = attention_mask(batch_size=1, q_length=3, kv_length=5, q_offset=2)
    expected = torch.ones(3, 5).tril(2).bool()
    assert mask[0, 0].tolist() == expected.tolist()
    assert (~mask).logical_not().all() == expected.all()
    assert type(mask.clone()) is torch.Tensor
    assert torch.where(mask, 0.0, 1.0).sum() == 3
    for write in (lambda: mask.__setitem__((0, 0, 0, 0), False), lambda: mask.fill_(True)):
        with pytest.raises(TypeError, match="a SymbolicMask cannot be written to"):
            write()


# Attention by itself


def by_hand(query, key, value, live, scale):
    logits = (query @ key.transpose(2, 3) * scale).masked_fill(~live, -torch.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_without_a_mask(causal, queries, window):
    """One causal query is the last, several are the first; a window counts the query's own key."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 2, queries, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 5)
    module = torch.nn.Identity()
    module.is_causal = causal
    distance = torch.arange(6)[None] - torch.arange(6 - queries, 6)[:, None]
    live = (distance <= 0) if causal else torch.ones_like(distance).bool()
    if window:
        live = live & (distance.abs() < window)
    out, weights = attention(module, query, key, value, None, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(out, by_hand(query, key, value, live, 0.3))
    assert weights is None
    told, _ = attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, is_causal=causal
    )
    assert torch.equal(told, out)


def test_queries_and_keys_packed_by_themselves():
    """As in cross attention of packed rows; causal ones are the last of each sequence."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    starts = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 5, 9])}
    for causal in (False, True):
        out, _ = attention(torch.nn.Identity(), query, key, value, None, is_causal=causal, **starts)
        parts = [
            by_hand(query[:, :, q], key[:, :, k], value[:, :, k], live if causal else live | True, 8**-0.5)
            for q, k, live in (
                (slice(0, 2), slice(0, 5), torch.ones(2, 5).tril(3).bool()),
                (slice(2, 5), slice(5, 9), torch.ones(3, 4).tril(1).bool()),
            )
        ]
        torch.testing.assert_close(out, torch.cat(parts, dim=1))


def test_positions_that_are_no_packing():
    """Padding's, those of a row that begins later, and any others leave attention as it is."""
    torch.manual_seed(0)
    query = torch.randn(1, 2, 6, 8)
    plain, _ = attention(torch.nn.Identity(), query, query, query, None)
    for positions in ([3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5], [0, 2, 0, 1, 2, 3], [5, 4, 3, 2, 1, 7]):
        ids = torch.tensor([positions])
        assert torch.equal(
            attention(torch.nn.Identity(), query, query, query, None, position_ids=ids)[0], plain
        )
    mask = attention_mask(
        batch_size=1, q_length=6, kv_length=6, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]).bool()
    )
    ids = torch.tensor([[0, 1, 0, 1, 2, 3]])
    out, _ = attention(torch.nn.Identity(), query, query, query, mask, position_ids=ids)
    assert torch.equal(out, attention(torch.nn.Identity(), query, query, query, mask)[0])
    packed, _ = attention(torch.nn.Identity(), query, query, query, None, position_ids=ids)
    assert not torch.equal(packed, plain)


def test_tensors_are_read_in_place(monkeypatch):
    seen = []
    real = attnmask.flash_attention
    monkeypatch.setattr(ATTENTION, "entry", lambda **given: seen.append(given) or real(**given))
    rows = torch.randn(2, 6, 3, 4, 8)  # queries, keys and values of one projection
    query, key, value = (rows[:, :, i].transpose(1, 2) for i in range(3))
    with torch.no_grad():
        attention(torch.nn.Identity(), query, key, value, None)
    for name, x in (("query", query), ("key", key), ("value", value)):
        array = np.asarray(seen[0][name])
        assert array.__array_interface__["data"][0] == x.data_ptr()
        assert array.strides == tuple(4 * stride for stride in x.transpose(1, 2).stride())


# Bad input


def test_names(monkeypatch):
    attnmask.transformers.register()  # which changes nothing
    interface = transformers.AttentionInterface
    monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    for name in ("eager", "sdpa"):
        with pytest.raises(
            ValueError,
            match=f"name must not be taken by another implementation in transformers, got '{name}'",
        ):
            attnmask.transformers.register(name)
    for name in ("attnmask_flash", "a/b", "paged|attnmask", ""):
        message = re.escape(f"name must not be empty or contain 'flash', '/' or '|', got {name!r}")
        with pytest.raises(ValueError, match=message):
            attnmask.transformers.register(name)
    with pytest.raises(TypeError, match="name must be a str, got 1"):
        attnmask.transformers.register(1)
    attnmask.transformers.register("another name")
    assert interface()["another name"] is attention
    attnmask.transformers.unregister("another name")
    assert "another name" not in interface()


def test_bad_tensors():
    query = torch.zeros(1, 2, 6, 8)
    with pytest.raises(TypeError, match=r"query must be .*float8_e4m3fn"):
        attention(torch.nn.Identity(), *[query.to(torch.float8_e4m3fn)] * 3, None)
    with pytest.raises(TypeError, match="key must be on meta as query, got a tensor on cpu"):
        attention(torch.nn.Identity(), query.to("meta"), query, query, None)
    mask = attention_mask(batch_size=1, q_length=6, kv_length=7)
    with pytest.raises(ValueError, match="attention_mask must"):
        attention(torch.nn.Identity(), query, query, query, mask)


@later  # T5 of the first ones takes no other attention
def test_the_bias_of_t5_is_taken_by_distance(monkeypatch):
    """Gradients of the buckets are those of eager attention; decoding by one query has the bias as it is."""
    model, calls, function = model_of("T5"), [], attnmask.transformers.flash_attention

    def record(*tensors, **named):
        calls.append(named)
        return function(*tensors, **named)

    monkeypatch.setattr(attnmask.transformers, "flash_attention", record)
    inputs = {"input_ids": random_ids(2, TOKENS), "decoder_input_ids": random_ids(2, TOKENS)}
    expected, actual = by_both(model, lambda: logits_and_gradients(model, torch.ones(2, TOKENS), **inputs))
    assert_close(actual, expected)
    assert any("relative_attention_bias" in name for name in actual)
    assert all(named["bias"] is None and named["relative_bias"].ndim == 2 for named in calls)
    # The layers of the encoder share one bias; the decoder has one of its own, and one of zeros for the encoder's keys.
    assert len({id(named["relative_bias"]) for named in calls}) == 3


def test_a_bias_that_is_written_to_is_read_again():
    query = torch.randn(1, 2, 5, 8)
    distance = torch.arange(7)[None] - torch.arange(5)[:, None]
    bias = torch.randn(2, 11)[None, :, distance + 4]

    def both():
        got, _ = attention(torch.nn.Identity(), query, *keys, None, is_causal=False, position_bias=bias)
        right = torch.nn.functional.scaled_dot_product_attention(query, *keys, attn_mask=bias)
        return got, right.transpose(1, 2)

    keys = torch.randn(2, 1, 2, 7, 8)
    torch.testing.assert_close(*both())
    bias[0, 1, 2, 3] += 4.0  # no longer by distance
    torch.testing.assert_close(*both())
    bias.zero_()
    torch.testing.assert_close(*both())


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (32, 64), (16, 20), (33, 128), (8, 9)])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (1, 700), (700, 1)])
def test_t5_relative_bias_has_the_buckets_of_t5(bidirectional, buckets, farthest, queries, keys):
    from transformers.models.t5.modeling_t5 import T5Attention

    numbers = np.arange(buckets, dtype=np.float32)[:, None]
    bias, low = attnmask.t5_relative_bias(
        numbers, queries, keys, bidirectional=bidirectional, max_distance=farthest
    )
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    right = T5Attention._relative_position_bucket(
        distance, bidirectional=bidirectional, num_buckets=buckets, max_distance=farthest
    )
    got = bias[0][np.clip(distance.numpy() - low, 0, bias.shape[1] - 1)]
    np.testing.assert_array_equal(got, right.numpy())


def test_many_heads_and_few_tokens():
    """Models give heads before tokens, so neither is mistaken for the other; a warning would be an error here."""
    query = torch.randn(1, 72, 9, 8)
    for x in (query, query.requires_grad_()):
        attention(torch.nn.Identity(), x, x, x, None)
