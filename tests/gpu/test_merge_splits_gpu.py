"""The merge of ranges of keys on the card: programs of other numbers of ranges give equal bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.attention.hopper_splits import LINE, merge_splits

pytestmark = pytest.mark.gpu

KV_SPLIT, MOST, KV_HEADS, GROUP = 128, 9, 2, 4


def operands(tokens: int):
    """Ranges of very different weights; what a token does not see is NaN."""
    rng = np.random.default_rng(2)
    shape = (MOST, tokens, KV_HEADS, GROUP)
    parts = rng.standard_normal((*shape, LINE)) * np.exp2(rng.uniform(-20, 20, (*shape, 1)))
    lses = rng.uniform(-12, 12, shape)
    positions = np.arange(tokens) * 37 % (MOST * KV_SPLIT)
    unseen = np.arange(MOST)[:, None] * KV_SPLIT > positions
    parts[unseen], lses[unseen] = np.nan, np.nan
    return np.float32(parts), np.float32(lses), np.int32(positions)


def merge(parts, lses, positions, *, out_dtype=jnp.float32):
    found = merge_splits(
        jnp.asarray(parts), jnp.asarray(lses), jnp.asarray(positions), jnp.int32(len(positions)),
        kv_split=KV_SPLIT, window=None, head_dim=LINE, out_dtype=out_dtype,
    )  # fmt: skip
    return [np.asarray(x).view(np.uint32) for x in found]


def test_the_number_of_ranges_of_a_program_changes_no_bit():
    parts, lses, positions = operands(tokens=64)
    o, lse = merge(parts, lses, positions)
    for splits in range(1, MOST):
        seen = np.flatnonzero(positions < splits * KV_SPLIT)
        few = merge(parts[:splits, seen], lses[:splits, seen], positions[seen])
        assert (few[0] == o[seen]).all() and (few[1] == lse[seen]).all(), splits
    # Control: the ranges in another order.
    whole = np.flatnonzero(positions >= (MOST - 1) * KV_SPLIT)
    turned = merge(parts[::-1, whole], lses[::-1, whole], positions[whole])
    assert (turned[0] != o[whole]).any()


def test_the_merge_is_right():
    parts, lses, positions = operands(tokens=64)
    o, lse = (x.view(np.float32) for x in merge(parts, lses, positions))
    for token, position in enumerate(positions):
        n = position // KV_SPLIT + 1
        exact = lses[:n, token].astype(np.float64)
        weights = np.exp(exact - exact.max(0))
        terms = weights[..., None] * parts[:n, token]
        error = np.abs(o[token] - terms.sum(0) / weights.sum(0)[..., None])
        assert (error <= 2e-6 * np.abs(terms).max(0)).all()
        assert np.abs(lse[token] - (exact.max(0) + np.log(weights.sum(0)))).max() < 1e-5
