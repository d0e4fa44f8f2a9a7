"""A vocabulary that the kernels do not take gets rows of zeros, which nobody ever sees."""

import dataclasses

import jax
import numpy as np
import pytest

from bi_jax import SamplingParams, runner
from bi_jax.engine import Engine
from bi_jax.models.transformer import build_transformer
from bi_jax.ops import transformer_ops
from bi_jax.vocabulary_rows import rows_for

from . import tiny

PROMPTS = [list(range(3, 3 + n)) for n in (1, 40)]
PARAMS = [
    SamplingParams(temperature=t, seed=1, max_tokens=12, ignore_eos=True, logprobs=3)
    for t in (0.0, 1.0)
]
CONFIG = dataclasses.replace(tiny.ENGINE, token_buckets=(64,))


def engine() -> Engine:
    return Engine(build_transformer(tiny.CONFIG, tiny.parameters()), config=CONFIG)


@pytest.mark.parametrize(("backend", "rows"), [("hopper", 328), ("reference", 321)])
def test_rows(backend: str, rows: int):
    ops = transformer_ops(tiny.CONFIG.replace(vocab_size=321), backend=backend)
    assert rows_for(321, ops) == rows
    assert rows_for(320, ops) == 320


def test_padded_tables_change_no_bit_and_stay_inside(monkeypatch: pytest.MonkeyPatch):
    plain = engine()
    expected = plain.generate(PROMPTS, PARAMS)
    monkeypatch.setattr(runner, "rows_for", lambda vocab_size, ops: vocab_size + 8)
    padded = engine()
    shapes = {leaf.shape for leaf in jax.tree.leaves(padded.runner._state)}
    assert (tiny.VOCAB + 8, tiny.CONFIG.hidden_size) in shapes
    tiny.assert_same_completions(padded.generate(PROMPTS, PARAMS), expected)
    assert padded.identity == plain.identity
    same = jax.tree.map(np.array_equal, padded.runner.state, plain.runner.state)
    assert len(jax.tree.leaves(same)) > 10
    before = padded.weights_version
    padded.update_weights(plain.runner.state)
    assert padded.weights_version == before + 1
    tiny.assert_same_completions(padded.generate(PROMPTS, PARAMS), expected)
