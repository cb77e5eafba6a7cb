"""Train a tiny hybrid language model on packed text: python examples/train_hybrid.py

Two layers of gated delta rule, as Qwen3-Next has them, and one of softmax attention with grouped key heads, in
PyTorch. The documents of train_tiny.py are laid end to end: `cu_seqlens` keeps convolutions, states and attention
within each of them. At the end the model writes a document, one token at a time: linear layers then take the same
memory and time for each token.
"""

import argparse
import importlib.util
import time
from pathlib import Path

import numpy as np

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: pip install torch ({error})") from None

import attnmask.torch

_spec = importlib.util.spec_from_file_location("train_tiny", Path(__file__).with_name("train_tiny.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

WIDTH, HEADS, KV_HEADS, DEPTH = 64, 4, 2, 16


class DeltaNet(nn.Module):
    """The gated delta rule, behind a short convolution of queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * HEADS * DEPTH, bias=False)
        self.gates = nn.Linear(WIDTH, 2 * HEADS)
        self.filter = nn.Parameter(torch.randn(3 * HEADS * DEPTH, 4) / 2)
        self.project = nn.Linear(HEADS * DEPTH, WIDTH, bias=False)

    def heads(self, x):
        return x.unflatten(-1, (-1, HEADS, DEPTH)).unbind(-3)

    def forward(self, x, starts):
        mixed = attnmask.torch.short_convolution(
            self.mixed(x), self.filter, activation="silu", cu_seqlens=starts
        )
        query, key, value = self.heads(mixed)
        decay, beta = self.gates(x).chunk(2, dim=-1)
        out = attnmask.torch.linear_attention(
            query,
            key,
            value,
            decay=F.logsigmoid(decay + 3),  # the logarithm of what is kept; most of it, at first
            beta=beta.sigmoid(),
            cu_seqlens=starts,
            normalize_qk=True,
        )
        return self.project(out.flatten(-2))

    def step(self, x, state):
        """Take one token [1, WIDTH], and write to the state."""
        tail, memory = state
        mixed = attnmask.torch.short_convolution_step(self.mixed(x), self.filter, tail, activation="silu")
        query, key, value = self.heads(mixed)
        decay, beta = self.gates(x).chunk(2, dim=-1)
        out = attnmask.torch.linear_attention_step(
            query, key, value, memory, decay=F.logsigmoid(decay + 3), beta=beta.sigmoid(), normalize_qk=True
        )
        return self.project(out.flatten(-2))

    def new_state(self):
        return torch.zeros(1, 3 * HEADS * DEPTH, 3), torch.zeros(1, HEADS, DEPTH, DEPTH)


class Attention(nn.Module):
    """Softmax attention, without positions: the linear layers before it know the order.

    Each key head serves two query heads. Keys and values are not repeated for it.
    """

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DEPTH, bias=False)
        self.project = nn.Linear(HEADS * DEPTH, WIDTH, bias=False)

    def heads(self, x):
        """Return queries [..., HEADS, DEPTH], and keys and values [..., KV_HEADS, DEPTH]."""
        return self.mixed(x).unflatten(-1, (-1, DEPTH)).split([HEADS, KV_HEADS, KV_HEADS], dim=-2)

    def forward(self, x, starts):
        query, key, value = self.heads(x[0])
        out = attnmask.torch.flash_attention(query, key, value, cum_seqlens_q=starts, causal=True)
        return self.project(out.flatten(-2))[None]

    def step(self, x, state):
        """Take one token. What it attends to grows."""
        query, key, value = self.heads(x)
        for held, new in zip(state, (key, value), strict=True):
            held.append(new)
        keys, values = (torch.stack(held, dim=1) for held in state)
        return self.project(attnmask.torch.flash_attention(query[:, None], keys, values).flatten(1))

    def new_state(self):
        return [], []


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(tiny.ALPHABET), WIDTH)
        self.mixers = nn.ModuleList([DeltaNet(), DeltaNet(), Attention()])
        self.perceptrons = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in self.mixers
        )
        self.head = nn.Linear(WIDTH, len(tiny.ALPHABET), bias=False)

    def forward(self, characters, mix):
        """`mix` calls a mixer, for packed documents or for one token."""
        x = self.embed(characters)
        for i, (mixer, perceptron) in enumerate(zip(self.mixers, self.perceptrons, strict=True)):
            x = x + mix(i, mixer, F.rms_norm(x, (WIDTH,)))
            x = x + perceptron(F.rms_norm(x, (WIDTH,)))
        return self.head(F.rms_norm(x, (WIDTH,)))

    def loss(self, characters, following, starts):
        """Bits per character of packed documents."""
        logits = self(torch.from_numpy(characters)[None], lambda i, mixer, x: mixer(x, starts))
        return F.cross_entropy(logits[0], torch.from_numpy(following)) * tiny.BITS

    @torch.no_grad()
    def write(self, characters=120):
        """Return a document, of which each character is drawn from the model's chances."""
        states, text = [mixer.new_state() for mixer in self.mixers], "\n"
        while len(text) < characters and (len(text) == 1 or text[-1] != "\n"):
            token = torch.tensor([tiny.ALPHABET.index(text[-1])])
            logits = self(token, lambda i, mixer, x: mixer.step(x, states[i]))
            text += tiny.ALPHABET[torch.multinomial(logits.softmax(-1), 1).item()]
        return text.strip()


def train(steps=100, count=8, rate=4e-3, seed=0, report=print):
    """Train; return the model, and the bits per character of unseen documents, for it and for bigrams."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model, unseen = Hybrid(), tiny.packed(rng, 100)
    bigram = tiny.bigram_entropy(*unseen[:2])
    size = sum(parameter.numel() for parameter in model.parameters())
    report(f"{size} parameters; bigram entropy {bigram:.3f} bits per character")
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    begin, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        loss = model.loss(*tiny.packed(rng, count))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step == 1 or step % 25 == 0:
            report(f"step {step:4}   loss {losses[-1]:.3f} bits   {time.perf_counter() - begin:5.1f} s")
    with torch.no_grad():
        loss = model.loss(*unseen).item()
    for line in tiny.curve(losses, bigram):
        report(line)
    report(f"unseen documents: {loss:.3f} bits per character, bigrams {bigram:.3f}")
    report(f"it writes: {model.write()}")
    return model, loss, bigram


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny hybrid language model on made-up text.")
    parser.add_argument("--steps", type=int, default=100)
    train(parser.parse_args().steps)
