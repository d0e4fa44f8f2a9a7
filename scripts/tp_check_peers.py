"""Checks of the sums that go through the cards' own memory: order, sizes, races, and the norm."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tp_claims import Claim, NotHere, run_claim

from bi_jax import flags
from bi_jax.audit_program import audit_compiled
from bi_jax.pallas_kernels.merge import ordered_sum, peer_sum, tree_sum
from bi_jax.pallas_kernels.primitive import HOPPER
from bi_jax.pallas_kernels.rms_norm import add_rms_norm, peer_add_rms_norm
from bi_jax.peer_memory import PeerMemory, peer_memory, peers_table
from bi_jax.sharding import make_mesh
from bi_jax.testing import assert_same_bits, operands

WIDTH = 4096
KIB = 1024
# Around the sizes where the exchange changes its form (128 and 256 KiB), and some far above.
MESSAGE_KIB = (16, 112, 128, 144, 240, 256, 272, 1024, 2064, 16_384)
NORM_ROWS = (1, 8, 16, 17, 64, 132)
RUNS = 20
KINDS = (("float32", False), ("bfloat16", False), ("bfloat16", True))


def checks(degrees: Sequence[int], *, largest_kib: int) -> Iterator[Claim]:
    """Every claim on peer memory, at each degree above 1."""
    sizes = [kib for kib in MESSAGE_KIB if kib <= largest_kib]
    for ranks in degrees:
        if ranks == 1:
            continue
        name = f"{ranks} ranks, peer memory: "
        yield run_claim(
            f"{name}sums in rank order and by the tree, {sizes[0]} KiB to {sizes[-1]} KiB, one "
            f"after the other, {RUNS} times",
            functools.partial(_sums, ranks, sizes),
        )
        yield run_claim(
            f"{name}the norm of the sum is the sum and then the norm, {RUNS} times",
            functools.partial(_norms, ranks),
        )


def _cards(ranks: int) -> tuple[Mesh, PeerMemory]:
    mesh = make_mesh(tp=ranks)
    memory = peer_memory(mesh, "tp")
    if memory is None:
        raise NotHere("no peer memory on this platform")
    return mesh, memory


def _run(
    cards: tuple[Mesh, PeerMemory], body: Any, operand: dict[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """What each rank holds after `body(operand, table)`, of `RUNS` runs of one audited program."""
    mesh, memory = cards

    def on_rank(operand: Any, addresses: jax.Array) -> Any:
        mine = jax.tree.map(lambda x: x[0], operand)
        out = body(mine, peers_table(addresses, "tp"))
        # One collective of the compiler's own, as kernels over peers want it.
        out["started"] = lax.psum(addresses[0, 0], "tp")
        return jax.tree.map(lambda x: x[None], out)

    mapped = jax.shard_map(
        on_rank, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"), check_vma=False
    )
    options = flags.compiler_options(jax.default_backend())
    operand = jax.device_put(operand, NamedSharding(mesh, P("tp")))
    traced = jax.jit(mapped, compiler_options=options).trace(operand, memory.addresses)
    compiled = traced.lower().compile()
    audit_compiled(traced, compiled)
    for _ in range(RUNS):
        out = jax.device_get(compiled(operand, memory.addresses))
        yield [{name: value[rank] for name, value in out.items()} for rank in range(mesh.size)]


def _sums(ranks: int, sizes: Sequence[int]) -> str:
    cards, rng = _cards(ranks), np.random.default_rng(ranks)
    terms = {}
    for kib in sizes:
        few = operands.spread((ranks, 4, WIDTH), seed=kib)
        rows = kib * KIB // (4 * WIDTH)
        terms[f"{kib}"] = few[:, rng.integers(0, 4, rows)]

    def body(mine: Any, table: jax.Array) -> dict[str, Any]:
        # Each sum waits for the last, in one order on every rank.
        out, last = {}, jnp.zeros((), jnp.float32)
        for dtype, tree in KINDS:
            for name, x in mine.items():
                x, _ = lax.optimization_barrier((x, last))
                total = peer_sum(x, table, tree=tree, out_dtype=dtype, backend=HOPPER)
                out[f"{name} KiB, {dtype}, {'tree' if tree else 'in order'}"] = total
                last = lax.convert_element_type(total.reshape(-1)[0], jnp.float32)
        return out

    expected = {}
    for name, parts in terms.items():
        for dtype, tree in KINDS:
            order = "tree" if tree else "in order"
            adder = tree_sum if tree else ordered_sum
            with jax.default_device(jax.devices("cpu")[0]):
                total = adder(jnp.asarray(parts), out_dtype=dtype, backend="reference")
            expected[f"{name} KiB, {dtype}, {order}"] = np.asarray(total)
    for run, held in enumerate(_run(cards, body, terms)):
        for rank, out in enumerate(held):
            for name, total in expected.items():
                assert_same_bits(out[name], total, context=f"{name}, rank {rank}, run {run}")
    return f"{len(expected)} sums"


def _norms(ranks: int) -> str:
    cards, rng = _cards(ranks), np.random.default_rng(ranks)
    operand = {}
    for rows in NORM_ROWS:
        part = operands.spread((ranks, rows, WIDTH), seed=rows, powers=(-6, 6))
        stream = operands.spread((rows, WIDTH), "bfloat16", seed=rows + 1, powers=(-3, 3))
        operand[f"part {rows}"] = part
        operand[f"stream {rows}"] = np.broadcast_to(stream, (ranks, *stream.shape))
    scale = rng.standard_normal(WIDTH).astype(jnp.bfloat16)
    operand["scale"] = np.broadcast_to(scale, (ranks, WIDTH))

    def body(mine: Any, table: jax.Array) -> dict[str, Any]:
        out, last = {}, jnp.zeros((), jnp.bfloat16)
        for tree in (False, True):
            for rows in NORM_ROWS:
                part, stream, _ = lax.optimization_barrier(
                    (mine[f"part {rows}"], mine[f"stream {rows}"], last)
                )
                norm = dict(eps=1e-6, backend=HOPPER)
                one = peer_add_rms_norm(part, table, stream, mine["scale"], tree=tree, **norm)
                gathered = lax.all_gather(part, "tp")
                adder = tree_sum if tree else ordered_sum
                total = adder(gathered, out_dtype="bfloat16", backend=HOPPER)
                two = add_rms_norm(total, stream, mine["scale"], **norm)
                out[f"{rows} rows, {tree=}"] = jnp.stack([jnp.stack(one), jnp.stack(two)])
                last = one[0][0, 0]
        return out

    for run, held in enumerate(_run(cards, body, operand)):
        for rank, out in enumerate(held):
            del out["started"]
            for name, (one, two) in out.items():
                assert_same_bits(one, two, context=f"{name}, rank {rank}, run {run}")
                assert_same_bits(one, held[0][name][0], context=f"{name}, rank {rank} against 0")
    return f"{2 * len(NORM_ROWS)} norms"
