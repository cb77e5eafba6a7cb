"""The weights of attention that models return with output_attentions=True: those of attn_implementation="eager"."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    BOTH_SIDES,
    DECODERS,
    ENCODERS,
    TOKENS,
    later,
    model_of,
    padding,
    random_ids,
)

import attnmask.transformers  # noqa: E402
from attnmask.transformers import attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
EACH = (*DECODERS, *ENCODERS, *BOTH_SIDES)


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnmask.transformers.register()


def inputs_of(name, rows):
    """Tokens, or sounds, of two rows with padding."""
    if name == "Whisper":
        return {"input_features": torch.randn(2, 8, 2 * TOKENS)}
    return {"input_ids": random_ids(2, TOKENS), "attention_mask": rows}


def by_both(model, call):
    """What a call returns with either, all weights in one list."""
    found = []
    for implementation in ("eager", "attnmask"):
        model.set_attn_implementation(implementation)
        output = call()
        kinds = [output[name] for name in sorted(output.keys()) if "attentions" in name]
        found.append((output, [x for x in torch.utils._pytree.tree_leaves(kinds) if x is not None]))
    return found


def assert_near(got, right, rows, error=1e-5):
    """But for queries that are padding, which "eager" has look at everything."""
    assert len(got) == len(right) > 1
    for one, other in zip(got, right, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        live = rows[:, None, :, None] if one.shape[2] == rows.shape[1] else 1
        np.testing.assert_allclose(*((x.detach() * live).float() for x in (one, other)), rtol=0, atol=error)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", EACH)
def test_attentions(name, side):
    """With and without padding."""
    model, rows = model_of(name), padding(side)
    for given in (rows, torch.ones_like(rows)):
        inputs = inputs_of(name, given)
        if name in BOTH_SIDES:
            inputs |= {"decoder_input_ids": random_ids(2, TOKENS), "decoder_attention_mask": given}
        (_, right), (_, got) = by_both(model, lambda inputs=inputs: model(**inputs, output_attentions=True))
        assert_near(got, right, given)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, *BOTH_SIDES])
def test_generation(name, cache):
    model, rows = model_of(name), padding("left" if name in DECODERS else "right")
    given = inputs_of(name, rows) | {"output_attentions": True, "return_dict_in_generate": True}
    more = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    (expected, right), (actual, got) = by_both(model, lambda: model.generate(**given, **more))
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert_near(got, right, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_16_bits(dtype):
    """Sums are of 32 bits, and the weights are rounded once."""
    query, key = torch.randn(2, 4, TOKENS, 8, dtype=dtype), torch.randn(2, 2, TOKENS, 8, dtype=dtype)
    ((got,), (right,)) = (
        attention(torch.nn.Identity(), x, y, y, None, output_attentions=True)[1:]
        for x, y in ((query, key), (query.float(), key.float()))
    )
    assert got.dtype == dtype
    torch.testing.assert_close(got, right.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@later
@pytest.mark.parametrize("name", ["Llama", "GPT2", "T5"])
def test_in_graphs(name):
    """GPT-2 does not tell its layers that weights are wanted."""
    model, rows = model_of(name).requires_grad_(False), torch.ones(2, TOKENS)
    inputs = {"input_ids": random_ids(2, TOKENS)}
    inputs |= {"decoder_input_ids": random_ids(2, TOKENS)} if name in BOTH_SIDES else {}
    torch._dynamo.reset()
    model(**inputs, output_attentions=True)  # PyTorch cannot compile what installs hooks
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    (_, right), (_, got) = by_both(model, lambda: compiled(**inputs, output_attentions=True))
    assert_near(got, right, rows)


def test_of_packed_documents():
    """Each is as if alone, and looks at no other."""
    model, lengths = model_of("Llama"), (5, 1, 9)
    model.set_attn_implementation("attnmask")
    documents = [random_ids(1, length) for length in lengths]
    packed, ends = torch.cat(documents, 1), np.cumsum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    starts = torch.tensor([0, *ends], dtype=torch.int32)
    with torch.no_grad():
        alone = [model(x, output_attentions=True).attentions for x in documents]
        for more in ({}, {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}):
            got = model(packed, position_ids=positions, output_attentions=True, **more).attentions
            for layer, weights in enumerate(got):
                right = torch.zeros_like(weights)
                for end, length, document in zip(ends, lengths, alone, strict=True):
                    right[..., end - length : end, end - length : end] = document[layer]
                torch.testing.assert_close(weights, right, rtol=0, atol=1e-5)


def test_beside_a_loss():
    """Models are trained while their weights are looked at, which have no gradient."""
    model, ids = model_of("Llama"), random_ids(2, TOKENS)
    (plain, _), (output, _) = by_both(model, lambda: model(ids, labels=ids, output_attentions=True))
    output.loss.backward()
    torch.testing.assert_close(output.loss, plain.loss)
    assert model.model.embed_tokens.weight.grad.abs().max() > 0
    with pytest.raises(RuntimeError, match="attention_weights has no gradient"):
        model(ids, output_attentions=True).attentions[0].square().sum().backward()


def test_only_if_asked_for():
    query, rows = torch.randn(1, 2, 6, 8), torch.ones(1, 6)
    out, none = attention(torch.nn.Identity(), query, query, query, None)
    assert none is None
    again, weights = attention(torch.nn.Identity(), query, query, query, None, output_attentions=True)
    assert torch.equal(again, out)
    torch.testing.assert_close(weights @ query, out.transpose(1, 2))
    _, kept = attention(torch.nn.Identity(), query, query, query, None, dropout=0.5, output_attentions=True)
    assert_near([weights] * 2, [kept] * 2, rows, 0)


def test_pages():
    """Their keys are not in one place."""
    model = model_of("Llama")
    model.set_attn_implementation("attnmask")
    cache = attnmask.transformers.PagedCache(model.config, pages=8, page_size=16)
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match="output_attentions must be False with a PagedC"),
    ):
        model(random_ids(1, TOKENS), past_key_values=cache, output_attentions=True)
