"""scripts/convert.py: it writes the same bits, and it leaves no half-written folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bi_jax.models.checkpoint import load_params, read_config, weights_digest
from bi_jax.models.checkpoint.gguf_file import copy_metadata, open_gguf
from scripts import convert
from tests.models.fixture_models import CHECKPOINTS, copy_of, edit_config
from tests.models.test_checkpoint_gguf import write_gguf

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert.py"


def test_a_folder_with_its_tokenizer_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copy_of("mistral", tmp_path)
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("hello")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (model / "modeling_x.py").write_text("raise SystemExit")
    output = tmp_path / "out"
    assert convert.main([str(model), str(output)]) == 0
    config = read_config(model)
    assert read_config(output) == config
    params = load_params(model, config, dtype="bfloat16")
    digest = weights_digest(params)
    assert digest[:16] in capsys.readouterr().out
    assert weights_digest(load_params(output, config, dtype="bfloat16")) == digest
    assert (output / "chat_template.jinja").read_text() == "hello"
    assert (output / "additional_chat_templates" / "tools.jinja").read_text() == "tools"
    assert sorted(path.name for path in output.iterdir()) == [
        "additional_chat_templates",
        "bi_jax.json",
        "chat_template.jinja",
        "config.json",
        "params",
        "tokenizer.json",
    ]


def test_a_gguf_file_rounded_to_bfloat16(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", "llama3")
    output = tmp_path / "out"
    assert convert.main([str(model), str(output), "--dtype", "bfloat16"]) == 0
    config = read_config(output)
    assert config == read_config(model).replace(dtype="bfloat16", param_dtype="bfloat16")
    direct = load_params(model, config, dtype="bfloat16")
    assert weights_digest(load_params(output, config, dtype="bfloat16")) == weights_digest(direct)
    tokenizer = open_gguf(output / "tokenizer.gguf")
    assert not tokenizer.tensors
    assert tokenizer.metadata == open_gguf(model).metadata
    again = tmp_path / "again"
    assert convert.main([str(output), str(again)]) == 0
    assert weights_digest(load_params(again, config, dtype="bfloat16")) == weights_digest(direct)
    assert (again / "tokenizer.gguf").read_bytes() == (output / "tokenizer.gguf").read_bytes()


def test_copied_metadata_is_read_by_the_package(tmp_path: Path) -> None:
    import gguf

    copy_metadata(write_gguf(tmp_path / "m.gguf", "llama2"), tmp_path / "t.gguf")
    reader = gguf.GGUFReader(tmp_path / "t.gguf")
    assert reader.tensors == []
    assert reader.fields["tokenizer.ggml.tokens"].contents()[:2] == ["t0", "t1"]


@pytest.mark.parametrize("kind", ["missing", "truncated", "contradiction", "unsupported"])
def test_a_bad_model_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    model = copy_of("llama2", tmp_path)
    weights = model / "model.safetensors"
    if kind == "missing":
        weights.unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "contradiction":
        edit_config(model, vocab_size=200)
    else:
        edit_config(model, hidden_act="relu")
    assert convert.main([str(model), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "llama2" in message
    assert [path.name for path in tmp_path.iterdir()] == ["llama2"]


def test_an_output_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(CHECKPOINTS / "llama2")
    assert convert.main([model, str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert convert.main([model, str(tmp_path / "no" / "out")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert convert.main([model, "/proc/out"]) == 2
    assert "/proc/out cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_script_itself(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "no" / "model"), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith("convert.py: There is no model at")
    assert ran.stderr.count("\n") == 1
