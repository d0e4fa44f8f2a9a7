"""The families we run, one small file each, and the ways to find the right one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import TransformerConfig
from . import llama, mistral, qwen2, qwen3
from .family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)

__all__ = ["FAMILIES", "Family", "config_from_hf", "family_for_gguf"]


def config_from_hf(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """A TransformerConfig from a Hugging Face configuration.

    Args:
      raw: the content of config.json.
      generation: the content of generation_config.json, where there is one.

    Raises:
      NotImplementedError: the architecture, rope type, activation, quantisation or another feature
        is not supported; it is named.
      ValueError: a field is missing or contradicts another.
    """
    return _family_for_hf(raw).config_from_hf(raw, generation or {})


def _family_for_hf(raw: Mapping[str, Any]) -> Family:
    known = {family.architecture: family for family in FAMILIES}
    stated = raw.get("architectures") or []
    if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        raise ValueError(f"config.json: architectures={stated!r} must be a list of names.")
    if not stated:
        by_type = {family.model_type: family for family in FAMILIES}
        if raw.get("model_type") in by_type:
            return by_type[raw["model_type"]]
        stated = [f"model_type {raw.get('model_type')!r}"]
    if len(stated) != 1 or stated[0] not in known:
        raise NotImplementedError(
            f"config.json: architecture {', '.join(map(str, stated))} is not supported (expected "
            f"one of {', '.join(known)})."
        )
    family = known[stated[0]]
    if raw.get("model_type", family.model_type) != family.model_type:
        raise ValueError(
            f"config.json: model_type {raw['model_type']!r} contradicts architecture {stated[0]}."
        )
    return family


def family_for_gguf(architecture: Any) -> Family:
    """The family of a GGUF file's `general.architecture`; NotImplementedError if there is none."""
    known = {f.gguf_architecture: f for f in FAMILIES if f.gguf_architecture is not None}
    if not isinstance(architecture, str) or architecture not in known:
        raise NotImplementedError(
            f"GGUF architecture {architecture!r} is not supported (expected one of "
            f"{', '.join(known)})."
        )
    return known[architecture]
