"""What a family is: the names it goes by, and how its configuration is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..config import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture as Hugging Face and GGUF name it.

    Attributes:
      name: `TransformerConfig.family`.
      model_type: `model_type` in config.json.
      architecture: the only entry accepted in `architectures`.
      config_from_hf: (config.json, generation_config.json) -> TransformerConfig.
      gguf_architecture: `general.architecture`, None where another family stands for it.
      gguf_interleaves_qk: GGUF stores q and k rows for interleaved RoPE.
      qkv_bias, qk_norm: what a GGUF file of this family holds without saying so.
    """

    name: str
    model_type: str
    architecture: str
    config_from_hf: Callable[[Mapping[str, Any], Mapping[str, Any]], TransformerConfig]
    gguf_architecture: str | None
    gguf_interleaves_qk: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
