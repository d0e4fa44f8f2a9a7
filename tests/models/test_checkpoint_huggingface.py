"""Hugging Face folders: what becomes of each tensor, and every way in which a folder can be bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_jax.models.checkpoint import (
    find_model,
    load_params,
    parameter_shapes,
    read_config,
)
from bi_jax.models.checkpoint.safetensors_file import open_safetensors
from bi_jax.models.families import config_from_hf
from tests.models.fixture_models import (
    CHECKPOINTS,
    FAMILIES,
    all_tensors,
    copy_of,
    edit_config,
    edit_tensors,
    read_tensors,
    write_tensors,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_is_in_its_place(name: str) -> None:
    config = read_config(CHECKPOINTS / name)
    params = load_params(CHECKPOINTS / name, config, dtype="float32")
    tensors = {k: v.astype(np.float32) for k, v in all_tensors(name).items()}
    assert {path: array.shape for path, array in params.items()} == parameter_shapes(config)
    assert sum(a.size for a in params.values()) == sum(t.size for t in tensors.values())
    head, groups = config.head_dim, config.queries_per_kv
    for layer in range(config.num_layers):
        own = {k: np.asarray(v) for k, v in params.items() if k.startswith(f"layers.{layer}.")}
        theirs = f"model.layers.{layer}"
        qkv = own[f"layers.{layer}.attention.qkv.weight"]
        q = tensors[f"{theirs}.self_attn.q_proj.weight"]
        for query in range(config.num_query_heads):
            rows = q[query * head : (query + 1) * head]
            np.testing.assert_array_equal(qkv[query // groups, query % groups], rows)
        for place, kind in ((groups, "k"), (groups + 1, "v")):
            rows = tensors[f"{theirs}.self_attn.{kind}_proj.weight"]
            for group in range(config.num_kv_heads):
                np.testing.assert_array_equal(
                    qkv[group, place], rows[group * head : (group + 1) * head]
                )
        gate_up = own[f"layers.{layer}.mlp.gate_up.weight"]
        np.testing.assert_array_equal(gate_up[0], tensors[f"{theirs}.mlp.gate_proj.weight"])
        np.testing.assert_array_equal(gate_up[1], tensors[f"{theirs}.mlp.up_proj.weight"])
    np.testing.assert_array_equal(params["embed.embedding"], tensors["model.embed_tokens.weight"])
    assert ("lm_head.weight" in params) == (not config.tie_word_embeddings)


def test_shards_hold_what_one_file_would(tmp_path: Path) -> None:
    config = read_config(CHECKPOINTS / "mistral")
    assert len(list((CHECKPOINTS / "mistral").glob("*.safetensors"))) == 3
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_bytes((CHECKPOINTS / "mistral" / "config.json").read_bytes())
    write_tensors(folder / "model.safetensors", all_tensors("mistral"))
    ours = load_params(CHECKPOINTS / "mistral", config, dtype="bfloat16")
    single = load_params(folder, config, dtype="bfloat16")
    assert all(ours[path].tobytes() == single[path].tobytes() for path in ours)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)],
)
def test_weights_are_rounded_once_to_the_wanted_dtype(dtype: str, expected: Any) -> None:
    config = read_config(CHECKPOINTS / "qwen2")
    params = load_params(CHECKPOINTS / "qwen2", config, dtype=dtype)
    stored = all_tensors("qwen2")["model.layers.1.mlp.down_proj.weight"]
    got = np.asarray(params["layers.1.mlp.down.weight"])
    assert got.dtype == np.dtype(expected)
    assert got.tobytes() == stored.astype(expected).tobytes()


def test_config_states_the_stored_dtype() -> None:
    stated = {name: read_config(CHECKPOINTS / name).param_dtype for name in FAMILIES}
    assert (stated["llama2"], stated["smollm2"], stated["qwen2"]) == (
        "bfloat16",
        "float16",
        "float32",
    )


def test_float16_refuses_a_weight_that_overflows(tmp_path: Path) -> None:
    folder = copy_of("qwen2", tmp_path)

    def enlarge(tensors: dict[str, np.ndarray]) -> None:
        weight = tensors["model.layers.0.mlp.down_proj.weight"].copy()
        weight[3, 5] = 1e6
        tensors["model.layers.0.mlp.down_proj.weight"] = weight

    edit_tensors(folder, enlarge)
    config = read_config(folder)
    load_params(folder, config, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down\.weight does not fit into float16"):
        load_params(folder, config, dtype="float16")


def test_sharding_is_the_one_asked_for() -> None:
    config = read_config(CHECKPOINTS / "qwen3")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))
    shardings = dict.fromkeys(parameter_shapes(config), device) | {"embed.embedding": rows}
    params = load_params(CHECKPOINTS / "qwen3", config, dtype="float32", sharding=shardings)
    assert params["embed.embedding"].sharding == rows
    assert params["lm_head.weight"].sharding == device
    plain = load_params(CHECKPOINTS / "qwen3", config, dtype="float32")
    assert all(params[path].tobytes() == plain[path].tobytes() for path in plain)
    del shardings["lm_head.weight"]
    with pytest.raises(ValueError, match=r"no entry for parameter lm_head\.weight"):
        load_params(CHECKPOINTS / "qwen3", config, dtype="float32", sharding=shardings)


def test_ignorable_tensors(tmp_path: Path) -> None:
    folder = copy_of("llama3", tmp_path)

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(32, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.ones(32, np.float32)

    edit_tensors(folder, add)
    config = read_config(folder)
    assert "lm_head.weight" not in load_params(folder, config, dtype="float32")


def test_a_tied_model_with_another_output_projection_is_refused(tmp_path: Path) -> None:
    folder = copy_of("llama3", tmp_path)

    def add(tensors: dict[str, np.ndarray]) -> None:
        other = tensors["model.embed_tokens.weight"].copy()
        other[7, 3] += 1
        tensors["lm_head.weight"] = other

    edit_tensors(folder, add)
    with pytest.raises(ValueError, match=r"lm_head\.weight is stored and differs"):
        load_params(folder, read_config(folder), dtype="float32")


def _rename(old: str, new: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[new] = tensors.pop(old)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _rename("model.norm.weight", "model.final_norm.weight"),
            r"missing model\.norm\.weight; left over model\.final_norm\.weight",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing lm_head\.weight; left over nothing"),
        (
            lambda t: t.update({"model.layers.2.mlp.bias": np.ones(3, np.float32)}),
            r"missing nothing; left over model\.layers\.2\.mlp\.bias",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.k_proj.bias": np.ones(8, np.float32)}),
            r"left over model\.layers\.1\.self_attn\.k_proj\.bias",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(127, np.float32)}),
            r"model\.norm\.weight has shape \(127,\), .* asks for \(128,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(128, np.int8)}),
            r"model\.norm\.weight has dtype I8, which is not supported",
        ),
    ],
)
def test_each_tensor_is_used_exactly_once(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], Any], message: str
) -> None:
    folder = copy_of("llama2", tmp_path)
    edit_tensors(folder, change)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        load_params(folder, read_config(folder), dtype="float32")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama2", {"num_hidden_layers": 3}, r"missing model\.layers\.2\.input_layernorm\.weight"),
        ("llama2", {"num_hidden_layers": 1}, r"left over model\.layers\.1\."),
        ("llama2", {"vocab_size": 193}, r"has shape \(192, 128\), .* asks for \(193, 128\)"),
        ("llama2", {"intermediate_size": 100}, r"gate_proj\.weight has shape \(96, 128\)"),
        ("llama3", {"num_key_value_heads": 4}, r"k_proj\.weight has shape \(128, 96\)"),
        ("llama3", {"head_dim": 32}, r"q_proj\.weight has shape \(256, 96\)"),
        ("llama3", {"tie_word_embeddings": False}, r"missing lm_head\.weight; left over nothing"),
    ],
)
def test_a_config_that_contradicts_its_weights(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    folder = copy_of(name, tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_params(folder, read_config(folder), dtype="float32")


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    folder = copy_of("llama2", tmp_path)
    edit_config(folder, num_hidden_layers=30)
    with pytest.raises(ValueError, match=r"and \d+ more; left over nothing") as error:
        load_params(folder, read_config(folder), dtype="float32")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, 100_000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = copy_of("llama2", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is (truncated|not a safetensors)"):
        load_params(folder, read_config(folder), dtype="float32")


def _header(path: Path, text: str) -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(64))
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "a name is there twice"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', "byte range 8 to 0"),
        ('{"a": {"dtype": "F32", "shape": [2]}}', "header cannot be read"),
        ("[1, 2]", "header cannot be read"),
        ("[" * 100_000, "header cannot be read"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 65]}}', "is truncated"),
        ('{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', "does not fit shape"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}', "does not fit shape"),
        (
            '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            ' "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
            "two of its tensors lie in the same bytes",
        ),
    ],
)
def test_a_bad_header(tmp_path: Path, text: str, message: str) -> None:
    path = _header(tmp_path / "model.safetensors", text)
    with pytest.raises(ValueError, match=message):
        open_safetensors(path).read("a")


@pytest.mark.parametrize("name", ["qwen2", "smollm2"])
def test_the_package_reads_the_same(name: str) -> None:
    from safetensors.numpy import load_file

    path = CHECKPOINTS / name / "model.safetensors"
    theirs, ours = load_file(path), open_safetensors(path)
    assert theirs.keys() == ours.tensors.keys()
    for tensor, value in theirs.items():
        got = ours.read(tensor)
        assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes())


@given(place=st.integers(0, 2500), byte=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_a_damaged_header_is_an_ordinary_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    data = bytearray((CHECKPOINTS / "llama2" / "model.safetensors").read_bytes())
    data[place] = byte
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    path.write_bytes(data)
    try:
        file = open_safetensors(path)
        for name in file.tensors:
            file.read(name)
    except (ValueError, NotImplementedError):
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**9) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_config_is_an_ordinary_error(name: str, data: st.DataObject) -> None:
    raw = json.loads((CHECKPOINTS / name / "config.json").read_text())
    extra = ["rope_scaling", "auto_map", "quantization_config", "layer_types", "rope_parameters"]
    key = data.draw(st.sampled_from(sorted({*raw, *extra})))
    raw[key] = data.draw(JSON)
    try:
        config_from_hf(raw)
    except (ValueError, NotImplementedError) as error:
        assert len(str(error)) > 10


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    folder = copy_of("llama2", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(NotImplementedError, match=r"as pytorch_model\.bin: .* can run code"):
        load_params(folder, read_config(folder), dtype="float32")
    with pytest.raises(NotImplementedError, match="may run code when opened"):
        find_model(folder / "pytorch_model.bin")


def test_no_weights_and_too_many(tmp_path: Path) -> None:
    folder = copy_of("mistral", tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    config = read_config(folder)
    with pytest.raises(ValueError, match="3 safetensors files but neither"):
        load_params(folder, config, dtype="float32")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match="has no weights"):
        load_params(folder, config, dtype="float32")


def _edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.update({"model.norm.weight": "../model-00001-of-00003.safetensors"}),
            "expected a file of the same folder",
        ),
        (
            lambda m: m.update({"model.norm.weight": "model-00009-of-00009.safetensors"}),
            "lacks model-00009-of-00009",
        ),
        (
            lambda m: m.update({"model.norm.weight": "model-00001-of-00003.safetensors"}),
            r"says that model\.norm\.weight is in model-00001",
        ),
        (lambda m: m.update({"x": "pytorch_model.bin"}), "only safetensors files are read"),
        (lambda m: m.clear(), "has no weight_map"),
    ],
)
def test_a_bad_index(tmp_path: Path, change: Callable[[dict[str, str]], Any], message: str) -> None:
    folder = copy_of("mistral", tmp_path)
    _edit_index(folder, change)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        load_params(folder, read_config(folder), dtype="float32")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = copy_of("mistral", tmp_path)
    first, second, _ = sorted(folder.glob("*.safetensors"))
    name, tensor = next(iter(read_tensors(first).items()))
    write_tensors(second, {**read_tensors(second), name: tensor})
    with pytest.raises(ValueError, match=f"tensor {name} is in {first.name} and in {second.name}"):
        load_params(folder, read_config(folder), dtype="float32")


def test_unsupported_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    folder = copy_of("llama2", tmp_path)
    (folder / "model.safetensors").write_bytes(b"no weights")
    edit_config(folder, architectures=["GPT2LMHeadModel"])
    with pytest.raises(NotImplementedError, match=r"llama2: .*GPT2LMHeadModel is not supported"):
        read_config(folder)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": NaN', "\x00"])
def test_a_config_that_is_no_json(tmp_path: Path, text: str) -> None:
    folder = copy_of("llama2", tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json (cannot be read as JSON|must hold a JSON)"):
        read_config(folder)


def test_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    folder = copy_of("llama2", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2], "pad_token_id": 9}')
    config = read_config(folder)
    assert config.eos_token_ids == (2, 5)
    assert config.pad_token_id == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/folder/at/all", "There is no model at no/such/folder/at/all: expected"),
        ("nosuchmodel", "There is no model at nosuchmodel: expected"),
        ("~no-such-user/model", "There is no model at ~no-such-user/model: expected"),
        (CHECKPOINTS, "holds no model: it has no config.json"),
        (CHECKPOINTS / "llama2" / "model.safetensors", "holds weights only"),
        (CHECKPOINTS / "llama2" / "expected.npz", "is no model: expected"),
    ],
)
def test_no_such_model(name: str | Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(name)


def test_an_unknown_dtype() -> None:
    config = read_config(CHECKPOINTS / "llama2")
    with pytest.raises(ValueError, match="dtype='int4' must be one of"):
        load_params(CHECKPOINTS / "llama2", config, dtype="int4")
