"""Rerank 1,000 texts without padding, with Hugging Face transformers on a CPU: python examples/rerank.py

A reranker reads a query and a text as one sequence and gives it a score. Here ModernBERT, most of whose layers see
a window and some the whole sequence, reads many pairs end to end in one row: "attnmask" keeps them apart by where each
begins. Beside it are padded batches with "eager" and "sdpa", in the order of the texts and sorted by length. All scores
agree.

The model is random and tiny, and so are the texts, so that nothing is downloaded.
"""

import argparse
import time

import numpy as np

try:
    import torch
    from transformers import ModernBertConfig, ModernBertForSequenceClassification, logging
except ImportError as error:
    raise SystemExit(
        f"this example needs PyTorch and transformers: pip install torch transformers ({error})"
    ) from None

import attnmask.transformers

VOCABULARY, WIDTH, LAYERS, HEADS, WINDOW = 256, 128, 3, 4, 64
PAD, START, END = 0, 1, 2
QUERY, LONGEST = 8, 256  # tokens of the query, and of the longest text
ROWS, TOKENS = 32, 4096  # of a padded batch, and of a packed one


def reranker():
    """Return a random model."""
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        local_attention=WINDOW,
        global_attn_every_n_layers=3,
        initializer_range=0.2,
        classifier_pooling="cls",
        num_labels=1,
        pad_token_id=PAD,
        cls_token_id=START,
        sep_token_id=END,
        bos_token_id=START,
        eos_token_id=END,
    )
    return ModernBertForSequenceClassification._from_config(config, attn_implementation="eager").eval()


def read_pairs(count):
    """Return the tokens of each pair: the query, which is the same, and a text, most of them short."""
    rng = np.random.default_rng(0)
    query = rng.integers(3, VOCABULARY, QUERY)
    lengths = np.minimum(rng.lognormal(3.5, 1, count).astype(int) + 1, LONGEST)
    texts = [rng.integers(3, VOCABULARY, length) for length in lengths]
    return [torch.from_numpy(np.concatenate([[START], query, [END], text, [END]])) for text in texts]


def padded(model, pairs):
    """Return scores of batches with padding."""
    scores = []
    for begin in range(0, len(pairs), ROWS):
        batch = pairs[begin : begin + ROWS]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)
        scores.append(model(ids, attention_mask=(ids != PAD).long()).logits[:, 0])
    return torch.cat(scores)


def padded_by_length(model, pairs):
    """Return scores of batches of pairs that are about as long."""
    order = torch.tensor([len(pair) for pair in pairs]).argsort()
    scores = torch.empty(len(pairs))
    scores[order] = padded(model, [pairs[i] for i in order])
    return scores


def packed(model, pairs):
    """Return scores of batches without padding: one row of tokens, and where each pair begins."""
    lengths = torch.tensor([len(pair) for pair in pairs])
    batches = (lengths.cumsum(0) - 1) // TOKENS  # pairs that end in the same 4,096 tokens
    scores = []
    for batch in batches.unique():
        chosen = (batches == batch).nonzero()[:, 0]
        starts = torch.nn.functional.pad(lengths[chosen].cumsum(0), (1, 0)).int()
        longest = int(lengths[chosen].max())
        hidden = model.model(
            torch.cat([pairs[i] for i in chosen])[None],
            position_ids=torch.cat([torch.arange(int(lengths[i])) for i in chosen])[None],
            cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
            max_length_q=longest,
            max_length_k=longest,
        ).last_hidden_state[0]
        first = hidden[starts[:-1].long()]  # the first token of a pair stands for it
        scores.append(model.classifier(model.head(first))[:, 0])
    return torch.cat(scores)


WAYS = {
    "eager, padded": ("eager", padded),
    "sdpa, padded": ("sdpa", padded),
    "sdpa, sorted by length": ("sdpa", padded_by_length),
    "attnmask, packed": ("attnmask", packed),
}


def main(count, report):
    """Return the scores of each way."""
    logging.set_verbosity_error()
    attnmask.transformers.register()
    model, pairs, found = reranker(), read_pairs(count), {}
    tokens = sum(map(len, pairs))
    report(f"{count} texts of {min(map(len, pairs))} to {max(map(len, pairs))} tokens, {tokens} in all")
    with torch.inference_mode():
        for name, (implementation, score) in WAYS.items():
            model.set_attn_implementation(implementation)
            score(model, pairs[:ROWS])  # starts threads
            begin = time.perf_counter()
            found[name] = score(model, pairs)
            report(f"{name:24}{time.perf_counter() - begin:8.2f} s")
    expected = found["eager, padded"]
    for name, scores in found.items():
        torch.testing.assert_close(
            scores, expected, rtol=1e-3, atol=1e-3, msg=lambda m, of=name: f"{of}: {m}"
        )
    best = expected.argsort(descending=True)[:5].tolist()
    report(f"the best texts are {best}, in every way")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rerank texts of unequal lengths.")
    parser.add_argument("--texts", type=int, default=1000)
    main(parser.parse_args().texts, print)
