"""GGUF: the header, the un-permuted q and k rows, dequantisation, and damaged files.

Files are written with the `gguf` package's own writer from the tiny checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_jax.models.checkpoint import find_demo_model, find_model, load_params, read_config
from bi_jax.models.checkpoint.gguf_file import open_gguf
from bi_jax.models.checkpoint.gguf_model import gguf_name
from bi_jax.models.config import FrequencyFactors, LinearScaling, TransformerConfig
from bi_jax.models.families.llama import SMOLLM2_135M
from bi_jax.models.rope import rope_frequencies
from tests.models.fixture_models import CHECKPOINTS, all_tensors

Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], Any]
ARCHITECTURES = {"llama2": "llama", "llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i + s * Dh / 2 of a head becomes row 2i + s, spelled out row by row."""
    by_head = rows.reshape(heads, -1, rows.shape[-1])
    out = np.empty_like(by_head)
    half = by_head.shape[1] // 2
    for i in range(half):
        out[:, 2 * i] = by_head[:, i]
        out[:, 2 * i + 1] = by_head[:, i + half]
    return out.reshape(rows.shape)


def gguf_tensors(name: str, config: TransformerConfig) -> dict[str, np.ndarray]:
    tensors = {}
    for hf_name, tensor in all_tensors(name).items():
        values = tensor.astype(np.float32)
        if config.family == "llama" and hf_name.endswith("q_proj.weight"):
            values = interleaved(values, config.num_query_heads)
        if config.family == "llama" and hf_name.endswith("k_proj.weight"):
            values = interleaved(values, config.num_kv_heads)
        tensors[gguf_name(hf_name)] = values
    if name == "llama3":
        plain = config.rope.__class__(theta=config.rope.theta)
        factors = rope_frequencies(plain, config.head_dim) / rope_frequencies(
            config.rope, config.head_dim
        )
        tensors["rope_freqs.weight"] = factors.astype(np.float32)
    return tensors


def gguf_metadata(config: TransformerConfig) -> dict[str, Any]:
    return {
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_query_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.head_dim,
    }


def write_gguf(
    path: Path,
    name: str,
    *,
    architecture: str | None = None,
    edit: Edit = lambda metadata, tensors: None,
    quantization: gguf.GGMLQuantizationType | None = None,
) -> Path:
    config = read_config(CHECKPOINTS / name)
    architecture = architecture or ARCHITECTURES[name]
    metadata, tensors = gguf_metadata(config), gguf_tensors(name, config)
    edit(metadata, tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(
            type(value), writer.add_array
        )
        add(key if key.startswith("split.") else f"{architecture}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_pad_token_id(0)
    for tensor_name, tensor in tensors.items():
        quantised = quantization is not None and tensor.ndim == 2
        if quantised:
            data = gguf.quants.quantize(tensor, quantization)
            writer.add_tensor(tensor_name, data, raw_dtype=quantization)
        else:
            writer.add_tensor(tensor_name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_holds_the_same_model(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", name)
    theirs = read_config(CHECKPOINTS / name)
    ours = read_config(path)
    rope = ours.rope if name == "llama3" else theirs.rope
    expected = theirs.replace(
        dtype="float32", param_dtype="float32", eos_token_ids=(2, 3), rope=rope
    )
    assert ours == expected
    got = load_params(path, ours, dtype="float32")
    wanted = load_params(CHECKPOINTS / name, theirs, dtype="float32")
    assert list(got) == list(wanted)
    assert all(got[p].tobytes() == wanted[p].tobytes() for p in wanted)


def test_forgetting_to_unpermute_would_show(tmp_path: Path) -> None:
    """The control for the test above: with q and k rows as they are the weights differ."""
    config = read_config(CHECKPOINTS / "llama2")

    def put_back(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        stored = all_tensors("llama2")["model.layers.0.self_attn.q_proj.weight"]
        tensors["blk.0.attn_q.weight"] = stored.astype(np.float32)

    path = write_gguf(tmp_path / "m.gguf", "llama2", edit=put_back)
    got = load_params(path, config, dtype="float32")["layers.0.attention.qkv.weight"]
    wanted = load_params(CHECKPOINTS / "llama2", config, dtype="float32")
    wanted_qkv = wanted["layers.0.attention.qkv.weight"]
    assert np.array_equal(got[:, 1:], wanted_qkv[:, 1:])
    assert not np.array_equal(got[:, 0], wanted_qkv[:, 0])


def test_rope_factors_stand_for_llama3_scaling(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama3")
    ours, theirs = read_config(path), read_config(CHECKPOINTS / "llama3")
    assert isinstance(ours.rope.scaling, FrequencyFactors)
    np.testing.assert_allclose(
        rope_frequencies(ours.rope, ours.head_dim),
        rope_frequencies(theirs.rope, theirs.head_dim),
        rtol=1e-6,
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "BF16", "F16"])
def test_dequantisation_is_the_one_of_gguf(tmp_path: Path, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "m.gguf", "llama2", quantization=quantization)
    params = load_params(path, read_config(path), dtype="float32")
    stored = gguf_tensors("llama2", read_config(CHECKPOINTS / "llama2"))
    packed = gguf.quants.quantize(stored["blk.1.ffn_down.weight"], quantization)
    expected = gguf.quants.dequantize(packed, quantization)
    np.testing.assert_array_equal(params["layers.1.mlp.down.weight"], expected)


def test_linear_scaling_and_window(tmp_path: Path) -> None:
    def add(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
        metadata["attention.sliding_window"] = 24

    config = read_config(write_gguf(tmp_path / "m.gguf", "llama2", edit=add))
    assert config.rope.scaling == LinearScaling(factor=4.0)
    assert config.sliding_window == 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.scaling.type": "yarn"}, r"rope\.scaling\.type='yarn' is not supported"),
        ({"split.count": 3}, "is one of 3 parts"),
        ({"expert_count": 8}, "expert_count=8 is not supported"),
        ({"rope.dimension_count": 32}, "rope.dimension_count=32 is not supported"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv differs between layers"),
        ({"attention.head_count": [2, 1]}, "head_count differs between layers"),
        ({"attention.head_count": 0}, "head_count=0 must be a positive whole number"),
        ({"embedding_length": "wide"}, "embedding_length='wide' must be a positive whole number"),
        ({"attention.head_count": 3}, "num_query_heads=3 must be a multiple"),
        ({"block_count": None}, r"no llama\.block_count"),
    ],
)
def test_bad_metadata(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        metadata.update(changes)
        for key in [key for key, value in metadata.items() if value is None]:
            del metadata[key]

    path = write_gguf(tmp_path / "m.gguf", "llama2", edit=change)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        read_config(path)


def test_an_unsupported_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama2", architecture="gemma3")
    with pytest.raises(NotImplementedError, match="GGUF architecture 'gemma3' is not supported"):
        read_config(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda m, t: t.pop("blk.1.ffn_up.weight"),
            r"missing blk\.1\.ffn_up\.weight; left over nothing",
        ),
        (
            lambda m, t: t.update({"blk.0.attn_q.bias": np.ones(128, np.float32)}),
            r"missing nothing; left over blk\.0\.attn_q\.bias",
        ),
        (
            lambda m, t: t.update({"blk.0.extra.weight": np.ones(128, np.float32)}),
            r"left over blk\.0\.extra\.weight",
        ),
        (
            lambda m, t: t.update({"output_norm.weight": np.ones(100, np.float32)}),
            r"output_norm\.weight has shape \(100,\)",
        ),
    ],
)
def test_each_tensor_is_used_exactly_once(tmp_path: Path, edit: Edit, message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama2", edit=edit)
    with pytest.raises(ValueError, match=message):
        load_params(path, read_config(path), dtype="float32")


@functools.cache
def small_file() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "m.gguf", "llama3").read_bytes()


@pytest.mark.parametrize("keep", [0, 3, 20, 24, 300, 2000, 5000, 100_000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_file()[:keep])
    with pytest.raises(ValueError, match=r"m\.gguf (is|ends)"):
        read_config(path)


@given(place=st.integers(0, 5000), byte=st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_damaged_header_is_an_ordinary_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    data = bytearray(small_file())
    data[place] = byte
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(data)
    try:
        read_config(path)
    except (ValueError, NotImplementedError) as error:
        assert "m.gguf" in str(error)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ValueError, match="does not begin with b'GGUF'"):
        read_config(path)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama2")
    assert find_model(tmp_path).path == path
    path.with_name("b.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="holds 2 GGUF files; name one of them"):
        find_model(tmp_path)


def test_the_demo_model_is_smollm2() -> None:
    path = find_demo_model()
    config = read_config(path)
    assert config == SMOLLM2_135M.replace(dtype="float32", param_dtype="float32")
    file = open_gguf(path)
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152


def test_our_header_reader_agrees_with_the_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", quantization=gguf.GGMLQuantizationType.Q8_0)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value
    assert {t.name for t in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (mine.offset, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)
