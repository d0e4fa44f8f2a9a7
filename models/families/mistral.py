"""Mistral 7B: a Llama whose attention may slide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import RopeConfig, TransformerConfig
from .family import Family
from .hf_config import common_fields


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> TransformerConfig:
    """A TransformerConfig from a Mistral config.json; a null window means full attention."""
    if "sliding_window" not in raw:
        raise ValueError("config.json has no sliding_window (null means full attention).")
    if len(set(raw.get("layer_types") or ())) > 1:
        raise NotImplementedError(
            "config.json: layer_types that differ between layers are not supported for Mistral."
        )
    window = raw["sliding_window"]
    return TransformerConfig(
        family="mistral", sliding_window=window, **common_fields(raw, generation)
    )


FAMILY = Family(
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    config_from_hf=config_from_hf,
    # GGUF files of Mistral say "llama".
    gguf_architecture=None,
)

MISTRAL_7B_V0_1 = TransformerConfig(
    family="mistral",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    max_position=32768,
    sliding_window=4096,
    dtype="bfloat16",
    param_dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)
