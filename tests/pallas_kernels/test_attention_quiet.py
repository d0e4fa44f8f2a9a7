"""Zeros in the rows of decode attention that hold no query: no bit of a query's row changes."""

import dataclasses

import jax
import numpy as np
import pytest

from bi_jax.pallas_kernels.attention import hopper_block
from bi_jax.pallas_kernels.attention.kernel_hopper import attention_hopper
from bi_jax.pallas_kernels.attention.schedule import Schedule
from tests.pallas_kernels.test_attention_hopper import HALF, Step, check, interpreted, lowered

# Rows and keys that nobody wrote are NaN here, and NumPy, which interprets the products, says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

LOUD = Schedule(**HALF, ctas=2)
QUIET = dataclasses.replace(LOUD, quiet=True)
# Last blocks are full: behind a context stand keys that nobody wrote, here NaN.
FULL = Step(queries=(1, 1), contexts=(256, 128), rows=2, group=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "columns", "window"),
    [
        (Step(queries=(1, 1), contexts=(290, 64), rows=2, group=3, dtype="float16"), 2, None),
        (Step(queries=(1, 2, 1), contexts=(300, 140, 520), rows=4), 1, 200),
    ],
    ids=["columns", "window"],
)
def test_no_bit_changes(step, columns, window):
    loud, quiet = (dataclasses.replace(s, columns=columns) for s in (LOUD, QUIET))
    want, truth = interpreted(step, loud, window=window)
    got, _ = interpreted(step, quiet, window=window)
    check(got, truth)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


def watched(monkeypatch, schedule: Schedule):
    """o and lse of two requests, and the left operands of all products, [64, n]: queries, p."""
    queries, weights = [], []
    start, product = hopper_block.start_product, hopper_block.interpreted_product

    def seen_start(q_ref, k_ref, *, interpret):
        jax.debug.callback(lambda q: queries.append(np.asarray(q, np.float32)), q_ref[...])
        return start(q_ref, k_ref, interpret=interpret)

    def seen_product(p_ref, v_ref):
        jax.debug.callback(lambda p: weights.append(np.asarray(p, np.float32)), p_ref[...])
        return product(p_ref, v_ref)

    with monkeypatch.context() as patch:
        patch.setattr(hopper_block, "start_product", seen_start)
        patch.setattr(hopper_block, "interpreted_product", seen_product)
        attention_hopper.clear_cache()
        got, _ = interpreted(FULL, schedule)
        jax.effects_barrier()
    attention_hopper.clear_cache()
    return got, (queries, weights)


def rows_in_use(x: np.ndarray) -> list[int]:
    return np.flatnonzero(np.any(x != 0, axis=1)).tolist()


@pytest.mark.slow
def test_only_the_rows_of_queries_hold_numbers(monkeypatch):
    """Three heads of one token, the first or the second of its tile; the outputs are the same."""
    want, loud = watched(monkeypatch, LOUD)
    got, quiet = watched(monkeypatch, QUIET)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]
    first, second = [0, 16, 32], [1, 17, 33]
    for operands in quiet:
        # Two blocks of the first request, one of the second.
        assert sorted(map(rows_in_use, operands)) == [first, first, second]
    for operands in loud:
        assert all(len(rows_in_use(x)) > 3 for x in operands)


def test_it_lowers_for_sm90():
    assert "@mosaic_gpu" in lowered(16, 16, (8, 4, 128), schedule=QUIET)


@pytest.mark.slow
def test_small_heads_lower_for_sm90():
    assert "@mosaic_gpu" in lowered(16, 16, (3, 3, 64), dtype="float16", schedule=QUIET)


def test_it_needs_half_rows_and_scores():
    for wrong in (dict(half_rows=False), dict(overlap="turns"), dict(overlap="blocks")):
        with pytest.raises(ValueError, match="quiet needs"):
            dataclasses.replace(QUIET, **wrong)
