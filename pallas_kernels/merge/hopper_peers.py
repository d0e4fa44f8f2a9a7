"""The sum over the cards of one host by one kernel, in which cards write into each other's memory.

    out[e] = round(sum over ranks r of x_r[e])        in the order of the topology, float32

Every rank adds all elements of a small message itself ("words", "terms"); of a large one it adds a
share and hands the sums out ("shares"). What a program must hold that calls it: `peer_exchange`.

Grid: (CTA). A CTA exchanges with those of its index, so no CTA waits for another of its own card.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from .peer_exchange import Exchange
from .peer_layout import (
    SHARES,
    SLOT,
    THREADS,
    WORDS,
    PeerSchedule,
    chunks_of,
    pick_peer_schedule,
)
from .topology import MergeTopology


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    elements: int
    ranks: int
    out_dtype: str
    topology: MergeTopology
    schedule: PeerSchedule


def _body(x_gmem, table_gmem, out_gmem, *, plan: _Plan):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def exchange(_, x, table, out):
        message = _Message(plan, x, table, out)
        if plan.schedule.form == SHARES:
            message.by_shares()
        else:
            message.in_one_shot()

    exchange(x_gmem, table_gmem, out_gmem)


class _Message:
    """The kernel's body for one thread."""

    def __init__(self, plan: _Plan, x: Any, table: Any, out: Any) -> None:
        self.plan = plan
        self.ex = Exchange(plan.ranks, plan.topology, plan.out_dtype, table)
        self.x, self.out = self.ex.address_of(x), self.ex.address_of(out)

    def _element(self, first: Any, vec: int) -> Any:
        """The thread's elements of a tile; those behind the end are the last ones once more."""
        at = arith.addi(first, self.ex.times(self.ex.thread, vec))
        return arith.minui(at, utils.c(self.plan.elements - vec, at.type))

    def _take(self, element: Any, vec: int) -> list[Any]:
        return self.ex.load(arith.addi(self.x, self.ex.times(self.ex.wide(element), 4)), vec)

    def _put(self, element: Any, words: list[Any]) -> None:
        width = jnp.dtype(self.plan.out_dtype).itemsize
        self.ex.store(arith.addi(self.out, self.ex.times(self.ex.wide(element), width)), words)

    def in_one_shot(self) -> None:
        ex, schedule = self.ex, self.plan.schedule
        vec, through = (2, ex.words) if schedule.form == WORDS else (4, ex.terms)
        tiles = [
            self._element(ex.times(ex.plus(ex.cta, i * schedule.ctas), THREADS * vec), vec)
            for i in range(schedule.rounds)
        ]
        sums = through([self._take(element, vec) for element in tiles])
        for element, values in zip(tiles, sums, strict=True):
            self._put(element, ex.rounded(values))

    def by_shares(self) -> None:
        """Of each chunk a rank gets its share from all, adds it, and sends the sums to all.

        The sums travel beside the next chunk's shares: CTAs meet once a chunk, and once more.
        """
        ex, plan = self.ex, self.plan
        chunks = chunks_of(plan.elements, ranks=plan.ranks, rounds=plan.schedule.rounds)
        peers = ex.turned()
        ends = (utils.c(size, ex.i32) for size in (chunks, plan.schedule.ctas))
        # The chunk before, and the count of exchanges.
        loop = scf.ForOp(ex.cta, *ends, [ex.cta, ex.count()])
        with ir.InsertionPoint(loop.body):
            chunk, (before, count) = loop.induction_variable, loop.inner_iter_args
            count = ex.next(count)
            self._send_terms(chunk, count, peers)
            ex.meet(count)
            self._send_sums(count, peers)
            later = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, chunk, ex.cta))
            with ir.InsertionPoint(later.then_block):
                self._take_sums(before, count)
                scf.yield_([])
            scf.yield_([chunk, count])
        last, count = loop.results
        count = ex.next(count)
        ex.meet(count)
        self._take_sums(last, count)
        # Every thread has met others since it read the count.
        ex.remember(count)

    def _place(self, chunk: Any, rank: Any, i: int) -> Any:
        """This thread's elements of round i of a rank's share."""
        ex, rounds = self.ex, self.plan.schedule.rounds
        share = ex.times(chunk, self.plan.ranks)
        share = ex.plus(share, rank) if isinstance(rank, int) else arith.addi(share, rank)
        return self._element(ex.times(ex.plus(ex.times(share, rounds), i), SLOT // 4), 4)

    def _send_terms(self, chunk: Any, count: Any, peers: Any) -> None:
        ex, rounds = self.ex, self.plan.schedule.rounds
        mine = ex.of_rank(ex.slot(ex.layout.shares, count, rounds), ex.me, rounds)
        # All loads before the first use.
        held = [
            (arith.addi(base, mine), i, self._take(self._place(chunk, rank, i), 4))
            for rank, base in peers
            for i in range(rounds)
        ]
        for address, i, words in held:
            ex.store(address, words, at=i * SLOT)

    def _send_sums(self, count: Any, peers: Any) -> None:
        ex, rounds = self.ex, self.plan.schedule.rounds
        slot = arith.addi(ex.own, ex.slot(ex.layout.shares, count, rounds))
        terms = [
            [ex.load(slot, 4, at=(rank * rounds + i) * SLOT) for rank in ex.ranks]
            for i in range(rounds)
        ]
        sums = [ex.rounded(ex.merged(each)) for each in terms]
        mine = ex.of_rank(self._sums_slot(count), ex.me, rounds)
        for _, base in peers:
            for i, words in enumerate(sums):
                ex.store(arith.addi(base, mine), words, at=i * SLOT)

    def _take_sums(self, chunk: Any, count: Any) -> None:
        """Those that all ranks sent before the exchange `count` and after the one before it."""
        ex, rounds = self.ex, self.plan.schedule.rounds
        slot = arith.addi(ex.own, self._sums_slot(self.ex.plus(count, 1)))
        found = [
            (rank, i, ex.load(slot, self._sum_words, at=(rank * rounds + i) * SLOT))
            for rank in ex.ranks
            for i in range(rounds)
        ]
        for rank, i, words in found:
            self._put(self._place(chunk, rank, i), words)

    def _sums_slot(self, count: Any) -> Any:
        rounds = self.plan.schedule.rounds
        return self.ex.slot(self.ex.layout.sums, count, rounds, words=self._sum_words)

    @property
    def _sum_words(self) -> int:
        return jnp.dtype(self.plan.out_dtype).itemsize  # words of 4 numbers


@functools.partial(jax.jit, static_argnames=("out_dtype", "topology", "schedule"))
def merge_peers_hopper(
    x: jax.Array,
    table: jax.Array,
    *,
    out_dtype: str,
    topology: MergeTopology,
    schedule: PeerSchedule | None = None,
) -> jax.Array:
    """x float32 [...], this rank's term -> [...] of out_dtype, the same on every rank.

    Args:
      x: a multiple of 4 elements.
      table: uint32 [ranks + 1, 2], see `Exchange`.
      out_dtype, topology: as for `merge_hopper`.
      schedule: None: by size.

    Invariance: element by element, of the ranks' terms in their order; the schedule changes no bit.
    """
    ranks = table.shape[0] - 1
    plan = _Plan(
        elements=x.size,
        ranks=ranks,
        out_dtype=out_dtype,
        topology=topology,
        schedule=schedule or pick_peer_schedule(elements=x.size, ranks=ranks),
    )
    kernel = plgpu.kernel(
        functools.partial(_body, plan=plan),
        out_type=jax.ShapeDtypeStruct((x.size,), jnp.dtype(out_dtype)),
        grid=(plan.schedule.ctas,),
        grid_names=("cta",),
        kernel_name="merge_peers",
    )
    return kernel(x.reshape(-1), table).reshape(x.shape)


def merge_peers_op(
    x: jax.Array, table: jax.Array, *, out_dtype: str, topology: MergeTopology
) -> tuple[jax.Array]:
    """`merge_peers_hopper` as an implementation of the primitive."""
    return (merge_peers_hopper(x, table, out_dtype=out_dtype, topology=topology),)
