"""On a card: products of sizes that no tile divides, and an engine with an odd vocabulary."""

import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax import Engine, EngineConfig, SamplingParams
from bi_jax.models.families.qwen3 import QWEN3_0_6B
from bi_jax.pallas_kernels.matmul import matmul, swiglu_matmul
from bi_jax.testing import assert_same_bits, operands
from tests.gpu.engine_ways import completion_digests, random_model, together

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1003, 77), (33, 500, 4096), (300, 151, 1000)])
def test_products(rows, n, k):
    x = jnp.asarray(operands.spread((rows, k), "bfloat16", powers=(-3, 3)))
    w = jnp.asarray(operands.spread((n, k), "bfloat16", seed=1, powers=(-3, 3)))
    whole = jnp.pad(w, ((0, -n % 64), (0, -k % 64)))
    more = jnp.pad(x, ((0, 0), (0, -k % 64)))
    found = matmul(x, w, out_dtype="float32", backend="hopper")
    assert_same_bits(found, matmul(more, whole, out_dtype="float32", backend="hopper")[:, :n])
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    assert np.all(np.abs(np.asarray(found) - exact) <= 2e-5 * scale)
    both, wholes = jnp.stack([w, -w]), jnp.stack([whole, -whole])
    found = swiglu_matmul(x, both, out_dtype="bfloat16", backend="hopper")
    expected = swiglu_matmul(more, wholes, out_dtype="bfloat16", backend="hopper")[:, :n]
    assert_same_bits(found, expected)


def test_an_odd_vocabulary():
    model = random_model(QWEN3_0_6B.replace(num_layers=2, max_position=1024, vocab_size=151_669))
    config = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_pages=40
    )
    engine = Engine(model, config=config)
    load = [
        (
            list(range(5, 5 + n)),
            SamplingParams(temperature=n % 2, seed=n, max_tokens=32, ignore_eos=True),
        )
        for n in (1, 9, 40)
    ]
    expected = completion_digests(together(engine, load))
    alone = [completion_digests(together(engine.rescheduled(), [one]))[0] for one in load]
    assert alone == expected
