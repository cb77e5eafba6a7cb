"""When each token was said, by the weights of Whisper's cross attention: python examples/whisper_timestamps.py

Some heads of a speech model's decoder look at the moment of the recording that they write down. Dynamic time warping of
their weights tells when each token begins. In ``generate(return_token_timestamps=True)``, transformers turns to eager
attention for this. Here the model writes with attnmask, then reads its tokens again with their weights, in one call.

The model is random and tiny, so that nothing is downloaded: its tokens and times mean nothing, but both ways agree.
With a trained one, take the heads from ``model.generation_config.alignment_heads``.
"""

import numpy as np

try:
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration, logging
except ImportError as error:
    raise SystemExit(
        f"this example needs PyTorch and transformers: pip install torch transformers ({error})"
    ) from None

import attnmask.transformers

FRAMES, SECONDS = 200, 0.02  # of the recording, and for each key of the encoder, which halves the frames
HEADS = [[0, 1], [1, 0], [1, 2]]  # layers and heads that follow the sound in a trained model
WIDTH = 7  # of the median filter
TOKENS, VOCABULARY = 24, 64
START, END, NO_TIMES = 1, 2, VOCABULARY - 1  # the last one asks for no timestamps between words


def model():
    """Return a random model of two layers."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=FRAMES // 2,
        max_target_positions=64,
        init_std=0.2,
        median_filter_width=WIDTH,
        pad_token_id=0,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=START,
    )
    made = WhisperForConditionalGeneration._from_config(config, attn_implementation="attnmask").eval()
    made.generation_config = GenerationConfig(
        alignment_heads=HEADS,
        no_timestamps_token_id=NO_TIMES,
        is_multilingual=False,
        pad_token_id=0,
        decoder_start_token_id=START,
        eos_token_id=END,
        max_length=TOKENS,
        min_length=TOKENS,
    )
    return made


def warped(cost):
    """Return the pairs of rows and columns on the cheapest path through a matrix, from corner to corner."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    for i, j in np.ndindex(cost.shape):
        total[i + 1, j + 1] = cost[i, j] + min(total[i, j], total[i, j + 1], total[i + 1, j])
    i, j, path = rows, columns, []
    while i > 0 and j > 0:
        path.append((i - 1, j - 1))
        i, j = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda place: total[place])
    return np.array(path[::-1])


def times(weights):
    """Return when each token begins, in seconds, for the weights of the chosen heads, [heads, tokens, keys]."""
    weights = (weights - weights.mean(1, keepdims=True)) / weights.std(1, keepdims=True)
    padded = np.pad(weights, ((0, 0), (0, 0), (WIDTH // 2, WIDTH // 2)), mode="reflect")
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(padded, WIDTH, axis=2), axis=-1)
    path = warped(-smooth.mean(axis=0))
    first = np.diff(path[:, 0], prepend=-1) > 0
    return path[first, 1] * SECONDS


@torch.no_grad()
def timestamps(model, sound, tokens):
    """Return when the tokens [1, T] that a model has written begin, in seconds."""
    prompt = torch.tensor([[START, NO_TIMES]])
    read = model(sound, decoder_input_ids=torch.cat([prompt, tokens[:, :-1]], dim=1), output_attentions=True)
    chosen = torch.stack([read.cross_attentions[layer][0, head, 2:] for layer, head in HEADS])
    found = times(chosen.numpy())
    return np.append(found, found[-1])  # the last token is not read, as it is usually the end


def main(report=print):
    """Return the times by attnmask, and by transformers and eager attention."""
    attnmask.transformers.register()
    whisper, sound = model(), torch.randn(1, 16, FRAMES)
    tokens = whisper.generate(sound)
    found = timestamps(whisper, sound, tokens)
    theirs = whisper.generate(sound, return_token_timestamps=True)["token_timestamps"][0]  # by "eager"
    for token, second, other in zip(tokens[0], found, theirs, strict=True):
        report(f"token {token:2d} at {second:.2f} s, by eager attention at {other:.2f} s")
    return found, theirs.numpy()


if __name__ == "__main__":
    logging.set_verbosity_error()
    main()
