"""Encoders: packed texts give what each gives alone, and sentence-transformers what it gives with eager attention."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import assert_close, later, model_of, random_ids  # noqa: E402

import attnmask.torch  # noqa: E402
import attnmask.transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
TEXTS = {
    "many": (5, 1, 19, 33, 2),
    "with empty ones": (0, 7, 0, 0, 30, 1, 0),
    "one": (21,),
    "of one token": (1, 1, 1),
}
EVERY = 3  # layer of ModernBERT sees all of a text


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnmask.transformers.register()


# Packed


def packed(texts):
    """Arguments of a model for texts end to end."""
    lengths = [text.shape[1] for text in texts]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    return {
        "input_ids": torch.cat(texts, dim=1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def alone(model, texts):
    return torch.cat([model(text).logits for text in texts if text.shape[1]], dim=1)


def with_gradients(model, logits):
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    (logits * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | grads


@pytest.mark.parametrize("lengths", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("window", [None, 2, 4, 6, 12, 128])
def test_packed_texts(window, lengths):
    """Of Bert, and of ModernBERT with two layers of windows for each layer without."""
    if window is None:
        model = model_of("Bert")
    else:
        model = model_of(
            "ModernBert", num_hidden_layers=4, local_attention=window, global_attn_every_n_layers=EVERY
        )
        kinds = ["sliding_attention" if layer % EVERY else "full_attention" for layer in range(4)]
        assert model.config.layer_types == kinds
    texts = [random_ids(1, length) for length in lengths]
    model = model.double()
    found = {}
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        found[name] = with_gradients(model, alone(model, texts))
    model.set_attn_implementation("attnmask")
    actual = with_gradients(model, model(**packed(texts)).logits)
    assert_close(actual, found["sdpa"], 1e-9)
    assert_close(actual, found["eager"])  # whose softmax is in float32


def test_windows_matter():
    """The comparison above can fail: neither all windows nor none give the same."""
    texts = [random_ids(1, length) for length in TEXTS["many"]]
    found = []
    for every in (1, 2, EVERY, 9):
        model = model_of(
            "ModernBert", num_hidden_layers=4, local_attention=4, global_attn_every_n_layers=every
        )
        model.set_attn_implementation("attnmask")
        with torch.no_grad():
            found.append(model(**packed(texts)).logits)
    for a, b in itertools.combinations(found, 2):
        assert (a - b).abs().max() > 0.01


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_the_order_of_texts(name):
    """Attention of a text has the same bits wherever it lies; what else there is computes row by row."""
    model, texts = model_of(name), [random_ids(1, length) for length in TEXTS["many"]]
    model.set_attn_implementation("attnmask")
    with torch.no_grad():
        first, second = (model(**packed(row)).logits[0] for row in (texts, texts[::-1]))
    lengths = list(TEXTS["many"])
    back = torch.cat(second.split(lengths[::-1])[::-1])
    assert_close({"logits": back}, {"logits": first}, 1e-6)


# sentence-transformers

WORDS = [f"w{number}" for number in range(30)]


def sentences():
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, length)) for length in (3, 41, 1, 12, 7, 28, 2, 19)]


@pytest.fixture(scope="module", params=["Bert", pytest.param("ModernBert", marks=later)])
def saved(request, tmp_path_factory):
    """The folder of a tiny model and of a tokenizer that knows a few words."""
    pytest.importorskip("sentence_transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)
    folder, model = tmp_path_factory.mktemp(request.param), model_of(request.param, num_hidden_layers=3)
    model.base_model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return str(folder)


def embeddings(folder, implementation, pooling="mean", **more):
    from sentence_transformers import SentenceTransformer, models

    given = {"attn_implementation": implementation}
    transformer = models.Transformer(folder, model_kwargs=given)
    assert transformer.auto_model.config._attn_implementation == implementation
    size = transformer.auto_model.config.hidden_size
    model = SentenceTransformer(modules=[transformer, models.Pooling(size, pooling)], device="cpu")
    return model.encode(sentences(), batch_size=3, show_progress_bar=False, **more)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_sentence_embeddings(saved, pooling):
    expected = embeddings(saved, "eager", pooling)
    assert expected.shape == (8, 32)
    assert np.ptp(expected, axis=0).min() > 0.01
    with attnmask.torch.installed():
        installed = embeddings(saved, "sdpa", pooling)
    for actual in (installed, embeddings(saved, "attnmask", pooling)):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_sentences_in_order(saved):
    """Sentences of one batch or of many, with tensors as results."""
    batches = [embeddings(saved, "attnmask", convert_to_tensor=True) for _ in range(2)]
    assert torch.equal(*batches)


def test_a_cross_encoder(saved):
    from sentence_transformers import CrossEncoder

    texts, scores = sentences(), {}
    for implementation in ("eager", "attnmask"):
        torch.manual_seed(0)  # of the head, which is new
        model = CrossEncoder(
            saved, num_labels=1, device="cpu", model_kwargs={"attn_implementation": implementation}
        )
        assert model.model.config._attn_implementation == implementation
        scores[implementation] = model.predict([(texts[0], text) for text in texts], show_progress_bar=False)
        ranked = model.rank(texts[0], texts, show_progress_bar=False)
        assert [row["corpus_id"] for row in ranked] == (-scores[implementation]).argsort().tolist()
    expected = scores["eager"]
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(scores["attnmask"], expected, rtol=0, atol=1e-5)
