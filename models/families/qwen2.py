"""Qwen2 and Qwen2.5: q, k and v carry a bias, the out projection does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import RopeConfig, TransformerConfig
from .family import Family
from .hf_config import common_fields, window_from_layer_types


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> TransformerConfig:
    """A TransformerConfig from a Qwen2 config.json."""
    return TransformerConfig(
        family="qwen2",
        qkv_bias=True,
        sliding_window=window_from_layer_types(raw),
        **common_fields(raw, generation),
    )


FAMILY = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config_from_hf=config_from_hf,
    gguf_architecture="qwen2",
    qkv_bias=True,
)

QWEN2_5_0_5B = TransformerConfig(
    family="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_query_heads=14,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1000000.0),
    max_position=32768,
    qkv_bias=True,
    tie_word_embeddings=True,
    dtype="bfloat16",
    param_dtype="bfloat16",
    bos_token_id=151643,
    eos_token_ids=(151645, 151643),
    pad_token_id=151643,
)
