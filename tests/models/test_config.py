"""TransformerConfig checks itself, and names the field and the value."""

from __future__ import annotations

import dataclasses

import pytest

from bi_jax.models.config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    TransformerConfig,
)

SMALL = TransformerConfig(
    family="llama",
    vocab_size=192,
    hidden_size=96,
    intermediate_size=112,
    num_layers=2,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    max_position=256,
    eos_token_ids=(2,),
)


def test_derived_sizes() -> None:
    assert SMALL.queries_per_kv == 3
    assert SMALL.query_size == 6 * 64
    assert SMALL.attention_scale == 0.125


def test_equal_configs_are_equal_and_hash_alike() -> None:
    assert SMALL.replace() == SMALL
    assert hash(SMALL.replace()) == hash(SMALL)
    assert SMALL.replace(num_layers=3) != SMALL


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.head_dim = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be a positive integer"),
        ({"hidden_size": 96.0}, "hidden_size=96.0 must be a positive integer"),
        ({"num_layers": True}, "num_layers=True must be a positive integer"),
        ({"num_kv_heads": 4}, "num_query_heads=6 must be a multiple of num_kv_heads=4"),
        ({"head_dim": 63}, "head_dim=63 must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a positive number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05 must be a positive number"),
        ({"sliding_window": 0}, "sliding_window=0 must be a positive integer"),
        ({"qkv_bias": None}, "qkv_bias=None must be True or False"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
        ({"param_dtype": "float64"}, "param_dtype='float64' must be one of"),
        ({"rope": 10000.0}, "rope=10000.0 must be a RopeConfig"),
        ({"eos_token_ids": [2]}, r"eos_token_ids=\[2\] must be a tuple"),
        ({"eos_token_ids": (2, 192)}, r"eos_token_ids=192 must lie in \[0, vocab_size=192\)"),
        ({"eos_token_ids": (None,)}, "eos_token_ids=None must lie in"),
        ({"bos_token_id": -1}, "bos_token_id=-1 must lie in"),
        ({"pad_token_id": "0"}, "pad_token_id='0' must lie in"),
        ({"family": ""}, "family='' must be a non-empty string"),
        (
            {"rope": RopeConfig(theta=1e4, scaling=FrequencyFactors(factors=(1.0, 2.0)))},
            "rope.scaling has 2 factors; head_dim=64 needs 32",
        ),
    ],
)
def test_refuses_by_field_and_value(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SMALL.replace(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RopeConfig(theta=0.0), "theta=0.0 must be a positive number"),
        (lambda: RopeConfig(theta=1e4, scaling="linear"), "scaling='linear' must be None"),
        (lambda: LinearScaling(factor=0), "factor=0 must be a positive number"),
        (lambda: FrequencyFactors(factors=(1.0, -1.0)), "must be a tuple of positive floats"),
        (
            lambda: Llama3Scaling(
                factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0, original_max_position=48
            ),
            "low_freq_factor=4.0 must be below high_freq_factor=4.0",
        ),
    ],
)
def test_rope_refuses(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
