"""Serve prompts of different lengths with Hugging Face transformers on a CPU: python examples/serve_tiny.py

Requests arrive over time at a tiny Llama with random weights. With attnmask's `PagedCache`, the tokens of all sequences
share one row without padding: a new prompt is read while the other sequences advance by one token. For comparison,
transformers' own ``generate`` answers the prompts one by one, and all at once with padding (which in practice must wait
for the last one; here all are there from the start). The script checks that all answers agree before it measures
anything.
"""

import argparse
import time
from functools import partial

import numpy as np

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(
        f"this example needs PyTorch and transformers: pip install torch transformers ({error})"
    ) from None

import attnmask.transformers

VOCABULARY, PAGE_SIZE, TOGETHER = 512, 16, 8
CACHES = ("float32", "bfloat16", "int8", "int4")
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def tiny_llama(implementation):
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    attnmask.transformers.register()
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


def made_up_prompts(count, longest):
    """Make random prompts, most of them short."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(longest, rng.lognormal(3.5, 1, count).astype(int) + 1)
    return [torch.from_numpy(rng.integers(1, VOCABULARY, length)) for length in lengths]


def served(model, dtype, prompts, new_tokens, every=2, watch=lambda done: None):
    """Answer requests that arrive one every few steps, several at a time."""
    longest = max(map(len, prompts)) + new_tokens
    cache = attnmask.transformers.PagedCache(
        model.config, pages=TOGETHER * -(-longest // PAGE_SIZE), page_size=PAGE_SIZE, dtype=dtype
    )
    answers, sequences, arrived, steps = [[] for _ in prompts], {}, 0, 0
    while arrived < len(prompts) or sequences:
        if arrived < len(prompts) and len(sequences) < TOGETHER and steps % every == 0:
            sequences[arrived] = cache.kv.new_sequence()
            arrived += 1
        steps += 1
        if not sequences:
            continue
        new = [torch.tensor(answers[i][-1:]) if answers[i] else prompts[i] for i in sequences]
        counts = [len(tokens) for tokens in new]
        last = torch.tensor(counts).cumsum(0) - 1  # of each sequence: only its logits are needed
        with torch.no_grad(), cache.step(list(sequences.values()), counts) as inputs:
            logits = model(torch.cat(new)[None], **inputs, logits_to_keep=last).logits[0]
        for i, token in zip(list(sequences), logits.argmax(-1).tolist(), strict=True):
            answers[i].append(token)
            if len(answers[i]) == new_tokens:
                cache.kv.free(sequences.pop(i))
                watch(sum(len(answer) == new_tokens for answer in answers))
    return answers


def one_by_one(model, prompts, new_tokens, watch=lambda done: None):
    answers = []
    for prompt in prompts:
        tokens = model.generate(prompt[None], max_new_tokens=new_tokens, **GREEDY)
        answers.append(tokens[0, len(prompt) :].tolist())
        watch(len(answers))
    return answers


def padded(model, prompts, new_tokens, watch=lambda done: None):
    """Answer in batches, with prompts padded on the left."""
    answers = []
    for begin in range(0, len(prompts), TOGETHER):
        part = prompts[begin : begin + TOGETHER]
        longest = max(map(len, part))
        tokens, mask = torch.zeros(2, len(part), longest, dtype=torch.long)
        for row, live, prompt in zip(tokens, mask, part, strict=True):
            row[longest - len(prompt) :], live[longest - len(prompt) :] = prompt, 1
        out = model.generate(tokens, attention_mask=mask, max_new_tokens=new_tokens, **GREEDY)
        answers += out[:, longest:].tolist()
        watch(len(answers))
    return answers


def progress(name, count, show):
    return lambda done: show and print(f"\r{name:12} {done:4} of {count} requests", end="", flush=True)


def serve(requests=24, new_tokens=48, longest=400, caches=CACHES, report=print, show=False):
    """Return the tokens per second of each way: caches of these types, and without attnmask."""
    prompts = made_up_prompts(requests, longest)
    lengths = sorted(map(len, prompts))
    report(f"{requests} prompts of {lengths[0]} to {lengths[-1]} tokens, {new_tokens} new ones each")
    plain, own = tiny_llama("sdpa"), tiny_llama("attnmask")  # with the same weights
    ways = {"one by one": partial(one_by_one, plain), "padded": partial(padded, plain)}
    ways |= {dtype: partial(served, own, dtype) for dtype in caches}

    few, count = prompts[:3], min(new_tokens, 8)
    right = one_by_one(plain, few, count)
    for name in ("padded", *("float32" for dtype in caches if dtype == "float32")):
        assert ways[name](few, count) == right, f"{name} gives other tokens"
    for name in set(caches) - {"float32"}:  # these round keys: answers are those that each prompt gets alone
        alone = [ways[name]([prompt], count)[0] for prompt in few]
        assert ways[name](few, count) == alone, f"{name} gives other tokens beside other sequences"

    speeds = {}
    for name, way in ways.items():
        begin = time.perf_counter()
        answers = way(prompts, new_tokens, watch=progress(name, requests, show))
        seconds = time.perf_counter() - begin
        assert all(len(answer) == new_tokens for answer in answers)
        speeds[name] = requests * new_tokens / seconds
        what = "generate, sdpa" if name in ("one by one", "padded") else "PagedCache, one row"
        begin_of_line = "\r" if show else ""
        report(f"{begin_of_line}{name:12} {what:20} {seconds:7.2f} s {speeds[name]:9.1f} tokens/s")
    return speeds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve prompts of different lengths with a tiny Llama.")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest prompt")
    parser.add_argument(
        "--cache", nargs="+", default=CACHES, choices=CACHES, help="the types of caches to try"
    )
    given = parser.parse_args()
    serve(given.requests, given.new_tokens, given.longest, given.cache, show=True)
