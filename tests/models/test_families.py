"""config.json to TransformerConfig: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from bi_jax.models.config import LinearScaling, RopeConfig
from bi_jax.models.families import FAMILIES, config_from_hf, family_for_gguf
from bi_jax.models.families.llama import LLAMA_3_1_8B, SMOLLM2_135M
from bi_jax.models.families.mistral import MISTRAL_7B_V0_1
from bi_jax.models.families.qwen2 import QWEN2_5_0_5B
from bi_jax.models.families.qwen3 import QWEN3_8B

# The published configurations, as far as they matter.
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_GENERATION = {"eos_token_id": [151645, 151643], "pad_token_id": 151643, "do_sample": True}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
ALL = {"llama": LLAMA31, "smollm2": SMOLLM2, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}


def test_published_configurations() -> None:
    assert config_from_hf(LLAMA31) == LLAMA_3_1_8B
    assert config_from_hf(SMOLLM2) == SMOLLM2_135M
    assert config_from_hf(MISTRAL) == MISTRAL_7B_V0_1
    assert config_from_hf(QWEN2, QWEN2_GENERATION) == QWEN2_5_0_5B
    assert config_from_hf(QWEN3, QWEN2_GENERATION) == QWEN3_8B


def test_both_spellings_of_rope_agree() -> None:
    new = {k: v for k, v in LLAMA31.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA31["rope_scaling"]}
    new["dtype"] = new.pop("torch_dtype")
    assert config_from_hf(new) == LLAMA_3_1_8B


@pytest.mark.parametrize(
    ("added", "error"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ValueError),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, NotImplementedError),
        ({"rope_theta": 10000.0}, ValueError),
        ({"rope_parameters": 3}, ValueError),
    ],
    ids=str,
)
def test_a_scaling_that_was_added_is_not_passed_over(added: dict, error: type[Exception]) -> None:
    """A user adds `rope_scaling` as a model card says, to a file that has `rope_parameters`."""
    new = {k: v for k, v in SMOLLM2.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 100000.0, "rope_type": "default"}
    config_from_hf({**new, "rope_scaling": {"rope_type": "default"}, "rope_theta": 100000.0})
    with pytest.raises(error, match="rope"):
        config_from_hf({**new, **added})


def test_linear_scaling_in_its_oldest_spelling() -> None:
    config = config_from_hf({**SMOLLM2, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.rope == RopeConfig(theta=100000.0, scaling=LinearScaling(factor=2.0))


def test_llama2_states_no_kv_heads_theta_or_head_dim() -> None:
    raw = {k: v for k, v in LLAMA31.items() if k not in ("num_key_value_heads", "rope_theta")}
    config = config_from_hf({**raw, "rope_scaling": None, "head_dim": None})
    assert (config.num_kv_heads, config.head_dim) == (32, 128)
    assert config.rope == RopeConfig(theta=10000.0)


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert config_from_hf({**LLAMA31, "head_dim": 64}).head_dim == 64


@pytest.mark.parametrize("pad", [-1, 49152])
def test_a_pad_token_outside_the_vocabulary_is_none(pad: int) -> None:
    assert config_from_hf({**SMOLLM2, "pad_token_id": pad}).pad_token_id is None


def test_mistral_without_a_window() -> None:
    assert config_from_hf({**MISTRAL, "sliding_window": None}).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 24}, None),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}, 4096),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
        ({"layer_types": ["full_attention"] * 24, "use_sliding_window": True}, None),
        ({"layer_types": ["sliding_attention"] * 24, "use_sliding_window": True}, 32768),
    ],
)
def test_qwen_windows(changes: dict[str, Any], window: int | None) -> None:
    assert config_from_hf({**QWEN2, **changes}).sliding_window == window


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "max_window_layers": 21},
        {
            "use_sliding_window": True,
            "layer_types": ["full_attention"] * 12 + ["sliding_attention"] * 12,
        },
    ],
)
def test_qwen_windows_on_some_layers_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="a sliding window on some layers only"):
        config_from_hf({**QWEN2, **changes})


def _rope(kind: str) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": 4.0}}


REFUSED = [
    ("llama", {"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM is not"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClass"),
    ("llama", {"architectures": None, "model_type": "phi3"}, "model_type 'phi3' is not supported"),
    ("llama", _rope("yarn"), "rope type 'yarn' is not supported"),
    ("llama", _rope("dynamic"), "rope type 'dynamic' is not supported"),
    ("llama", _rope("longrope"), "rope type 'longrope' is not supported"),
    ("llama", {"rope_scaling": {"type": "su", "factor": 4.0}}, "rope type 'su' is not supported"),
    (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "rope_parameters differ by layer type",
    ),
    ("llama", {"attention_bias": True}, "attention_bias=True is not supported"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("qwen2", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq' is not support"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor=0.25 is not supported",
    ),
    ("llama", {"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
    ("llama", {"sliding_window": 4096}, "sliding_window=4096 with model_type 'llama'"),
    (
        "llama",
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.Model"}},
        "nothing in a model folder is executed",
    ),
    ("qwen3", {"layer_types": ["chunked_attention"] * 36}, "chunked_attention"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_unsupported_is_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        config_from_hf({**ALL[family], **changes})


CONTRADICTIONS = [
    ("llama", {"vocab_size": None}, "has no vocab_size"),
    ("qwen3", {"head_dim": None}, "has no head_dim"),
    ("qwen2", {"num_key_value_heads": None}, "has no num_key_value_heads"),
    ("llama", {"model_type": "qwen2"}, "model_type 'qwen2' contradicts architecture Llama"),
    ("llama", {"num_attention_heads": 30}, "hidden_size=4096 is no multiple"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor=None must be a number"),
    ("llama", {"hidden_size": "4096"}, "hidden_size='4096' must be a positive integer"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a number"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
    ("qwen2", {"layer_types": "full_attention"}, "layer_types='full_attention' must be a list"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    (
        "qwen2",
        {"layer_types": ["sliding_attention"] * 24, "sliding_window": None},
        "sliding_window is not set",
    ),
    ("llama", {"eos_token_id": 200000}, "eos_token_ids=200000 must lie in"),
]


@pytest.mark.parametrize(("family", "changes", "message"), CONTRADICTIONS)
def test_contradictions_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({**ALL[family], **changes})


def test_mistral_must_state_its_window() -> None:
    raw = {k: v for k, v in MISTRAL.items() if k != "sliding_window"}
    with pytest.raises(ValueError, match="has no sliding_window"):
        config_from_hf(raw)


def test_gguf_architectures() -> None:
    assert [family_for_gguf(name).name for name in ("llama", "qwen2", "qwen3")] == [
        "llama",
        "qwen2",
        "qwen3",
    ]
    with pytest.raises(NotImplementedError, match="GGUF architecture 'gemma3' is not supported"):
        family_for_gguf("gemma3")


def test_names_are_unique() -> None:
    assert len({f.architecture for f in FAMILIES}) == len({f.name for f in FAMILIES}) == 4
