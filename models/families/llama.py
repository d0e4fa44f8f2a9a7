"""Llama 2, 3, 3.1, 3.2 and 3.3, and SmolLM2, which is a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Llama3Scaling, RopeConfig, TransformerConfig
from .family import Family
from .hf_config import common_fields, required_int


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> TransformerConfig:
    """A TransformerConfig from a Llama config.json; early ones do not state KV heads."""
    if raw.get("num_key_value_heads") is None:
        raw = {**raw, "num_key_value_heads": required_int(raw, "num_attention_heads")}
    if raw.get("sliding_window") is not None:
        raise NotImplementedError(
            f"config.json: sliding_window={raw['sliding_window']!r} with model_type 'llama' is not "
            "supported."
        )
    return TransformerConfig(family="llama", **common_fields(raw, generation))


FAMILY = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    config_from_hf=config_from_hf,
    gguf_architecture="llama",
    gguf_interleaves_qk=True,
)

SMOLLM2_135M = TransformerConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    max_position=8192,
    tie_word_embeddings=True,
    dtype="bfloat16",
    param_dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=2,
)

LLAMA_3_1_8B = TransformerConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(
        theta=500000.0,
        scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
        ),
    ),
    max_position=131072,
    dtype="bfloat16",
    param_dtype="bfloat16",
    bos_token_id=128000,
    eos_token_ids=(128001, 128008, 128009),
)
