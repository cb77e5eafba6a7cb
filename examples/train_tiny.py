"""Train a two-layer language model to spell, in NumPy and attnmask only: python examples/train_tiny.py

The documents are a few made-up sentences, each about two animals, laid end to end; `cum_seqlens` keeps attention within
each of them. From the last character alone, nobody can predict the next one better than the bigram entropy. The model
soon does, first by words, then by what its document is about.

Each layer returns its result and a function that maps the gradient of the result to those of its inputs.
"""

import argparse
import time

import numpy as np

import attnmask

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz."
ANIMALS = ["badger", "beaver", "cricket", "falcon", "ferret", "heron", "lizard", "magpie", "otter", "raven"]
VERBS = ["admires", "avoids", "carries", "chases", "follows", "greets", "teaches", "watches"]
PLACES = ["at the harbour", "behind the barn", "by the river", "in the orchard", "under the moon"]
WIDTH, HEADS, KV_HEADS, DEPTH, LAYERS = 64, 4, 2, 16, 2
BITS = 1 / np.log(2)  # a nat in bits


def documents(rng, count):
    """Yield made-up texts as character numbers."""
    for _ in range(count):
        animals, sentences = rng.choice(ANIMALS, 2, replace=False), []
        for _ in range(rng.integers(1, 5)):
            one, other = rng.permutation(animals)
            sentences.append(f"the {one} {rng.choice(VERBS)} the {other} {rng.choice(PLACES)}.")
        yield np.array([ALPHABET.index(character) for character in "\n" + " ".join(sentences) + "\n"])


def packed(rng, count):
    """Return the characters, the characters that follow them, and where documents begin."""
    texts = list(documents(rng, count))
    lengths = [len(text) - 1 for text in texts]
    characters, following = (np.concatenate([text[cut] for text in texts]) for cut in np.s_[:-1, 1:])
    return characters, following, np.cumsum([0, *lengths])


def bigram_entropy(characters, following):
    counts = np.zeros((len(ALPHABET), len(ALPHABET)))
    np.add.at(counts, (characters, following), 1)
    chances = counts[characters, following] / counts.sum(axis=1)[characters]
    return -np.log(chances).mean() * BITS


def linear(x, weight):
    return x @ weight, lambda dy: (dy @ weight.T, x.T @ dy)


def norm(x):
    """Scale each token to a root mean square of 1."""
    scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    y = x * scale
    return y, lambda dy: scale * (dy - y * (dy * y).mean(axis=-1, keepdims=True))


def rotate(x, angles):
    """Rotate each pair of channels by its own angle, which grows with the token's position."""
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(x, qkv, project, starts):
    positions = attnmask.prepare_position_ids(starts).astype(np.float32)
    angles = positions[:, None, None] * (100.0 ** -np.linspace(0, 1, DEPTH // 2, dtype=np.float32))
    mixed, mixed_vjp = linear(x, qkv)
    mixed = mixed.reshape(len(x), -1, DEPTH)
    query, key, value = np.split(mixed, [HEADS, HEADS + KV_HEADS], axis=1)
    out, vjp = attnmask.flash_attention_vjp(
        rotate(query, angles), rotate(key, angles), value, cum_seqlens_q=starts, causal=True
    )
    y, y_vjp = linear(out.reshape(len(x), -1), project)

    def back(dy):
        dout, dproject = y_vjp(dy)
        grads = vjp(dout.reshape(out.shape))
        parts = rotate(grads.query, -angles), rotate(grads.key, -angles), grads.value
        dx, dqkv = mixed_vjp(np.concatenate(parts, axis=1).reshape(len(x), -1))
        return dx, dqkv, dproject

    return y, back


def perceptron(x, up, down):
    hidden, hidden_vjp = linear(x, up)
    active = np.maximum(hidden, 0)
    y, y_vjp = linear(active * active, down)

    def back(dy):
        dsquares, ddown = y_vjp(dy)
        dx, dup = hidden_vjp(2 * active * dsquares)
        return dx, dup, ddown

    return y, back


def cross_entropy(logits, following):
    rows = np.arange(len(logits))
    logs = logits - logits.max(axis=1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    dlogits = np.exp(logs)
    dlogits[rows, following] -= 1
    return -logs[rows, following].mean(), dlogits / len(logits)


def parameters(rng):
    def matrix(rows, columns, size=1.0):
        return (rng.standard_normal((rows, columns)) * size / np.sqrt(rows)).astype(np.float32)

    made = {"embed": matrix(len(ALPHABET), WIDTH), "head": matrix(WIDTH, len(ALPHABET), 0.1)}
    for layer in range(LAYERS):
        made[f"{layer}.qkv"] = matrix(WIDTH, (HEADS + 2 * KV_HEADS) * DEPTH)
        made[f"{layer}.project"] = matrix(HEADS * DEPTH, WIDTH, 0.5)
        made[f"{layer}.up"] = matrix(WIDTH, 4 * WIDTH)
        made[f"{layer}.down"] = matrix(4 * WIDTH, WIDTH, 0.5)
    return made


def loss_and_gradients(params, characters, following, starts):
    """Return the loss in nats per character, and its gradients."""
    x, steps = params["embed"][characters], []
    for layer in range(LAYERS):
        for function, names, more in (
            (attention, ("qkv", "project"), (starts,)),
            (perceptron, ("up", "down"), ()),
        ):
            names = [f"{layer}.{name}" for name in names]
            normed, norm_vjp = norm(x)
            y, vjp = function(normed, *(params[name] for name in names), *more)
            x = x + y
            steps.append((names, norm_vjp, vjp))
    last, last_vjp = norm(x)
    logits, head_vjp = linear(last, params["head"])
    loss, dlogits = cross_entropy(logits, following)

    dlast, dhead = head_vjp(dlogits)
    dx, grads = last_vjp(dlast), {"head": dhead, "embed": np.zeros_like(params["embed"])}
    for names, norm_vjp, vjp in reversed(steps):
        dnormed, *rest = vjp(dx)
        grads |= zip(names, rest, strict=True)
        dx = dx + norm_vjp(dnormed)
    np.add.at(grads["embed"], characters, dx)
    return loss, grads


def curve(losses, bigram, width=60, height=8):
    """Draw the losses as lines of text, with a line for the bigrams."""
    means = [part.mean() for part in np.array_split(np.array(losses), min(width, len(losses)))]
    top = max(*means, bigram)
    rows = [max(0, min(height - 1, int(height * mean / top))) for mean in means]
    for row in reversed(range(height)):
        line = "".join("●" if at == row else " " for at in rows)
        level = row == min(height - 1, int(height * bigram / top))
        yield f"{top * (row + 0.5) / height:5.2f} ┤ {line.replace(' ', '·') if level else line.rstrip()}" + (
            " bigrams" if level else ""
        )


def train(steps=200, count=8, rate=3e-3, seed=0, report=print):
    """Train; return the bits per character of unseen documents, for the model and for bigrams."""
    rng = np.random.default_rng(seed)
    params, unseen = parameters(rng), packed(rng, 100)
    bigram = bigram_entropy(*unseen[:2])
    report(
        f"{sum(array.size for array in params.values())} parameters; bigram entropy {bigram:.3f} bits per character"
    )
    means, squares = ({name: np.zeros_like(array) for name, array in params.items()} for _ in range(2))
    begin, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        loss, grads = loss_and_gradients(params, *packed(rng, count))
        losses.append(loss * BITS)
        now = rate * min(1, step / 20) * (1 - 0.9 * step / steps)
        for name, grad in grads.items():  # Adam
            means[name] += 0.1 * (grad - means[name])
            squares[name] += 0.02 * (grad * grad - squares[name])
            mean, square = means[name] / (1 - 0.9**step), squares[name] / (1 - 0.98**step)
            params[name] -= now * mean / (np.sqrt(square) + 1e-8)
        if step == 1 or step % 25 == 0:
            report(f"step {step:4}   loss {loss * BITS:.3f} bits   {time.perf_counter() - begin:5.1f} s")
    loss = loss_and_gradients(params, *unseen)[0] * BITS
    for line in curve(losses, bigram):
        report(line)
    report(f"unseen documents: {loss:.3f} bits per character, bigrams {bigram:.3f}")
    return loss, bigram


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny language model on made-up text.")
    parser.add_argument("--steps", type=int, default=200)
    train(parser.parse_args().steps)
