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
from bi_jax.gradient_sum import sum_over
from bi_jax.models.config import DEFAULT_TOPOLOGY, TP_INVARIANT
from bi_jax.models.transformer import build_transformer
from bi_jax.sharding import make_mesh
from bi_jax.testing import assert_same_bits, bit_difference, operands
from bi_jax.trainer_logprobs import token_logprobs
from bi_jax.trainer_mesh import RowMesh, pad_rows
from tests.bi_jax import small_trainer as small

LENGTHS = ((3, 40), (20, 12), (1, 1), (17, 9), (30, 9), (5, 20), (25, 6), (2, 11))
LENGTH = 48
CONFIG = small.CONFIG.replace(sliding_window=None, num_layers=1)


@functools.cache
def model(topology):
    return build_transformer(CONFIG.replace(topology=topology), small.parameters(CONFIG))


@functools.cache
def batch(topology):
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
    outputs = tuple(Engine(model(topology), config=config).generate(prompts, params))
    return small.batch_of(outputs, length=LENGTH)


def on_mesh(topology, mesh):
    """(params, batch) -> (log-probabilities, gradients); and parameters in their shards."""
    graph, params, rest = nnx.split(model(topology), nnx.Param, ...)

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


def run(topology, mesh, rows=None):
    step, params = on_mesh(topology, mesh)
    part = batch(topology) if rows is None else batch(topology).rows(0, rows)
    out, gradients = step(params, part.tokens, part.mask, part.weights)
    return np.asarray(out), gradients


@functools.cache
def alone(topology, rows=None):
    out, gradients = run(topology, None, rows)
    return out, small.host(gradients)


def same(topology, mesh, rows=None):
    out, gradients = run(topology, mesh, rows)
    expected, expected_gradients = alone(topology, rows)
    assert_same_bits(out, expected, context="log-probabilities")
    assert_same_bits(small.host(gradients), expected_gradients, context="gradients")
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize("topology", [DEFAULT_TOPOLOGY, TP_INVARIANT])
def test_fsdp_4_x_tp_2_has_the_bits_of_one_device_and_of_the_engine(topology):
    mesh = make_mesh(fsdp=4, tp=2)
    gradients = same(topology, mesh)
    at = batch(topology).weights != 0
    assert_same_bits(alone(topology)[0][at], batch(topology).emitted[at])
    params = nnx.split(model(topology), nnx.Param, ...)[1]
    for leaf, spec in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(RowMesh(mesh=mesh).specs(params)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), leaf.ndim)
    cut = [leaf for leaf in jax.tree.leaves(gradients) if leaf.size > 500]
    assert cut and all(leaf.addressable_shards[0].data.size <= leaf.size // 4 for leaf in cut)


@pytest.mark.slow
def test_the_order_of_rows_shows():
    """The control: the tree over the rows of the global batch is part of the bits."""
    step, params = on_mesh(DEFAULT_TOPOLOGY, None)
    shuffled = [np.asarray(a)[[0, 4, 1, 5, 2, 6, 3, 7]] for a in batch(DEFAULT_TOPOLOGY)]
    _, gradients = step(params, shuffled[0], shuffled[1], shuffled[3])
    found = small.host(gradients)
    expected = alone(DEFAULT_TOPOLOGY)[1]
    assert any(bit_difference(found[name], expected[name]) for name in found)


@pytest.mark.slow
def test_nothing_is_added_across_devices_but_by_our_ops():
    step, params = on_mesh(TP_INVARIANT, make_mesh(fsdp=2, tp=2))
    small_part = [a[:4, :16] for a in batch(TP_INVARIANT)]
    report = audit(step, params, small_part[0], small_part[1], small_part[3])
    assert report.collectives["all-gather"] and report.collectives["all-to-all"]
    assert report.ours["bi_merge_gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("fsdp, tp", [(1, 2), (2, 1), (4, 1), (2, 4), (8, 1)])
def test_no_mesh_changes_a_bit(fsdp, tp):
    same(TP_INVARIANT, make_mesh(fsdp=fsdp, tp=tp))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5, 6])
def test_rows_that_do_not_divide(rows):
    same(TP_INVARIANT, make_mesh(fsdp=2, tp=2), rows)


class Weights(nnx.Module):
    """Two parameters under names that the layout rules know."""

    def __init__(self):
        self.embed = nnx.Dict(embedding=nnx.Param(jnp.zeros((8, 12))))
        self.final_norm = nnx.Dict(scale=nnx.Param(jnp.zeros((12,))))


@pytest.mark.parametrize(
    "fsdp, tp, rows",
    [
        (2, 4, 8),
        (3, 2, 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2, 5), (4, 1, 8))),
    ],
)
def test_the_tree_over_rows_does_not_follow_the_mesh(fsdp, tp, rows):
    """Gradients that are given, so that only the sum over rows is tried."""
    given = {n: operands.spread((rows, *s), seed=3) for n, s in (("e", (8, 12)), ("s", (12,)))}
    _, params, rest = nnx.split(Weights(), nnx.Param, ...)

    def gradient(params, rest, rows):
        return sum_over(lambda row: jax.tree.unflatten(jax.tree.structure(params), row), rows)

    leaves = [given["e"], given["s"]]
    expected = jax.tree.leaves(gradient(params, rest, leaves))
    mesh = RowMesh(mesh=make_mesh(fsdp=fsdp, tp=tp))
    padded = [pad_rows(jnp.asarray(leaf), mesh.padded(rows)) for leaf in leaves]
    got = jax.jit(functools.partial(mesh.sum_rows, gradient))(params, rest, padded)
    assert_same_bits(jax.tree.leaves(got), expected)
    backwards = gradient(
        params, rest, [leaf[[*range(0, rows, 2), *range(1, rows, 2)]] for leaf in leaves]
    )
    assert bit_difference(jax.tree.leaves(backwards)[0], expected[0]) is not None


def test_padding_is_a_power_of_two_for_each_device():
    four = RowMesh(mesh=make_mesh(fsdp=2, tp=2))
    assert [four.padded(n) for n in (1, 4, 5, 8, 9, 17)] == [4, 4, 8, 8, 16, 32]
    assert jnp.dtype(CONFIG.dtype) == jnp.float32
