"""The programs in examples/ run and do what they say."""

import importlib.util
import sys
import xml.etree.ElementTree as ET

import ml_dtypes
import numpy as np
import pytest
from environment import ROOT, SANITIZED

import attnmask

EXAMPLES = ROOT / "examples"
TRAIN_TINY = EXAMPLES / "train_tiny.py"
pytestmark = [
    pytest.mark.skipif(not TRAIN_TINY.exists(), reason="the tests run without the examples"),
    pytest.mark.levels("once"),
]


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_tiny():
    return load("train_tiny")


def test_the_model_has_the_right_gradients(train_tiny):
    """Compared with central differences in float64, along random directions."""
    rng = np.random.default_rng(0)
    params = {name: array.astype(np.float64) for name, array in train_tiny.parameters(rng).items()}
    batch = train_tiny.packed(rng, 2)
    _, grads = train_tiny.loss_and_gradients(params, *batch)
    assert grads.keys() == params.keys()
    for name in params:
        move = rng.standard_normal(params[name].shape)
        losses = [
            train_tiny.loss_and_gradients(params | {name: params[name] + step * move}, *batch)[0]
            for step in (1e-6, -1e-6)
        ]
        slope = (losses[0] - losses[1]) / 2e-6
        np.testing.assert_allclose((grads[name] * move).sum(), slope, rtol=1e-5, atol=1e-8, err_msg=name)


def test_training_beats_bigrams(train_tiny):
    lines = []
    steps = 5 if SANITIZED else 80
    loss, bigram = train_tiny.train(steps=steps, count=6, report=lines.append)
    assert 1.5 < bigram < 3
    assert SANITIZED or loss < 0.8 * bigram
    assert [line.split()[0] for line in lines] == [
        str(lines[0].split()[0]),
        *["step"] * (1 + steps // 25),
        *[line.split()[0] for line in lines[-9:-1]],
        "unseen",
    ]
    drawn = "".join(lines[-9:-1])
    assert drawn.count("●") == min(steps, 60)
    assert drawn.count("bigrams") == 1


def test_a_hybrid_learns_and_writes():
    """Token by token it computes what it computes for whole documents, which do not see each other."""
    torch = pytest.importorskip("torch")
    module, lines = load("train_hybrid"), []
    steps = 2 if SANITIZED else 40
    model, loss, bigram = module.train(steps=steps, count=6, report=lines.append)
    assert SANITIZED or loss < 0.8 * bigram
    assert lines[-1].startswith("it writes: ")
    assert "".join(lines[-10:-2]).count("bigrams") == 1
    characters, _, starts = module.tiny.packed(np.random.default_rng(1), 3)
    with torch.no_grad():
        logits = model(torch.from_numpy(characters)[None], lambda i, mixer, x: mixer(x, starts))[0]
        states = [mixer.new_state() for mixer in model.mixers]
        for t in range(starts[-2], starts[-1]):
            token = torch.from_numpy(characters[t : t + 1])
            alone = model(token, lambda i, mixer, x: mixer.step(x, states[i]))
            np.testing.assert_allclose(alone[0], logits[t], atol=1e-4)


def test_training_in_jax(train_tiny):
    """One compiled step serves documents of any lengths, and the first loss is that of the model in NumPy."""
    pytest.importorskip("jax")
    module, lines = load("train_jax"), []
    steps = 2 if SANITIZED else 90
    loss, bigram = module.train(steps=steps, report=lines.append)
    assert SANITIZED or loss < 0.8 * bigram
    assert module.train_step._cache_size() == 1
    rng = np.random.default_rng(1)
    params, (characters, following, documents, positions) = train_tiny.parameters(rng), module.rows(rng, 1)
    starts = np.flatnonzero(np.diff(documents[0], prepend=-1, append=-2))
    expected, _ = train_tiny.loss_and_gradients(params, characters[0], following[0], starts)
    np.testing.assert_array_equal(positions[0], attnmask.prepare_position_ids(starts))
    found = module.loss_of(params, characters, following, documents, positions)
    np.testing.assert_allclose(found, expected * train_tiny.BITS, rtol=1e-5)


@pytest.mark.parametrize(("pages", "evicted"), [(8, True), (14, True), (100, False)])
def test_a_server_in_numpy(pages, evicted):
    """Requests get the tokens that they get alone, whatever ran beside them: the program compares them."""
    lines = []
    requests, steps = load("serve_numpy").main(8, pages, lines.append)
    assert len([line for line in lines if "is done" in line]) == len(requests) == 8
    assert any("is evicted" in line for line in lines) == evicted
    longest = max(request.total for request in requests)
    assert steps < longest if pages == 100 else steps > 0
    with pytest.raises(ValueError, match="request 0 needs more than 1 pages"):
        load("serve_numpy").main(8, 1, lines.append)


def test_a_map_of_weights(tmp_path, monkeypatch, capsys):
    """Each cell tells its weight; a pronoun looks at its noun, and a word of its own at the start."""
    example, out = load("weights_map"), tmp_path / "weights.svg"
    monkeypatch.setattr(sys, "argv", ["weights_map.py", "--out", str(out)])
    example.main()
    assert "they       because  94%      dogs  99%" in capsys.readouterr().out.splitlines()
    groups = ET.parse(out).getroot()
    words, svg = [word for word, *_ in example.SENTENCE], "{http://www.w3.org/2000/svg}"
    assert [group[0].text for group in groups] == example.HEADS
    for group in groups:
        titles = [title.text for title in group.iter(f"{svg}title")]
        assert [title.partition(":")[0] for title in titles] == [f"{a} → {b}" for a in words for b in words]
    query, key, terms = example.queries_and_keys()
    logits = np.einsum("bqhd,bkhd->bhqk", query, key).astype(np.float64)
    distance = np.arange(len(words)) - np.arange(len(words))[:, None]
    logits += terms["relative_bias"][:, np.clip(distance + 2, 0, 2)]
    weights = np.exp(np.where(distance > 0, -np.inf, logits))
    weights /= weights.sum(-1, keepdims=True)
    shown = [float(cell.get("fill-opacity")) for cell in groups.iter(f"{svg}rect")]
    np.testing.assert_allclose(shown, 0.04 + 0.96 * weights.ravel(), atol=0.006)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float32, 1e-5), (ml_dtypes.bfloat16, 1e-2), (np.int8, 3e-2)], ids=str
)
def test_a_latent_cache_replaces_the_expanded_one(dtype, bound):
    """Absorbed projections give the numbers of the expanded layer, from a tenth of the memory."""
    example, rng = load("latent_cache"), np.random.default_rng(0)
    weights, prompt = example.weights(rng), rng.standard_normal((40, example.WIDTH)).astype(np.float32)
    expanded = example.Expanded(weights, 64)
    absorbed = example.Absorbed(weights, 64, np.dtype(dtype))
    expected, got = (example.generate(layer, prompt, 3) for layer in (expanded, absorbed))
    assert np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()) < bound
    assert 8 * example.bytes_per_token(absorbed.cache) < example.bytes_per_token(expanded.cache)


def test_when_tokens_were_said():
    """At the times that transformers finds by its eager attention."""
    pytest.importorskip("transformers")
    lines = []
    found, theirs = load("whisper_timestamps").main(lines.append)
    np.testing.assert_allclose(found, theirs, atol=1e-6)
    assert len(lines) == len(found)
    assert len(set(found.tolist())) > 4


def test_reranking():
    """Scores are those of padded batches; the program compares them."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    lines = []
    found = load("rerank").main(70, lines.append)
    assert len(lines) == 2 + len(found)
    assert all(len(scores) == 70 and scores.std() > 0.1 for scores in found.values())
