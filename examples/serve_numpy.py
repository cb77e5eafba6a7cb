"""Answer many requests from one paged cache, in NumPy and attnmask only: python examples/serve_numpy.py

There are more requests than the cache has room for. Each turn admits requests while pages are free, and takes one step
of all that run: new prompts are read while the others write a token, in one row without padding. When the pages run
out, the youngest request is evicted: its pages are given back, and it waits again. What it has written is kept, and
read again as a longer prompt.

The model has random weights, so its answers are no text, but they are checked: each request gets the tokens that it
gets alone, whatever ran beside it and however often it was evicted.
"""

import argparse
from collections import deque
from dataclasses import dataclass

import numpy as np

import attnmask

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 128, 4, 2, 32, 2
PAGE_SIZE = 16


def norm(x):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)


def rotate(x, positions):
    """Rotate each pair of channels by its own angle, which grows with the token's position."""
    rates = 100.0 ** -np.linspace(0, 1, HEAD_DIM // 2)
    angles = (positions[:, None, None] * rates).astype(np.float32)
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Model:
    """A language model of two layers, whose four query heads share two key heads."""

    def __init__(self, rng):
        def matrix(rows, columns):
            return (rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)

        self.embed, mixed = matrix(VOCABULARY, WIDTH), (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.layers = [
            (matrix(WIDTH, mixed), matrix(HEADS * HEAD_DIM, WIDTH), matrix(WIDTH, 256), matrix(256, WIDTH))
            for _ in range(LAYERS)
        ]

    def __call__(self, tokens, positions, attend):
        """Return the logits of the next tokens. `attend(layer, query, key, value)` knows the tokens before."""
        x = self.embed[tokens]
        for layer, (mix, project, up, down) in enumerate(self.layers):
            mixed = (norm(x) @ mix).reshape(len(x), -1, HEAD_DIM)
            query, key, value = np.split(mixed, [HEADS, HEADS + KV_HEADS], axis=1)
            out = attend(layer, rotate(query, positions), rotate(key, positions), value)
            x = x + out.reshape(len(x), -1) @ project
            x = x + np.maximum(norm(x) @ up, 0) @ down
        return norm(x) @ self.embed.T


@dataclass
class Request:
    name: str
    tokens: list[int]  # the prompt, and what is written
    total: int  # tokens when it is done


def serve(model, requests, pages, report=print):
    """Answer the requests: write to their tokens. Return the number of steps."""
    for request in requests:
        if attnmask.cdiv(request.total, PAGE_SIZE) > pages:
            raise ValueError(f"{request.name} needs more than {pages} pages")
    cache = attnmask.KVCache(
        KV_HEADS, HEAD_DIM, layers=LAYERS, pages=pages, page_size=PAGE_SIZE, dtype=np.float32
    )
    waiting, running, steps = deque(requests), {}, 0  # running: by sequence of the cache, the oldest first
    while waiting or running:
        # Admit: there must be pages for the prompt, and one more for each that runs.
        spare = cache.free_pages - len(running)
        while waiting and (needed := attnmask.cdiv(len(waiting[0].tokens), PAGE_SIZE)) <= spare:
            running[cache.new_sequence()] = waiting.popleft()
            spare -= needed + 1

        # One step: all tokens that are not in the cache, which are a prompt or the last one that was written.
        ids, active = list(running), list(running.values())
        lengths = cache.lengths(ids)
        new = [request.tokens[length:] for request, length in zip(active, lengths, strict=True)]
        counts = [len(tokens) for tokens in new]
        places = [length + np.arange(count) for length, count in zip(lengths, counts, strict=True)]
        try:
            with cache.step(ids, counts) as step:
                logits = model(np.concatenate(new), np.concatenate(places), step.attend)
        except MemoryError:  # nothing has changed
            youngest, request = running.popitem()
            cache.free(youngest)
            waiting.appendleft(request)
            report(f"{request.name} is evicted at token {len(request.tokens)}")
            continue
        steps += 1

        # Write: the token that the last one of each request makes likeliest.
        for id, request, last in zip(ids, active, np.cumsum(counts) - 1, strict=True):
            request.tokens.append(int(logits[last].argmax()))
            if len(request.tokens) == request.total:
                cache.free(id)
                del running[id]
                report(f"{request.name} is done after {steps} steps; {cache.free_pages} pages are free")
    return steps


def alone(model, prompt, total):
    """Return the tokens of a request that runs alone, without a cache."""

    def attend(layer, query, key, value):
        return attnmask.flash_attention(query[None], key[None], value[None], causal=True)[0]

    tokens = list(prompt)
    while len(tokens) < total:
        tokens.append(int(model(np.array(tokens), np.arange(len(tokens)), attend)[-1].argmax()))
    return tokens


def main(count=12, pages=16, report=print):
    rng = np.random.default_rng(0)
    model, requests = Model(rng), []
    for i in range(count):
        prompt = rng.integers(0, VOCABULARY, rng.integers(5, 60)).tolist()
        requests.append(Request(f"request {i}", prompt, len(prompt) + int(rng.integers(10, 60))))
    prompts = [list(request.tokens) for request in requests]
    steps = serve(model, requests, pages, report)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == alone(model, prompt, request.total), request.name
    written = sum(request.total - len(prompt) for request, prompt in zip(requests, prompts, strict=True))
    report(f"{written} tokens in {steps} steps, the same as one by one")
    return requests, steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer many requests from one paged cache.")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--pages", type=int, default=16, help="pages of 16 tokens, at least 8")
    given = parser.parse_args()
    main(given.requests, given.pages)
