"""Train the language model of train_tiny.py in JAX, compiled once: python examples/train_jax.py

`jax.jit` wants arrays of a fixed shape. So the documents, laid end to end, are cut into rows of 256 characters, and
each character has the number of its document: with `q_segment_ids`, attention stays within the documents of a row,
whatever their lengths, and nothing is compiled again. Four query heads share two key heads.
"""

import argparse
import importlib.util
import time
from functools import partial
from pathlib import Path

import numpy as np

try:
    import jax
    from jax import numpy as jnp
except ImportError as error:
    raise SystemExit(f"this example needs JAX: pip install jax ({error})") from None

import attnmask.jax

_spec = importlib.util.spec_from_file_location("train_tiny", Path(__file__).with_name("train_tiny.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

ROW = 256  # characters


def rows(rng, count):
    """Return characters, those that follow, and the document and position of each: all [count, ROW]."""
    characters, following, starts = tiny.packed(rng, 10 * count)
    documents, positions = attnmask.prepare_sequence_ids(starts), attnmask.prepare_position_ids(starts)
    cut = (x[: count * ROW].reshape(count, ROW) for x in (characters, following, documents, positions))
    return tuple(x.astype(np.int32) for x in cut)


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)


def rotate(x, positions):
    angles = positions[..., None, None] * 100.0 ** -jnp.linspace(0, 1, tiny.DEPTH // 2)
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def loss_of(params, characters, following, documents, positions):
    """Return the loss in bits per character."""
    x = params["embed"][characters]
    for layer in range(tiny.LAYERS):
        mixed = (norm(x) @ params[f"{layer}.qkv"]).reshape(*characters.shape, -1, tiny.DEPTH)
        query, key, value = jnp.split(mixed, [tiny.HEADS, tiny.HEADS + tiny.KV_HEADS], axis=2)
        out = attnmask.jax.flash_attention(
            rotate(query, positions), rotate(key, positions), value, causal=True, q_segment_ids=documents
        )
        x = x + out.reshape(*characters.shape, -1) @ params[f"{layer}.project"]
        hidden = jax.nn.relu(norm(x) @ params[f"{layer}.up"])
        x = x + hidden * hidden @ params[f"{layer}.down"]
    logs = jax.nn.log_softmax(norm(x) @ params["head"])
    return -jnp.take_along_axis(logs, following[..., None], axis=-1).mean() * tiny.BITS


@partial(jax.jit, donate_argnums=(0, 1, 2))
def train_step(params, means, squares, step, rate, batch):
    """Return what Adam makes of the parameters, its means and squares, and the loss."""
    loss, grads = jax.value_and_grad(loss_of)(params, *batch)
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
    squares = jax.tree.map(lambda s, g: 0.98 * s + 0.02 * g * g, squares, grads)

    def moved(param, mean, square):
        return param - rate * mean / (1 - 0.9**step) / (jnp.sqrt(square / (1 - 0.98**step)) + 1e-8)

    return jax.tree.map(moved, params, means, squares), means, squares, loss


def train(steps=200, count=4, rate=3e-3, seed=0, report=print):
    """Train; return the bits per character of unseen documents, for the model and for bigrams."""
    rng = np.random.default_rng(seed)
    params, unseen = jax.tree.map(jnp.asarray, tiny.parameters(rng)), rows(rng, 32)
    bigram = tiny.bigram_entropy(*(x.ravel() for x in unseen[:2]))
    size = sum(array.size for array in params.values())
    report(f"{size} parameters; bigram entropy {bigram:.3f} bits per character")
    means, squares = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    begin, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        now = rate * min(1, step / 20) * (1 - 0.9 * step / steps)
        params, means, squares, loss = train_step(params, means, squares, step, now, rows(rng, count))
        losses.append(float(loss))
        if step == 1 or step % 25 == 0:
            report(f"step {step:4}   loss {losses[-1]:.3f} bits   {time.perf_counter() - begin:5.1f} s")
    loss = float(jax.jit(loss_of)(params, *unseen))
    for line in tiny.curve(losses, bigram):
        report(line)
    report(f"unseen documents: {loss:.3f} bits per character, bigrams {bigram:.3f}")
    return loss, bigram


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny language model in JAX on made-up text.")
    parser.add_argument("--steps", type=int, default=200)
    train(parser.parse_args().steps)
