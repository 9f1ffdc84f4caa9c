"""Sizes of small models of transformers, for architectures.py and zoo.py."""

from __future__ import annotations

from typing import Any

WORDS = 97
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
ENCODER: dict[str, Any] = SMALL | {"max_position_embeddings": 64}
DECODER: dict[str, Any] = ENCODER | {"num_key_value_heads": 2}
# Eight mel bins and 24 frames.
WHISPER: dict[str, Any] = {
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}
