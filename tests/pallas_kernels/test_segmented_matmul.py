"""Segments of K: the tree over the separate products, byte by byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.matmul import matmul, segmented_matmul
from bi_jax.pallas_kernels.merge import ordered_sum, tree_sum
from bi_jax.testing import assert_same_bits

SEGMENTS, WIDTH, DEPTH = 8, 24, 80


@functools.cache
def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)

    def spread(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape) * np.exp2(rng.integers(-10, 11, shape))
        return values.astype(np.float32)

    return spread(20, SEGMENTS * DEPTH), spread(SEGMENTS, WIDTH, DEPTH)


@functools.cache
def parts() -> jax.Array:
    x, w = operands()
    products = [
        matmul(
            jnp.asarray(x[:, s * DEPTH : (s + 1) * DEPTH]), jnp.asarray(w[s]), backend="reference"
        )
        for s in range(SEGMENTS)
    ]
    return jnp.stack(products)


def test_it_is_the_tree_over_the_products():
    x, w = operands()
    out = segmented_matmul(jnp.asarray(x), jnp.asarray(w), backend="reference")
    expected = np.asarray(tree_sum(parts(), backend="reference"))
    assert_same_bits(np.asarray(out), expected, context="8 segments")
    exact = np.einsum("msk,snk->mn", x.reshape(20, SEGMENTS, DEPTH).astype(np.float64), w)
    assert np.max(np.abs(out - exact)) < 1e-5 * np.max(np.abs(exact))
    # Control: another order of the same eight terms is seen.
    other = np.asarray(ordered_sum(parts(), backend="reference"))
    assert np.mean(other != expected) > 0.2


@pytest.mark.parametrize("ranks", [2, 4])
def test_neighbouring_segments_may_be_added_first(ranks: int):
    x, w = operands()
    each = SEGMENTS // ranks
    x_of = x.reshape(20, ranks, each * DEPTH)
    sums = [
        segmented_matmul(
            jnp.asarray(x_of[:, r]), jnp.asarray(w[r * each : (r + 1) * each]), backend="reference"
        )
        for r in range(ranks)
    ]
    whole = np.asarray(tree_sum(parts(), backend="reference"))
    merged = np.asarray(tree_sum(jnp.stack(sums), backend="reference"))
    assert_same_bits(merged, whole, context=f"{ranks} ranks")


def test_what_does_not_fit_is_refused():
    x, w = map(jnp.asarray, operands())
    with pytest.raises(ValueError, match="must hold a power of two of segments, got 3"):
        segmented_matmul(x[:, : 3 * DEPTH], w[:3], backend="reference")
    with pytest.raises(ValueError, match="x must have shape"):
        segmented_matmul(x[:, :DEPTH], w, backend="reference")
    with pytest.raises(ValueError, match="dtype"):
        segmented_matmul(x, w.astype(jnp.bfloat16), backend="reference")
