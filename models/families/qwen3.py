"""Qwen3 (dense): q and k are RMS-normalised over the head before the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import RopeConfig, TransformerConfig
from .family import Family
from .hf_config import common_fields, required_int, window_from_layer_types


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> TransformerConfig:
    """A TransformerConfig from a Qwen3 config.json; its head size must be stated."""
    required_int(raw, "head_dim")
    return TransformerConfig(
        family="qwen3",
        qk_norm=True,
        sliding_window=window_from_layer_types(raw),
        **common_fields(raw, generation),
    )


FAMILY = Family(
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config_from_hf=config_from_hf,
    gguf_architecture="qwen3",
    qk_norm=True,
)

_SHARED: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 151936,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(theta=1000000.0),
    "max_position": 40960,
    "qk_norm": True,
    "dtype": "bfloat16",
    "param_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_ids": (151645, 151643),
    "pad_token_id": 151643,
}

QWEN3_0_6B = TransformerConfig(
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_query_heads=16,
    tie_word_embeddings=True,
    **_SHARED,
)

QWEN3_8B = TransformerConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_query_heads=32,
    **_SHARED,
)
