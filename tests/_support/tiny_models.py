"""Small models of transformers with random weights."""

import numpy as np
import pytest
import torch
import transformers
from transformers import masking_utils

FIRST = not hasattr(
    masking_utils, "blockwise_overlay"
)  # versions of transformers 5, which make masks otherwise
later = pytest.mark.skipif(FIRST, reason="transformers is one of the first versions of 5")
TOKENS, VOCABULARY, WINDOW = 11, 40, 4
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,  # so that weights of attention are far from equal
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
DECODERS = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"attn_logit_softcapping": 2.0} | GEMMA,
    "Gemma3": GEMMA | TYPES,
    "Phi3": {"sliding_window": WINDOW},
    "Mixtral": EXPERTS,
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "initializer_range": 0.3},
    "GptOss": {"head_dim": 8, "sliding_window": WINDOW} | TYPES | EXPERTS,
    "Llama4": {"head_dim": 8, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48}
    | {"layer_types": ["chunked_attention", "full_attention"]}
    | EXPERTS,
}
ENCODERS = {"Bert": {}, "ModernBert": {"local_attention": WINDOW, "global_attn_every_n_layers": 2}}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "init_std": 0.3,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BOTH_SIDES = {
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    | SPECIAL,
    "Bart": BART | SPECIAL,
    "Whisper": BART
    | SPECIAL
    | {"num_mel_bins": 8, "max_source_positions": TOKENS, "max_target_positions": 64},
}
HEADS = dict.fromkeys(DECODERS, "ForCausalLM") | {
    "GPT2": "LMHeadModel",
    "Bert": "ForMaskedLM",
    "ModernBert": "ForMaskedLM",
    "T5": "ForConditionalGeneration",
    "Bart": "ForConditionalGeneration",
    "Whisper": "ForConditionalGeneration",
}


def model_of(name, **more):
    """With random weights, the same ones each time."""
    text = "Text" if name in ("Gemma3", "Llama4") else ""
    base = SHAPE if name in DECODERS | ENCODERS and name != "GPT2" else {}
    given = (DECODERS | ENCODERS | BOTH_SIDES)[name]
    config = getattr(transformers, f"{name}{text}Config")(**base | given | more)
    torch.manual_seed(0)
    model = getattr(transformers, name + HEADS[name])._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():  # biases and sinks begin at 0
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim == 1 and not parameter.any() else None
    return model.eval()


def random_ids(*shape):
    return torch.randint(3, VOCABULARY, shape)


def padding(side):
    """Of two rows, the first of which is shorter."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, slice(3) if side == "left" else slice(-3, None)] = 0
    return mask


def assert_close(actual, expected, tolerance=2e-5):
    """Some gradients are 0 but for rounding, such as of key biases: the largest of all tells how much that is."""
    assert actual.keys() == expected.keys()
    largest = max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        size = max(x.abs().max().item(), 0.01 * largest)
        np.testing.assert_allclose(actual[name], x, rtol=0, atol=tolerance * size, err_msg=name)
