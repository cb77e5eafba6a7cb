"""Rerank texts for a query with an encoder on a CPU: python examples/rerank.py

Each text is read together with the query, and gets a score. A padded batch also computes its padding; packed, the pairs
lie end to end in one row, and each token attends to its own pair alone. The scores are the same. The encoder is a small
ModernBERT with random weights, two of whose three layers look at a window of 128 tokens.
"""

import argparse
import time

import numpy as np

try:
    import torch
    from transformers import ModernBertConfig, ModernBertForSequenceClassification
except ImportError as error:
    raise SystemExit(
        f"this example needs PyTorch and transformers: pip install torch transformers ({error})"
    ) from None

import attnmask.transformers

VOCABULARY, QUERY = 1000, 12  # tokens of the query


def pairs(count):
    """Return the tokens of `count` pairs of the query and a text, most of them short."""
    rng = np.random.default_rng(0)
    lengths = QUERY + np.minimum(rng.lognormal(4, 0.8, count).astype(int) + 1, 500)
    return [torch.from_numpy(rng.integers(10, VOCABULARY, length)) for length in lengths]


def encoder(implementation):
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_labels=1,
        classifier_pooling="cls",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return ModernBertForSequenceClassification._from_config(config, attn_implementation=implementation).eval()


def padded(model, texts):
    """Return a score of each text, from a padded batch."""
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, 0]


def packed(model, texts):
    """Return the same from texts end to end in one row."""
    lengths = [len(text) for text in texts]
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = model.model(
        input_ids=torch.cat(texts)[None],
        position_ids=positions[None],
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
    ).last_hidden_state
    return model.classifier(model.head(hidden[0, starts[:-1]]))[:, 0]


def rerank(score, model, texts, size, by_length=False):
    """Return the scores of all texts, `size` at a time, and the seconds it took."""
    order = list(range(len(texts)))
    if by_length:
        order.sort(key=lambda i: -len(texts[i]))
    scores = torch.empty(len(texts))
    begin = time.perf_counter()
    with torch.inference_mode():
        for i in range(0, len(texts), size):
            chosen = order[i : i + size]
            scores[chosen] = score(model, [texts[j] for j in chosen])
    return scores, time.perf_counter() - begin


def main(count=1000, size=32, report=print):
    attnmask.transformers.register()
    texts = pairs(count)
    tokens = sum(map(len, texts))
    report(f"{count} texts, {tokens} tokens, {size} at a time")
    found = []
    for implementation, score, by_length in (
        ("sdpa", padded, False),
        ("sdpa", padded, True),
        ("attnmask", packed, False),
    ):
        model = encoder(implementation)
        rerank(score, model, texts[:size], size)  # threads start, and memory is touched
        scores, seconds = rerank(score, model, texts, size, by_length)
        found.append(scores)
        name = f"{implementation}, {score.__name__}{', by length' * by_length}"
        report(f"{name:24} {seconds:6.2f} s, {tokens / seconds:8.0f} tokens a second")
    one, _, other = found
    best = [scores.topk(min(10, count)).indices.tolist() for scores in (one, other)]
    report(
        f"scores differ by at most {(one - other).abs().max():.0e}; the best ten are the same: {best[0] == best[1]}"
    )
    return one, other


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="texts")
    parser.add_argument("--size", type=int, default=32, help="texts at a time")
    main(**vars(parser.parse_args()))
