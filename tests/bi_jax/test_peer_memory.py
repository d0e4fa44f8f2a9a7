"""The peers' table that a program is given, and where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bi_jax import collectives, ops
from bi_jax.models.families.qwen3 import QWEN3_8B
from bi_jax.ops import transformer_ops
from bi_jax.peer_memory import peer_memory, peers_table
from bi_jax.row_products import Unsummed, layout_for
from bi_jax.sharding import make_mesh


def over_ranks(fn, *operands):
    mesh = make_mesh(tp=4)
    run = jax.shard_map(
        fn, mesh=mesh, in_specs=(P(),) * len(operands), out_specs=P("tp"), check_vma=False
    )
    return jax.jit(run), operands


def test_devices_of_a_cpu_have_none():
    assert peer_memory(make_mesh(tp=4), "tp") is None


def test_a_rank_finds_its_number_behind_the_addresses():
    addresses = np.arange(8, dtype=np.uint32).reshape(4, 2)
    run, operands = over_ranks(lambda a: peers_table(a, "tp")[None], addresses)
    for rank, table in enumerate(np.asarray(run(*operands))):
        np.testing.assert_array_equal(table[:4], addresses)
        np.testing.assert_array_equal(table[4], [rank, 0])


def test_sums_over_peers_move_nothing_by_collectives():
    def sums(x, addresses):
        table = peers_table(addresses, "tp")
        ordered = collectives.ordered_psum(x, "tp", backend="hopper", peers=table)
        return collectives.tree_psum(ordered[None], "tp", backend="hopper", peers=table)[None]

    x, addresses = jnp.zeros((3, 8)), np.zeros((4, 2), np.uint32)
    run, operands = over_ranks(sums, x, addresses)
    jaxpr = str(jax.make_jaxpr(run)(*operands))
    assert jaxpr.count("bi_merge_peers") == 2
    assert "all_gather" not in jaxpr and "all_to_all" not in jaxpr
    # What the kernel does not take goes the way of all sums.
    run, operands = over_ranks(sums, jnp.zeros((3, 1)), addresses)
    assert "bi_merge_peers" not in str(jax.make_jaxpr(run)(*operands))


@pytest.mark.parametrize("rows, fused", [(5, True), (132, True), (133, False)])
def test_row_products_sum_through_them_and_few_rows_in_the_norm(rows, fused):
    config = QWEN3_8B.replace(num_layers=1)
    layout = layout_for(config, degree=4, backend="hopper")

    def product(mixed, weight, residual, scale, addresses):
        made = transformer_ops(
            config, backend=ops.ON_HOPPER, layout=layout, peers=peers_table(addresses, "tp")
        )
        count = jnp.asarray(5)
        pending = made.out_product(mixed, weight, num_rows=count)
        assert isinstance(pending, Unsummed) == fused
        normed, stream = made.add_rms_norm(pending, residual, scale, eps=1e-6, num_rows=count)
        assert normed.shape == stream.shape == (rows, 4096)
        return normed

    mixed = jnp.zeros((rows, 2, 4, 128), jnp.bfloat16)
    weight = jnp.zeros((1, 4096, 1024), jnp.bfloat16)
    residual, scale = jnp.zeros((rows, 4096), jnp.bfloat16), jnp.zeros(4096, jnp.bfloat16)
    addresses = np.zeros((4, 2), np.uint32)
    run, operands = over_ranks(product, mixed, weight, residual, scale, addresses)
    jaxpr = str(jax.make_jaxpr(run)(*operands))
    assert jaxpr.count("bi_peer_add_rms_norm") == fused
    assert jaxpr.count("bi_merge_peers") == (not fused)
