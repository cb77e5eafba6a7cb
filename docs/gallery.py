"""The masks of the gallery, one function each: the docstring is title and text, the body is shown as code."""

# ruff: noqa: E731 - a function of indices is shorter as a lambda, and that is how it is shown

import numpy as np

from attnmask import MaskInfo


def causal():
    """Causal: GPT, Llama

    Each token sees itself and the tokens before it. `flash_attention` takes ``causal=True`` as well.
    """
    mask = MaskInfo.causal(16)
    return mask


def bottom_right():
    """Causal with a cache

    Four new queries over sixteen keys: the last query is aligned with the last key.
    """
    mask = MaskInfo.causal(4, 16, offset="bottom-right")
    return mask


def bidirectional():
    """Bidirectional: BERT

    Every token sees every token.
    """
    mask = MaskInfo.full(16)
    return mask


def cross_attention():
    """Cross attention: T5, Whisper

    Six queries of the decoder see all tokens of the encoder except the padding at its end.
    """
    mask = MaskInfo.full(6, 16).apply_kv_lengths([12])
    return mask


def padding_right():
    """Padding on the right

    Rows of 10 and 16 tokens in a batch; this is the first. No array of tokens is kept.
    """
    mask = MaskInfo.from_lengths([10, 16]).apply_causal()
    return mask[0, ...]


def padding_left():
    """Padding on the left

    Batched generation pads on the left. The tokenizer's ``attention_mask`` says which tokens are real.
    """
    attention_mask = np.arange(16)[None] >= 5
    mask = MaskInfo.from_padding_mask(attention_mask).apply_causal()
    return mask


def packed_documents():
    """Packed documents

    Training without padding: documents of 4, 7 and 5 tokens in one row do not see each other.
    """
    cu_seqlens = [0, 4, 11, 16]
    mask = MaskInfo.from_cu_seqlens(cu_seqlens, packed=True).apply_causal()
    return mask


def sliding_window():
    """Sliding window: Mistral

    A token sees itself and three tokens back.
    """
    mask = MaskInfo.causal(16).apply_sliding_window((3, 0))
    return mask


def gemma():
    """Gemma: local and global layers

    Every second layer (Gemma 2) or five out of six (Gemma 3) have a window, the others are causal. The soft caps of
    Gemma 2 are ``logits_soft_cap`` of `flash_attention`.
    """
    global_layers = MaskInfo.causal(16)
    mask = global_layers.apply_sliding_window((5, 0))
    return mask


def gpt_oss():
    """gpt-oss: a window and sinks

    Half of the layers have a window. The learned sinks are logits, not tokens: ``softmax_aux=sinks[:, None]`` of
    `flash_attention`.
    """
    mask = MaskInfo.causal(16).apply_sliding_window((3, 0))
    return mask


def streaming_llm():
    """StreamingLLM: attention sinks

    A window, and the first two tokens stay visible to all later ones.
    """
    mask = MaskInfo.full(16).apply_sliding_window((4, 0)).apply_prefix(2).apply_causal()
    return mask


def llama4():
    """Llama 4: chunked attention

    A token sees the tokens before it in its own chunk of six.
    """
    mask = MaskInfo.full(16).apply_chunked(6)
    return mask


def prefix_lm():
    """Prefix LM: PaliGemma, UL2, GLM

    The first six tokens see each other in both directions; the rest is causal.
    """
    mask = MaskInfo.causal(16).apply_prefix(6)
    return mask


def images_in_text():
    """Gemma 3: images in text

    Tokens of one image see each other in both directions. Token types number the images; 0 is text.
    """
    token_types = [[1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0]]
    mask = MaskInfo.causal(16).apply_token_type_ids(token_types)
    return mask


def qwen_vl():
    """Qwen-VL: windows in the image

    The vision encoder attends within windows of patches, which ``cu_seqlens`` lists.
    """
    cu_window_seqlens = [0, 4, 8, 12, 14, 16]
    mask = MaskInfo.from_cu_seqlens(cu_window_seqlens, packed=True)
    return mask


def longformer():
    """Longformer

    A window in both directions, and two tokens that see everything and are seen by everyone.
    """
    is_global = np.isin(np.arange(16), [0, 7])
    f = lambda b, h, q, k: (abs(q - k) <= 1) | is_global[q] | is_global[k]
    mask = MaskInfo.from_function(f, 16, 16)
    return mask


def bigbird():
    """BigBird

    Blocks: neighbors, the first block in both directions, and some at random.
    """
    blocks = abs(np.subtract.outer(np.arange(8), np.arange(8))) <= 1
    blocks[0] = blocks[:, 0] = True
    blocks[np.arange(8), np.random.default_rng(1).permutation(8)] = True
    mask = MaskInfo.from_blocks(blocks[None, None], 2)
    return mask


def neighborhood():
    """Neighborhood: NATTEN

    Images row after row: each pixel sees those around it, here 3 × 3 of 4 × 4.
    """
    mask = MaskInfo.neighborhood((4, 4), 3)
    return mask


def dilated():
    """Dilated window: LongNet

    Every second token of a window.
    """
    f = lambda b, h, q, k: (q >= k) & (q - k <= 8) & ((q - k) % 2 == 0)
    mask = MaskInfo.from_function(f, 16, 16)
    return mask


def strided():
    """Sparse Transformer: strided

    The last four tokens, and every fourth token before them.
    """
    f = lambda b, h, q, k: (q >= k) & ((q - k < 4) | (k % 4 == 3))
    mask = MaskInfo.from_function(f, 16, 16)
    return mask


def natten():
    """Neighborhood attention: NATTEN

    Pixels of a 4 × 4 image see 3 × 3 pixels around them; at the borders the window shifts inwards.
    """
    near = lambda q, k: abs(np.clip(q, 1, 2) - k) <= 1
    f = lambda b, h, q, k: near(q // 4, k // 4) & near(q % 4, k % 4)
    mask = MaskInfo.from_function(f, 16, 16)
    return mask


def tree():
    """Speculative decoding: a tree of drafts

    Six drafted tokens after a text of six: each sees the text, its ancestors and itself.
    """
    parent = [-1, 0, 0, 1, 1, 2]
    sees = np.eye(6, 12, 6, dtype=bool) | (np.arange(12) < 6)
    for node in range(1, 6):
        sees[node] |= sees[parent[node]]
    mask = MaskInfo.from_attention_mask(sees[None, None])
    return mask


def block_diffusion():
    """Block diffusion

    Tokens of a block of four see each other in both directions, and all blocks before theirs.
    """
    f = lambda b, h, q, k: k // 4 <= q // 4
    mask = MaskInfo.from_function(f, 16, 16)
    return mask


def shared_prefix():
    """Answers that share a prompt

    Three answers of four tokens see the prompt and themselves, but not each other.
    """
    answer = np.array([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4)
    f = lambda b, h, q, k: (answer[k] == 0) | (answer[q] == answer[k])
    mask = MaskInfo.from_function(f, 16, 16).apply_causal()
    return mask


def window_per_head():
    """A window per head

    Heads look back 1, 3, 7 and 15 tokens; this is the third.
    """
    mask = MaskInfo.causal(16).apply_sliding_window((np.array([1, 3, 7, 15]), 0))
    return mask[:, 2, ...]


def anything_but():
    """Combining masks

    ``&``, ``|`` and ``~`` combine any masks: causal, but not the last three tokens.
    """
    mask = MaskInfo.causal(16) & ~MaskInfo.full(16).apply_sliding_window((2, 0))
    return mask
