"""The model of the benchmark: Qwen2 of half a billion parameters, 290 tensors, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

_HIDDEN, _LAYERS = 896, 24


def make_checkpoint(folder: Path, *, nbytes: int) -> nn.Module:
    """Write configuration, tokenizer and weights; returns the model, in bf16.

    Args:
        folder: Where to.
        nbytes: Bytes of all weights, which the size of the vocabulary is chosen for.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {f"<{place}>": place for place in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>", eos_token="<1>").save_pretrained(folder)
    options: dict[str, Any] = {
        "hidden_size": _HIDDEN,
        "intermediate_size": 4864,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    with torch.device("meta"):
        rest = sum(one.numel() for one in Qwen2ForCausalLM(Qwen2Config(vocab_size=256, **options)).parameters()) * 2
    words = max(256, 256 + (nbytes - rest) // (2 * _HIDDEN))
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = Qwen2ForCausalLM(Qwen2Config(vocab_size=words, dtype="bfloat16", **options))
    finally:
        torch.set_default_dtype(previous)
    model.save_pretrained(folder)  # type: ignore[operator]
    return model
