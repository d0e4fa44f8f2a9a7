"""A GGUF file: its metadata as a configuration, its tensors under Hugging Face's names.

GGUF stores the q and k rows of a Llama for interleaved RoPE, pairs side by side: row 2i + s of a
head is row i + s * Dh / 2 of the half-split form. They are put back when they are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from ..config import FrequencyFactors, LinearScaling, RopeConfig, RopeScaling, TransformerConfig
from ..families import family_for_gguf
from ..families.family import Family
from .gguf_file import GgufFile, open_gguf
from .tensors import TensorSource

ROPE_FACTORS = "rope_freqs.weight"
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_config(path: Path) -> TransformerConfig:
    """The configuration that a GGUF file's metadata states.

    Raises:
      NotImplementedError: the architecture, rope type or another feature is not supported.
      ValueError: the file is damaged, or a field is missing.
    """
    file = open_gguf(path)
    try:
        return _config(file)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{path}: {error}") from None


class _Fields:
    """Metadata under the architecture's prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.metadata, self.prefix = file.metadata, architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.prefix}.{key}", default)

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"its metadata has no {self.prefix}.{key}.")
        return value

    def whole(self, key: str) -> int:
        """A positive whole number."""
        value = self.required(key)
        if isinstance(value, list):
            raise NotImplementedError(
                f"metadata {self.prefix}.{key} differs between layers, which is not supported."
            )
        if type(value) is not int or value < 1:
            raise ValueError(
                f"metadata {self.prefix}.{key}={value!r} must be a positive whole number."
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A float32 of the metadata as the decimal it was written from: 1e-5, not 9.99999e-6."""
        value = self.required(key) if default is None else self.get(key, default)
        return float(str(np.float32(value)))


def _config(file: GgufFile) -> TransformerConfig:
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise NotImplementedError(f"it is one of {parts} parts; join them to one file first.")
    architecture = file.metadata.get("general.architecture")
    family = family_for_gguf(architecture)
    fields = _Fields(file, str(architecture))
    heads, width = fields.whole("attention.head_count"), fields.whole("embedding_length")
    head_dim = fields.get("attention.key_length", width // heads)
    _refuse_unsupported(fields, head_dim)
    embedding = file.tensors.get("token_embd.weight")
    return TransformerConfig(
        family=family.name,
        vocab_size=embedding.shape[0] if embedding else fields.required("vocab_size"),
        hidden_size=width,
        intermediate_size=fields.whole("feed_forward_length"),
        num_layers=fields.required("block_count"),
        num_query_heads=heads,
        num_kv_heads=fields.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(
            theta=fields.real("rope.freq_base", 10000.0), scaling=_scaling(file, fields)
        ),
        max_position=fields.required("context_length"),
        sliding_window=fields.get("attention.sliding_window") or None,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype="float32",
        param_dtype="float32",
        **_token_ids(file),
    )


def _refuse_unsupported(fields: _Fields, head_dim: int) -> None:
    neutral = {
        "expert_count": (None, 0),
        "rope.dimension_count": (None, head_dim),
        "attention.value_length": (None, head_dim),
        "attention.clamp_kqv": (None, 0.0),
        "attention.scale": (None, 0.0),
        "logit_scale": (None, 0.0, 1.0),
        "residual_scale": (None, 0.0, 1.0),
        "embedding_scale": (None, 0.0, 1.0),
        "rope.scaling.type": (None, "none", "linear"),
    }
    for key, accepted in neutral.items():
        if fields.get(key) not in accepted:
            raise NotImplementedError(
                f"metadata {fields.prefix}.{key}={fields.get(key)!r} is not supported (expected "
                f"{accepted[-1]!r})."
            )
    if fields.get("attention.head_count_kv") is not None:
        fields.whole("attention.head_count_kv")


def _scaling(file: GgufFile, fields: _Fields) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type", "none")
    linear = fields.real("rope.scaling.factor") if kind == "linear" else None
    if linear is None and fields.get("rope.scale_linear") not in (None, 0.0, 1.0):
        linear = fields.real("rope.scale_linear")
    if ROPE_FACTORS in file.tensors:
        if linear is not None:
            raise NotImplementedError(f"linear rope scaling with {ROPE_FACTORS} is not supported.")
        return FrequencyFactors(factors=tuple(file.read(ROPE_FACTORS).tolist()))
    return None if linear is None else LinearScaling(factor=linear)


def _token_ids(file: GgufFile) -> dict[str, Any]:
    stated = {key: file.metadata.get(f"tokenizer.ggml.{key}") for key in END_TOKEN_KEYS}
    for key, value in stated.items():
        if value is not None and type(value) is not int:
            raise ValueError(f"metadata tokenizer.ggml.{key}={value!r:.80} must be a token id.")
    return {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(t for t in stated.values() if t is not None)),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def open_gguf_tensors(path: Path, config: TransformerConfig) -> TensorSource:
    """The tensors of a GGUF file, dequantised to float32 when they are read."""
    file = open_gguf(path)
    family = family_for_gguf(file.metadata.get("general.architecture"))
    own = {hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
    if len(own) != len(file.tensors) - (ROPE_FACTORS in file.tensors):
        raise ValueError(f"{path} holds a tensor under two names.")

    def read(name: str) -> np.ndarray:
        tensor = file.read(own[name])
        return _half_split(tensor, name, config) if _interleaved(name, family) else tensor

    return TensorSource(
        where=str(path),
        shapes={theirs: file.tensors[name].shape for theirs, name in own.items()},
        read=read,
        own_name=lambda name: own.get(name, gguf_name(name)),
    )


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name that we do not know stays as it is."""
    match = LAYER_TENSOR.fullmatch(name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    return GLOBAL_NAMES.get(name, name)


def gguf_name(name: str) -> str:
    """The inverse of `hf_name`."""
    for gguf, hf in GLOBAL_NAMES.items():
        if hf == name:
            return gguf
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    inverse = {hf: gguf for gguf, hf in LAYER_NAMES.items()}
    if match and match[2] in inverse:
        return f"blk.{match[1]}.{inverse[match[2]]}.{match[3]}"
    return name


def _interleaved(name: str, family: Family) -> bool:
    is_qk = name.endswith((".q_proj.weight", ".k_proj.weight"))
    return family.gguf_interleaves_qk and is_qk


def _half_split(tensor: np.ndarray, name: str, config: TransformerConfig) -> np.ndarray:
    heads = config.num_query_heads if ".q_proj." in name else config.num_kv_heads
    pairs = tensor.reshape(heads, config.head_dim // 2, 2, tensor.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)
