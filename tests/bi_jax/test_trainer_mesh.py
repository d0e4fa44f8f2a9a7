"""A trainer on a mesh has the numbers of one device, which are those of an engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import EngineConfig, SamplingParams
from bi_jax.audit_program import audit
from bi_jax.engine import Engine
from bi_jax.models.config import TP_INVARIANT
from bi_jax.models.transformer import build_transformer
from bi_jax.sharding import make_mesh
from bi_jax.testing import assert_same_bits, bit_difference
from bi_jax.trainer_logprobs import token_logprobs
from bi_jax.trainer_mesh import RowMesh
from tests.bi_jax import small_trainer as small

LENGTHS = ((3, 40), (20, 12), (1, 1), (17, 9), (30, 9), (5, 20), (25, 6), (2, 11))
LENGTH = 48
CONFIG = small.CONFIG.replace(topology=TP_INVARIANT, sliding_window=None, num_layers=1)


@functools.cache
def model():
    return build_transformer(CONFIG, small.parameters(CONFIG))


@functools.cache
def batch():
    """Eight ragged completions of an engine on one device."""
    config = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=16, token_buckets=(16,), page_size=32,
        num_pages=32, max_model_len=64,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length, _ in LENGTHS]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=new, ignore_eos=True)
        for i, (_, new) in enumerate(LENGTHS)
    ]
    outputs = tuple(Engine(model(), config=config).generate(prompts, params))
    return small.batch_of(outputs, length=LENGTH)


def on_mesh(mesh):
    """(params, batch) -> (log-probabilities, gradients); and parameters in their shards."""
    graph, params, rest = nnx.split(model(), nnx.Param, ...)

    def step(params, tokens, mask, weights):
        def logprobs(params):
            merged = nnx.merge(graph, params, rest)
            return token_logprobs(merged, tokens, segment_ids=mask, mesh=mesh)

        out, pull = jax.vjp(logprobs, params)
        return out, pull(weights)[0]

    if mesh is not None:
        specs = RowMesh(mesh=mesh).specs(params)
        params = jax.device_put(
            params, jax.tree.map(lambda _, s: jax.NamedSharding(mesh, s), params, specs)
        )
    return jax.jit(step), params


def run(mesh, rows=None):
    step, params = on_mesh(mesh)
    part = batch() if rows is None else batch().rows(0, rows)
    out, gradients = step(params, part.tokens, part.mask, part.weights)
    return np.asarray(out), gradients


@functools.cache
def alone(rows=None):
    out, gradients = run(None, rows)
    return out, small.host(gradients)


def same(mesh, rows=None):
    out, gradients = run(mesh, rows)
    expected, expected_gradients = alone(rows)
    assert_same_bits(out, expected, context="log-probabilities")
    assert_same_bits(small.host(gradients), expected_gradients, context="gradients")
    return gradients


def test_fsdp_4_x_tp_2_has_the_bits_of_one_device_and_of_the_engine():
    mesh = make_mesh(fsdp=4, tp=2)
    gradients = same(mesh)
    at = batch().weights != 0
    assert_same_bits(alone()[0][at], batch().emitted[at])
    params = nnx.split(model(), nnx.Param, ...)[1]
    for leaf, spec in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(RowMesh(mesh=mesh).specs(params)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), leaf.ndim)
    cut = [leaf for leaf in jax.tree.leaves(gradients) if leaf.size > 500]
    assert cut and all(leaf.addressable_shards[0].data.size <= leaf.size // 4 for leaf in cut)


@pytest.mark.slow
def test_the_order_of_rows_shows():
    """The control: the tree over the rows of the global batch is part of the bits."""
    step, params = on_mesh(None)
    shuffled = [np.asarray(a)[[0, 4, 1, 5, 2, 6, 3, 7]] for a in batch()]
    _, gradients = step(params, shuffled[0], shuffled[1], shuffled[3])
    found = small.host(gradients)
    assert any(bit_difference(found[name], alone()[1][name]) for name in found)


@pytest.mark.slow
def test_nothing_is_added_across_devices_but_by_our_ops():
    step, params = on_mesh(make_mesh(fsdp=2, tp=2))
    small_part = [a[:4, :16] for a in batch()]
    report = audit(step, params, small_part[0], small_part[1], small_part[3])
    assert report.collectives["all-gather"] and report.collectives["all-to-all"]
    assert report.ours["bi_merge_gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("fsdp, tp", [(1, 2), (2, 1), (4, 1), (2, 4), (8, 1)])
def test_no_mesh_changes_a_bit(fsdp, tp):
    same(make_mesh(fsdp=fsdp, tp=tp))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5, 6])
def test_rows_that_do_not_divide(rows):
    same(make_mesh(fsdp=2, tp=2), rows)


def test_padding_is_a_power_of_two_for_each_device():
    four = RowMesh(mesh=make_mesh(fsdp=2, tp=2))
    assert [four.padded(n) for n in (1, 4, 5, 8, 9, 17)] == [4, 4, 8, 8, 16, 32]
    assert jnp.dtype(CONFIG.dtype) == jnp.float32
