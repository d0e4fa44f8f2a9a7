"""The ops that see cut weights: every degree against the whole weights, byte by byte."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bi_jax import collectives
from bi_jax.models.config import TP_INVARIANT, TransformerConfig
from bi_jax.models.parallel_layout import ParallelLayout
from bi_jax.ops import transformer_ops
from bi_jax.pallas_kernels.attention import attention
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.sharding import Placer, make_mesh
from bi_jax.testing import assert_same_bits
from tests.bi_jax import parallel_models

ROWS = 5
OUT = "layers.0.attention.out.weight"
DOWN = "layers.0.mlp.down.weight"
SHORT_AND_LONG = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def spread(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-10, 11, shape))
    return values.astype(DTYPES[dtype])


@functools.cache
def operands(config: TransformerConfig) -> dict[str, np.ndarray]:
    shapes = {
        "mixed": (ROWS, config.num_query_heads, config.head_dim),
        "hidden": (ROWS, config.intermediate_size),
        OUT: (config.hidden_size, config.query_size),
        DOWN: (config.hidden_size, config.intermediate_size),
    }
    found = enumerate(shapes.items())
    return {name: spread(shape, config.dtype, seed) for seed, (name, shape) in found}


def products(config: TransformerConfig, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """The out and the down product with laid-out weights over `degree` devices."""
    layout = ParallelLayout(config=config, degree=degree)
    placer = Placer(layout, make_mesh(tp=degree))
    ops = transformer_ops(config, backend="reference", layout=layout)
    arrays = operands(config)
    # As a rank's attention and gate_up leave them: in its slots and its segments.
    kv, inner = np.divmod(layout.qkv_table[..., :-2], config.queries_per_kv + 2)
    query = np.where(layout.qkv_table[..., :-2] < 0, -1, kv * config.queries_per_kv + inner)
    nonsense = np.full((ROWS, 1, config.head_dim), 77.0, arrays["mixed"].dtype)
    mixed = np.concatenate([arrays["mixed"], nonsense], axis=1)[:, query]
    mixed = mixed.reshape(ROWS, -1, layout.group, config.head_dim)
    gate = np.concatenate([arrays["hidden"][None]] * 2)
    hidden = layout.lay_out("layers.0.mlp.gate_up.weight", gate.transpose(0, 2, 1))[0].T

    def run(mixed: Any, hidden: Any, out: Any, down: Any) -> Any:
        rows = jnp.int32(ROWS)
        return (
            ops.out_product(mixed, out, num_rows=rows),
            ops.down_product(hidden, down, num_rows=rows),
        )

    specs = (P(None, "tp"), P(None, "tp"), P("tp"), P("tp"))
    mapped = jax.jit(
        jax.shard_map(run, mesh=placer.mesh, in_specs=specs, out_specs=P(), check_vma=False)
    )
    weights = [placer.place(name, arrays[name]) for name in (OUT, DOWN)]
    out, down = mapped(mixed, hidden, *weights)
    return np.asarray(out), np.asarray(down)


def whole_products(config: TransformerConfig) -> tuple[np.ndarray, np.ndarray]:
    """The same with the checkpoint's weights on one device, as a trainer has them."""
    ops, arrays = transformer_ops(config, backend="reference"), operands(config)
    heads = (ROWS, config.num_kv_heads, config.queries_per_kv, config.head_dim)
    rows = jnp.int32(ROWS)

    @jax.jit
    def run(mixed: Any, hidden: Any, out: Any, down: Any) -> Any:
        return (
            ops.out_product(mixed.reshape(heads), out, num_rows=rows),
            ops.down_product(hidden, down, num_rows=rows),
        )

    out, down = run(arrays["mixed"], arrays["hidden"], arrays[OUT], arrays[DOWN])
    return np.asarray(out), np.asarray(down)


@pytest.mark.parametrize("dtype", SHORT_AND_LONG)
def test_every_degree_gives_the_bits_of_one_device(dtype: str):
    config = parallel_models.LLAMA.replace(dtype=dtype, topology=TP_INVARIANT)
    expected = whole_products(config)
    for degree in (1, 2, 4, 8):
        for ours, theirs, name in zip(
            products(config, degree), expected, ("out", "down"), strict=True
        ):
            assert_same_bits(ours, theirs, context=f"{name} product, {degree} ranks, {dtype}")


def test_the_operands_show_another_order(monkeypatch: pytest.MonkeyPatch):
    """Control: the default topology differs by degree, and a reversed rank order from itself."""
    config = parallel_models.LLAMA
    by_degree = [products(config, degree)[1] for degree in (2, 4, 8)]
    assert len({sums.tobytes() for sums in by_degree}) == 3
    own = collectives.ordered_sum

    def reverse(parts: jax.Array, **rest: Any) -> jax.Array:
        return own(parts[::-1], **rest)

    monkeypatch.setattr(collectives, "ordered_sum", reverse)
    assert_same_bits(products(config, 2)[1], by_degree[0], context="two terms commute")
    for degree, forwards in ((4, by_degree[1]), (8, by_degree[2])):
        changed = np.mean(products(config, degree)[1] != forwards)
        assert changed > 0.2, f"{degree} ranks: only {changed:.0%} of the sums show their order"


def test_the_embedding_copies_bits_and_logits_are_gathered():
    config = parallel_models.LLAMA
    layout = ParallelLayout(config=config, degree=8)
    placer = Placer(layout, make_mesh(tp=8))
    ops = transformer_ops(config, backend="reference", layout=layout)
    for dtype in DTYPES:
        table = spread((config.vocab_size, config.hidden_size), dtype, 3)
        table[7, :3] = np.array([-0.0, np.nan, -np.nan])
        tokens = np.array([7, 0, 330, 42, 48, 47, 330], np.int32)

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=placer.mesh, in_specs=(P("tp"), P()), out_specs=P(), check_vma=False
        )
        def look_up(table: Any, tokens: Any) -> Any:
            return ops.embed(table, tokens, num_rows=jnp.int32(7))

        placed = placer.place("embed.embedding", table)
        assert placed.addressable_shards[0].data.shape == (48, config.hidden_size)
        assert_same_bits(np.asarray(look_up(placed, tokens)), table[tokens], context=dtype)

    head = spread((config.vocab_size, config.hidden_size), "float32", 4)
    hidden = spread((ROWS, config.hidden_size), "float32", 5)
    single = transformer_ops(config, backend="reference")
    expected = jax.jit(lambda x, w: single.logits(x, w, num_rows=jnp.int32(ROWS)))(hidden, head)
    placed = placer.place("lm_head.weight", head)
    gathered = jax.jit(
        jax.shard_map(
            lambda x, w: ops.logits(x, w, num_rows=jnp.int32(ROWS)),
            mesh=placer.mesh,
            in_specs=(P(), P("tp")),
            out_specs=P(),
            check_vma=False,
        )
    )(hidden, placed)
    assert gathered.shape == (ROWS, config.vocab_size)
    assert_same_bits(np.asarray(gathered), np.asarray(expected), context="logits")


def test_parameters_on_a_trainers_mesh_come_to_the_engines():
    """Sharded over fsdp and tp by a trainer; laid out over other devices by the engine."""
    config = parallel_models.LLAMA
    layout = ParallelLayout(config=config, degree=2)
    trainer = make_mesh(fsdp=4, tp=2)
    placer = Placer(layout, make_mesh(tp=2, devices=jax.devices()[4:]))
    for name, spec in ((DOWN, P("fsdp", "tp")), (OUT, P(None, "fsdp"))):
        array = operands(config)[name]
        theirs = jax.device_put(array, NamedSharding(trainer, spec))
        placed = placer.place(name, theirs)
        assert {shard.device for shard in placed.addressable_shards} == set(jax.devices()[4:6])
        assert_same_bits(np.asarray(placed), layout.lay_out(name, array), context=name)
        assert_same_bits(layout.restore(name, np.asarray(placed)), array, context=name)


@pytest.mark.parametrize("dtype", SHORT_AND_LONG)
def test_attention_of_a_head_does_not_depend_on_its_company(dtype: str):
    """A rank's attention has fewer slots and other groups than one device's."""
    count, slots, group, width = 40, 3, 5, 16
    q = spread((count, slots, group, width), dtype, 6) * np.array(2.0**-8, DTYPES[dtype])
    pages = [spread((4, slots, 32, width), dtype, seed) for seed in (7, 8)]
    positions = np.arange(count, dtype=np.int32)
    batch = RaggedBatch(
        positions=jnp.asarray(positions),
        request=jnp.zeros(count, jnp.int32),
        query_start=jnp.array([0, count], jnp.int32),
        page_table=jnp.arange(4, dtype=jnp.int32)[None],
        num_tokens=jnp.int32(count),
    )

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, batch, backend="reference", scale=width**-0.5)[0]

    whole = np.asarray(run(q, *pages))
    for kept, heads in ((1, 3), (2, 1)):
        part = run(q[:, :kept, :heads], *(page[:, :kept] for page in pages))
        context = f"{kept} slots of {heads} heads, {dtype}"
        assert_same_bits(np.asarray(part), whole[:, :kept, :heads], context=context)
