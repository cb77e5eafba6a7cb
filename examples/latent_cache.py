"""Multi-head latent attention, as in DeepSeek and Kimi: one short vector per token in the cache.

python examples/latent_cache.py [--dtype float32 | bfloat16 | int8 | float8]

A layer makes keys and values of all heads from one latent vector per token. Expanded, a cache holds keys and values of
every head. Absorbed, it holds the latents alone: the projection to keys moves into the queries, and the projection to
values behind the result, where all heads share one key head of 576 channels, whose first 512 are the values::

    q · (W_k c)  =  (W_kᵀ q) · c            Σ p (W_v c)  =  W_v (Σ p c)

This program generates a few tokens both ways, and prints the difference and the memory.
"""

import argparse

import numpy as np

import attnmask

WIDTH, HEADS, RANK, ROTARY, NOPE, VALUE = 256, 16, 512, 64, 128, 128
SCALE = (NOPE + ROTARY) ** -0.5


def weights(rng):
    def made(*shape, of):
        return (rng.standard_normal(shape) * of**-0.5).astype(np.float32)

    return {
        # A token's latent, and the part of its key that encodes its position.
        "down": made(WIDTH, RANK + ROTARY, of=WIDTH),
        "query": made(WIDTH, HEADS, NOPE + ROTARY, of=WIDTH),
        "key": made(HEADS, NOPE, RANK, of=RANK),
        "value": made(HEADS, VALUE, RANK, of=RANK),
        "out": made(HEADS, VALUE, WIDTH, of=HEADS * VALUE),
    }


def rotated(x, positions):
    """Turn pairs of channels [..., tokens, heads, 2n] by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    sin, cos = np.sin(angles).astype(x.dtype), np.cos(angles).astype(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


def projected(w, x, positions):
    """Return the queries in two parts, and the latents and rotary keys, of tokens [tokens, WIDTH]."""
    query = np.einsum("te,ehd->thd", x, w["query"])
    down = x @ w["down"]
    rotary = rotated(down[:, None, RANK:], positions)
    return query[..., :NOPE], rotated(query[..., NOPE:], positions), down[:, None, :RANK], rotary


class Expanded:
    """The layer with keys and values of all heads in its cache."""

    def __init__(self, w, tokens, dtype=np.float32):
        self.w, self.length = w, 0
        self.cache = attnmask.KVCache(
            HEADS, NOPE + ROTARY, value_head_dim=VALUE, pages=-(-tokens // 64), dtype=dtype
        )
        self.sequence = self.cache.new_sequence()

    def __call__(self, x):
        positions = np.arange(self.length, self.length + len(x))
        q_nope, q_rotary, latent, k_rotary = projected(self.w, x, positions)
        key = np.einsum("tr,hdr->thd", latent[:, 0], self.w["key"])
        key = np.concatenate([key, np.repeat(k_rotary, HEADS, axis=1)], axis=-1)
        value = np.einsum("tr,hdr->thd", latent[:, 0], self.w["value"])
        query = np.concatenate([q_nope, q_rotary], axis=-1)
        with self.cache.step([self.sequence], len(x)) as step:
            out = step.attend(0, query[None], key[None], value[None], softmax_scale=SCALE)[0]
        self.length += len(x)
        return np.einsum("thd,hde->te", out, self.w["out"])


class Absorbed:
    """The same layer with latents in its cache."""

    def __init__(self, w, tokens, dtype=np.float32):
        self.w, self.length = w, 0
        self.cache = attnmask.KVCache(
            1, RANK + ROTARY, value_head_dim=RANK, latent=True, pages=-(-tokens // 64), dtype=dtype
        )
        self.sequence = self.cache.new_sequence()

    def __call__(self, x):
        positions = np.arange(self.length, self.length + len(x))
        q_nope, q_rotary, latent, k_rotary = projected(self.w, x, positions)
        query = np.concatenate([np.einsum("thd,hdr->thr", q_nope, self.w["key"]), q_rotary], axis=-1)
        key = np.concatenate([latent, k_rotary], axis=-1)  # its first RANK channels are the values, too
        with self.cache.step([self.sequence], len(x)) as step:
            out = step.attend(0, query[None], key[None], softmax_scale=SCALE)[0]
        self.length += len(x)
        out = np.einsum("thr,hdr->thd", out, self.w["value"])
        return np.einsum("thd,hde->te", out, self.w["out"])


def generate(layer, prompt, steps):
    """Feed the layer its own results, as a model of many layers would with its tokens."""
    results = [layer(prompt)]
    for _ in range(steps):
        last = results[-1][-1:]
        results.append(layer(last / np.sqrt((last * last).mean())))
    return np.concatenate(results)


def bytes_per_token(cache):
    """Return what a token takes in a layer, with its scale."""
    held = [cache.k_pages, cache.k_scales, *(() if cache.latent else (cache.v_pages, cache.v_scales))]
    return sum(x[0, 0, 0].nbytes for x in held if x is not None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "int8", "float8"])
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    if options.dtype in ("bfloat16", "float8"):
        import ml_dtypes

        dtype = ml_dtypes.bfloat16 if options.dtype == "bfloat16" else ml_dtypes.float8_e4m3fn
    else:
        dtype = np.dtype(options.dtype)
    rng = np.random.default_rng(0)
    w, prompt = weights(rng), rng.standard_normal((options.tokens, WIDTH)).astype(np.float32)
    expanded, absorbed = Expanded(w, options.tokens + 64), Absorbed(w, options.tokens + 64, dtype)
    expected, got = generate(expanded, prompt, 4), generate(absorbed, prompt, 4)
    error = np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean())
    print(f"{options.tokens} tokens and 4 generated ones, {HEADS} heads")
    for name, layer, kind in (("expanded", expanded, "float32"), ("absorbed", absorbed, options.dtype)):
        print(f"{name:10}{kind:>10}{bytes_per_token(layer.cache):>8,} bytes per token and layer")
    print(f"relative difference of the results: {error:.1e}")


if __name__ == "__main__":
    main()
