"""Train on packed documents with Hugging Face transformers on a CPU: python examples/transformers_packed.py

Documents of very different lengths lie end to end in one row, without padding. With "attnmask" the model computes only
pairs within documents; with "sdpa" it gets a mask of all pairs and computes all of them. Both take the same steps from
the same weights, so their losses agree; time and memory differ.
"""

import argparse
import resource
import subprocess
import sys
import time

import numpy as np

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(
        f"this example needs PyTorch and transformers: pip install torch transformers ({error})"
    ) from None

import attnmask.transformers

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS = 256, 128, 2, 8, 2


def documents(rng, tokens):
    """Return the starts of documents, most of them short, that fill a row."""
    starts = [0]
    while starts[-1] < tokens:
        starts.append(min(tokens, starts[-1] + int(rng.lognormal(5, 1)) + 2))
    return np.array(starts)


def batch(rng, tokens):
    """Return texts in which each token equals the one before or its successor, as arguments of the model."""
    starts = documents(rng, tokens)
    lengths = np.diff(starts)
    moves = rng.integers(0, 2, tokens)
    ids = (rng.integers(0, VOCABULARY, len(lengths)).repeat(lengths) + moves.cumsum()) % VOCABULARY
    labels = ids.copy()
    labels[starts[:-1]] = -100  # nothing before them predicts them
    positions = np.concatenate([np.arange(length) for length in lengths])
    given = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.from_numpy(x)[None] for name, x in given.items()}


def train(implementation, tokens, steps):
    """Return the loss and the seconds of each step."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
    )
    attnmask.transformers.register()
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, seconds = [], []
    for _ in range(steps):
        given = batch(rng, tokens)
        begin = time.perf_counter()
        loss = model(**given, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return losses, seconds


def report(implementation, tokens, steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    losses, seconds = train(implementation, tokens, steps)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024  # of KiB, on Linux
    print(
        f"{implementation:10} {np.median(seconds):8.3f} s per step {grown:8.0f} MiB"
        f"    loss {losses[0]:.4f} -> {losses[-1]:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny Llama on packed documents.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=["attnmask", "sdpa"], help="run only this one, in this process")
    given = parser.parse_args()
    if given.only:
        report(given.only, given.tokens, given.steps)
    else:
        print(f"{given.tokens} tokens of documents in one row, {LAYERS} layers, {HEADS} heads")
        for name in ("attnmask", "sdpa"):  # each in its own process, to measure its memory
            sizes = ["--tokens", str(given.tokens), "--steps", str(given.steps)]
            subprocess.run([sys.executable, __file__, "--only", name, *sizes], check=True)
