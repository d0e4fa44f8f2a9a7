"""Orbax folders: a round trip of every family, shardings, rounding, and damaged folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bi_jax.models.checkpoint import (
    load_params,
    parameter_shapes,
    read_config,
    save_orbax,
    weights_digest,
)
from bi_jax.models.checkpoint.config_json import FIELDS, config_from_json, config_to_json
from bi_jax.models.config import FrequencyFactors, LinearScaling, RopeConfig, TransformerConfig
from bi_jax.models.families.llama import LLAMA_3_1_8B, SMOLLM2_135M
from bi_jax.models.families.mistral import MISTRAL_7B_V0_1
from bi_jax.models.families.qwen2 import QWEN2_5_0_5B
from bi_jax.models.families.qwen3 import QWEN3_8B
from tests.models.fixture_models import CHECKPOINTS, FAMILIES

# Not a property of the weights, so not in the folder.
NOT_STORED = {"topology"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama3 in float32, in Orbax's format."""
    folder = tmp_path_factory.mktemp("saved")
    config = read_config(CHECKPOINTS / "llama3").replace(param_dtype="float32")
    save_orbax(folder, config, load_params(CHECKPOINTS / "llama3", config, dtype="float32"))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(tmp_path: Path, name: str) -> None:
    config = read_config(CHECKPOINTS / name)
    params = load_params(CHECKPOINTS / name, config, dtype=config.param_dtype)
    save_orbax(tmp_path, config, params)
    assert read_config(tmp_path) == config
    restored = load_params(tmp_path, config, dtype=config.param_dtype)
    assert weights_digest(restored) == weights_digest(params)


def test_rounding_is_the_one_of_the_other_readers(tmp_path: Path) -> None:
    config = read_config(CHECKPOINTS / "qwen2")
    save_orbax(tmp_path, config, load_params(CHECKPOINTS / "qwen2", config, dtype="float32"))
    for dtype in ("bfloat16", "float16"):
        ours = load_params(tmp_path, config, dtype=dtype)
        direct = load_params(CHECKPOINTS / "qwen2", config, dtype=dtype)
        assert weights_digest(ours) == weights_digest(direct)


def test_float16_refuses_a_weight_that_overflows(tmp_path: Path) -> None:
    config = read_config(CHECKPOINTS / "qwen2")
    params = load_params(CHECKPOINTS / "qwen2", config, dtype="float32")
    large = params["final_norm.scale"].at[3].set(1e6)
    save_orbax(tmp_path, config, {**params, "final_norm.scale": large})
    load_params(tmp_path, config, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"final_norm\.scale does not fit into float16"):
        load_params(tmp_path, config, dtype="float16")


def test_restores_straight_into_a_sharding(saved: Path) -> None:
    config = read_config(saved)
    devices = np.array(jax.devices()[:2])
    mesh = jax.sharding.Mesh(devices, ("tp",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = {p: rows if "qkv" in p else whole for p in parameter_shapes(config)}
    params = load_params(saved, config, dtype="float32", sharding=shardings)
    assert len(devices) == 2
    for path, array in params.items():
        assert array.sharding == shardings[path]
    shard = params["layers.0.attention.qkv.weight"].addressable_shards[1]
    assert shard.data.shape == (1, config.queries_per_kv + 2, 64, 96)
    direct = load_params(CHECKPOINTS / "llama3", config, dtype="float32", sharding=shardings)
    assert weights_digest(params) == weights_digest(direct)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, r"missing \['layers\.2\.attention\.out\.weight'.*left over \[\]"),
        ({"num_layers": 1}, r"missing \[\]; left over \['layers\.1\.attention"),
        ({"intermediate_size": 100}, r"gate_up\.weight has shape \(2, 112, 96\)"),
    ],
)
def test_a_config_that_contradicts_its_weights(
    saved: Path, changes: dict[str, Any], message: str
) -> None:
    config = read_config(saved).replace(**changes)
    with pytest.raises(ValueError, match=message):
        load_params(saved, config, dtype="float32")


def _edit_marker(saved: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    content = json.loads((folder / "bi_jax.json").read_text())
    for key, value in changes.items():
        target = content if key in content else content["config"]
        if value is None:
            del target[key]
        else:
            target[key] = value
    (folder / "bi_jax.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "has format 2; expected 1"),
        ({"config": None}, "is damaged"),
        ({"head_dim": None}, r"fields missing \['head_dim'\] or unknown \[\]"),
        ({"heads": 3}, r"fields missing \[\] or unknown \['heads'\]"),
        ({"head_dim": "x"}, "head_dim='x' must be a positive integer"),
        ({"rope": {"theta": 1e4, "scaling": {"type": "yarn"}}}, "rope scaling 'yarn' must be one"),
        ({"rope": {"theta": 1e4, "scaling": {"type": "linear"}}}, "is damaged: .*factor"),
    ],
)
def test_a_damaged_marker(
    saved: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = _edit_marker(saved, tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_config(folder)


def test_weights_that_are_not_those_that_were_written(saved: Path, tmp_path: Path) -> None:
    config = read_config(saved)
    params = dict(load_params(saved, config, dtype="float32"))
    written = json.loads((saved / "bi_jax.json").read_text())["weights_2"]
    assert written == weights_digest(params)
    params["final_norm.scale"] = params["final_norm.scale"].at[3].add(1e-6)
    save_orbax(tmp_path, config, params)
    load_params(tmp_path, config, dtype="float32")
    shutil.copyfile(saved / "bi_jax.json", tmp_path / "bi_jax.json")
    with pytest.raises(ValueError, match=f"is damaged: its weights .* {written[:16]} is written"):
        load_params(tmp_path, config, dtype="bfloat16")
    _edit_marker(saved, tmp_path / "older", weights_2=None)
    load_params(tmp_path / "older", config, dtype="float32")


def test_parameters_that_are_not_there(saved: Path, tmp_path: Path) -> None:
    folder = _edit_marker(saved, tmp_path)
    shutil.rmtree(folder / "params")
    with pytest.raises(ValueError, match="params is no complete Orbax checkpoint"):
        load_params(folder, read_config(folder), dtype="float32")


def test_files_that_are_damaged(saved: Path, tmp_path: Path) -> None:
    said = []
    for file in sorted((saved / "params").rglob("*process_0/d/*")):
        folder = _edit_marker(saved, tmp_path / file.name)
        (folder / file.relative_to(saved)).write_bytes(b"")
        try:
            load_params(folder, read_config(folder), dtype="float32")  # some files are spare
        except ValueError as error:
            said.append(str(error))
    assert said and all("params is " in text and "\n" not in text for text in said)
    assert any("params is damaged: " in text for text in said)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA_3_1_8B,
        SMOLLM2_135M,
        MISTRAL_7B_V0_1,
        QWEN2_5_0_5B,
        QWEN3_8B,
        SMOLLM2_135M.replace(rope=RopeConfig(theta=1e4, scaling=LinearScaling(factor=2.0))),
        SMOLLM2_135M.replace(
            rope=RopeConfig(theta=1e4, scaling=FrequencyFactors(factors=(1.5,) * 32))
        ),
    ],
    ids=lambda config: config.family,
)
def test_config_survives_json(config: TransformerConfig) -> None:
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_every_field_is_stored() -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert fields - NOT_STORED == {*FIELDS, "rope"}
