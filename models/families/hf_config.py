"""What all families share when they read a Hugging Face `config.json`.

A configuration is refused here, by name, before any weight is read. A key that would change the
computation and that we do not support must hold its neutral value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import COMPUTE_DTYPES, LinearScaling, Llama3Scaling, RopeConfig, RopeScaling

Raw = Mapping[str, Any]

DEFAULT_THETA = 10000.0
# Key -> the values that leave the computation as we implement it.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu", "swish"),
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "cross_attention_layers": (None,),
}
MODEL_CODE_KEYS = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")


def refuse_unsupported(raw: Raw) -> None:
    """Raises NotImplementedError for the first key whose value we do not implement."""
    for key, neutral in NEUTRAL_VALUES.items():
        if raw.get(key) not in neutral:
            shown = _quantization_name(raw[key]) if "config" in key else repr(raw[key])
            raise NotImplementedError(
                f"config.json: {key}={shown} is not supported (expected {neutral[-1]!r})."
            )
    own_code = raw.get("auto_map")
    code = [key for key in MODEL_CODE_KEYS if isinstance(own_code, Mapping) and key in own_code]
    if code:
        raise NotImplementedError(
            f"config.json: auto_map names model code of its own ({', '.join(code)}), and nothing "
            "in a model folder is executed."
        )


def _quantization_name(value: Any) -> str:
    return repr(value.get("quant_method", "unnamed") if isinstance(value, Mapping) else value)


def required(raw: Raw, key: str) -> Any:
    """The value of `key`; ValueError if it is missing or null."""
    if raw.get(key) is None:
        raise ValueError(f"config.json has no {key}.")
    return raw[key]


def required_int(raw: Raw, key: str) -> int:
    """The positive integer at `key`; ValueError if it is anything else."""
    value = required(raw, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key}={value!r} must be a positive integer.")
    return value


def dtype_from_hf(raw: Raw) -> str:
    """The dtype that the checkpoint states, float32 where it states none."""
    stated = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(stated).removeprefix("torch.")
    if name not in COMPUTE_DTYPES:
        raise NotImplementedError(
            f"config.json: dtype {name!r} is not supported (expected one of {COMPUTE_DTYPES})."
        )
    return name


def rope_from_hf(raw: Raw) -> RopeConfig:
    """Reads both spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    Where both are there, as when a scaling was added by hand, they must say the same.
    """
    keys = [key for key in ("rope_parameters", "rope_scaling") if raw.get(key)]
    for key in keys:
        if not isinstance(raw[key], Mapping):
            raise ValueError(f"config.json: {key}={raw[key]!r} must be an object.")
    stated = [raw[key] for key in keys]
    parameters = stated[0] if stated else {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise NotImplementedError(
            "config.json: rope_parameters differ by layer type "
            f"({', '.join(map(str, parameters))}), which is not supported."
        )
    if parameters.get("partial_rotary_factor") not in NEUTRAL_VALUES["partial_rotary_factor"]:
        raise NotImplementedError(
            "config.json: partial_rotary_factor="
            f"{parameters['partial_rotary_factor']!r} is not supported (expected 1.0)."
        )
    scaling = _scaling(parameters)
    thetas = [of["rope_theta"] for of in (*stated, raw) if of.get("rope_theta")]
    if any(theta != thetas[0] for theta in thetas) or any(_scaling(s) != scaling for s in stated):
        raise ValueError(
            f"config.json: rope_parameters={raw.get('rope_parameters')!r}, rope_scaling="
            f"{raw.get('rope_scaling')!r} and rope_theta={raw.get('rope_theta')!r} contradict "
            "one another."
        )
    theta = thetas[0] if thetas else DEFAULT_THETA
    return RopeConfig(theta=_number({"rope_theta": theta}, "rope_theta"), scaling=scaling)


def _scaling(parameters: Raw) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=_number(parameters, "factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=_number(parameters, "factor"),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
            original_max_position=int(_number(parameters, "original_max_position_embeddings")),
        )
    raise NotImplementedError(
        f"config.json: rope type {kind!r} is not supported (expected default, linear or llama3)."
    )


def _number(parameters: Raw, key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"config.json: {key}={value!r} must be a number.")
    return float(value)


def window_from_layer_types(raw: Raw) -> int | None:
    """The window of a Qwen configuration, where layers from `max_window_layers` on may have one.

    Raises:
      NotImplementedError: some layers have a window and others have none.
    """
    num_layers = required_int(raw, "num_hidden_layers")
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    kinds = raw.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ValueError(f"config.json: layer_types={kinds!r} must be a list.")
    if kinds is None:
        first = raw.get("max_window_layers") or 0 if window is not None else num_layers
        kinds = [
            "full_attention" if layer < first else "sliding_attention"
            for layer in range(num_layers)
        ]
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise NotImplementedError(f"config.json: layer type {unknown[0]!r} is not supported.")
    if len(kinds) != num_layers:
        raise ValueError(
            f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers={num_layers}."
        )
    if set(kinds) == {"full_attention"}:
        return None
    if len(set(kinds)) > 1:
        raise NotImplementedError(
            "config.json: a sliding window on some layers only (use_sliding_window with "
            f"max_window_layers={raw.get('max_window_layers')!r}) is not supported."
        )
    if window is None:
        raise ValueError("config.json: all layers slide, yet sliding_window is not set.")
    return window


def token_ids(raw: Raw, generation: Raw) -> dict[str, Any]:
    """bos, eos and pad ids; generation_config.json may add end tokens to config.json's."""
    ends: list[int] = []
    for source in (raw, generation):
        stated = source.get("eos_token_id")
        for token in stated if isinstance(stated, list) else [stated]:
            if token is not None and token not in ends:
                ends.append(token)
    return {
        "bos_token_id": _first(raw.get("bos_token_id"), generation.get("bos_token_id")),
        "eos_token_ids": tuple(ends),
        "pad_token_id": _pad_token_id(raw, generation),
    }


def _pad_token_id(raw: Raw, generation: Raw) -> Any:
    """Nothing is computed with it, and checkpoints do state -1 or one past the vocabulary."""
    stated = _first(raw.get("pad_token_id"), generation.get("pad_token_id"))
    outside = isinstance(stated, int) and not 0 <= stated < required_int(raw, "vocab_size")
    return None if outside else stated


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def common_fields(raw: Raw, generation: Raw) -> dict[str, Any]:
    """The fields of TransformerConfig that every family states alike."""
    refuse_unsupported(raw)
    heads = required_int(raw, "num_attention_heads")
    hidden = required_int(raw, "hidden_size")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ValueError(
                f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads}, "
                "and head_dim is not given."
            )
        head_dim = hidden // heads
    dtype = dtype_from_hf(raw)
    return {
        "vocab_size": required_int(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": required_int(raw, "intermediate_size"),
        "num_layers": required_int(raw, "num_hidden_layers"),
        "num_query_heads": heads,
        "num_kv_heads": required_int(raw, "num_key_value_heads"),
        "head_dim": head_dim,
        "rms_norm_eps": _number(raw, "rms_norm_eps"),
        "rope": rope_from_hf(raw),
        "max_position": required_int(raw, "max_position_embeddings"),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": dtype,
        "param_dtype": dtype,
        **token_ids(raw, generation),
    }
