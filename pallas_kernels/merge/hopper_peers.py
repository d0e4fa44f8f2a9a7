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
    SHARE_ROUNDS,
    SHARES,
    SLOT,
    THREADS,
    WORDS,
    PeerSchedule,
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
        ex, plan = self.ex, self.plan
        share = SHARE_ROUNDS * SLOT // 4
        slot = ex.slot(ex.layout.shares, None, SHARE_ROUNDS)
        sums_slot = ex.slot(ex.layout.sums, None, SHARE_ROUNDS)
        mine = ex.of_rank(slot, ex.me, SHARE_ROUNDS)
        my_sums = ex.of_rank(sums_slot, ex.me, SHARE_ROUNDS)
        chunks = -(-plan.elements // (plan.ranks * share))
        ends = (utils.c(size, ex.i32) for size in (chunks, plan.schedule.ctas))
        loop = scf.ForOp(ex.cta, *ends, [ex.count()])
        with ir.InsertionPoint(loop.body):
            chunk = ex.times(loop.induction_variable, plan.ranks * share)
            count = ex.next(loop.inner_iter_args[0])
            places = {
                (rank, i): self._element(ex.plus(chunk, rank * share + i * THREADS * 4), 4)
                for rank in ex.ranks
                for i in range(SHARE_ROUNDS)
            }
            held = {key: self._take(element, 4) for key, element in places.items()}
            for (rank, i), words in held.items():
                ex.store(arith.addi(ex.bases[rank], mine), words, at=i * SLOT)
            ex.meet(count)
            terms = self._all_of(slot, places, 4)
            for i in range(SHARE_ROUNDS):
                words = ex.rounded(ex.merged([terms[rank, i] for rank in ex.ranks]))
                for base in ex.bases:
                    ex.store(arith.addi(base, my_sums), words, at=i * SLOT)
            count = ex.next(count)
            ex.meet(count)
            width = jnp.dtype(plan.out_dtype).itemsize  # words of 4 numbers
            for key, words in self._all_of(sums_slot, places, width).items():
                self._put(places[key], words)
            scf.yield_([count])
        # Every thread has met others since it read the count.
        ex.remember(loop.results[0])

    def _all_of(self, slot: Any, places: Any, words: int) -> dict[Any, list[Any]]:
        """What the ranks put into this rank's slots; all loads before the first use."""
        ex = self.ex
        here = arith.addi(ex.own, slot)
        return {
            (rank, i): ex.load(here, words, at=(rank * SHARE_ROUNDS + i) * SLOT)
            for rank, i in places
        }


@functools.partial(jax.jit, static_argnames=("out_dtype", "topology", "form"))
def merge_peers_hopper(
    x: jax.Array,
    table: jax.Array,
    *,
    out_dtype: str,
    topology: MergeTopology,
    form: str | None = None,
) -> jax.Array:
    """x float32 [...], this rank's term -> [...] of out_dtype, the same on every rank.

    Args:
      x: a multiple of 4 elements.
      table: uint32 [ranks + 1, 2], see `Exchange`.
      out_dtype, topology: as for `merge_hopper`.
      form: of the exchange, see `PeerSchedule`; None: by size.

    Invariance: element by element, of the ranks' terms in their order; the schedule changes no bit.
    """
    ranks = table.shape[0] - 1
    plan = _Plan(
        elements=x.size,
        ranks=ranks,
        out_dtype=out_dtype,
        topology=topology,
        schedule=pick_peer_schedule(elements=x.size, ranks=ranks, form=form),
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
