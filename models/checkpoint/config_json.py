"""TransformerConfig to JSON and back, for the checkpoints that we write ourselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    TransformerConfig,
)

SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "factors": FrequencyFactors,
}
# What a checkpoint states. Topology is not among it: it belongs to the user, not to the weights.
FIELDS = (
    "family",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_query_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position",
    "sliding_window",
    "qkv_bias",
    "qk_norm",
    "tie_word_embeddings",
    "dtype",
    "param_dtype",
    "bos_token_id",
    "eos_token_ids",
    "pad_token_id",
)


def config_to_json(config: TransformerConfig) -> dict[str, Any]:
    """A dictionary of plain values that `config_from_json` reads back."""
    scaling = config.rope.scaling
    stated = None
    if scaling is not None:
        kind = next(name for name, cls in SCALINGS.items() if isinstance(scaling, cls))
        stated = {"type": kind, **dataclasses.asdict(scaling)}
    fields = {name: getattr(config, name) for name in FIELDS}
    return {**fields, "rope": {"theta": config.rope.theta, "scaling": stated}}


def config_from_json(raw: Mapping[str, Any]) -> TransformerConfig:
    """The inverse of `config_to_json`; ValueError for missing, unknown or wrong fields."""
    expected = {*FIELDS, "rope"}
    if set(raw) != expected:
        raise ValueError(
            f"the configuration has fields missing {sorted(expected - set(raw))} or unknown "
            f"{sorted(set(raw) - expected)}."
        )
    fields = {name: raw[name] for name in FIELDS}
    fields["eos_token_ids"] = tuple(raw["eos_token_ids"])
    return TransformerConfig(rope=_rope(raw["rope"]), **fields)


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    stated = raw["scaling"]
    if stated is None:
        return RopeConfig(theta=raw["theta"])
    values = {key: value for key, value in stated.items() if key != "type"}
    if "factors" in values:
        values["factors"] = tuple(values["factors"])
    if stated.get("type") not in SCALINGS:
        raise ValueError(f"rope scaling {stated.get('type')!r} must be one of {list(SCALINGS)}.")
    return RopeConfig(theta=raw["theta"], scaling=SCALINGS[stated["type"]](**values))
