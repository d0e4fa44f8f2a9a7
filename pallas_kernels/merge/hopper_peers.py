"""The sum over the cards of one host by one kernel, in which cards write into each other's memory.

    out[e] = round(sum over ranks r of x_r[e])        in the order of the topology, float32

Numbers go over NVLink as plain stores into the peers' workspaces (`peer_layout`), never by multicast,
and whoever added them reads them from memory of its own. Every rank adds all elements of a small
message itself ("words", "terms"); of a large one it adds a share and hands the sums out ("shares").

Nothing of this is known to the runtime: it launches one kernel as any other, without the rendezvous
of all hosts' threads and the barrier kernel that go before each call of a kernel with remote refs.
So every card must run the same calls in the same order, as the ranks of one program do, and a
program must hold a collective of the compiler's own, whose rendezvous has every kernel loaded
before one of them waits. A wait without end is ended by a trap, about a minute later.

Grid: (CTA). A CTA exchanges with those of its index, so no CTA waits for another of its own card.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import gpu, llvm
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector

from .peer_layout import (
    CONTROL,
    COUNT_AT,
    SHARE_ROUNDS,
    SHARES,
    SLOT,
    TERMS,
    TERMS_ROUNDS,
    THREADS,
    WORDS,
    WORDS_ROUNDS,
    PeerLayout,
    PeerSchedule,
    pick_peer_schedule,
)
from .topology import MergeTopology, merged

PATIENCE = 1 << 28  # looks at a flag before the kernel gives up


def _body(x_gmem, table_gmem, out_gmem, *, plan: "_Plan"):
    refs = (plgpu.RefType(),) * 3

    @plgpu.inline_mgpu(arg_types=refs)
    def exchange(_, x, table, out):
        emit = _Emitter(plan, x, table, out)
        {WORDS: emit.words, TERMS: emit.terms, SHARES: emit.shares}[plan.schedule.form]()

    exchange(x_gmem, table_gmem, out_gmem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    elements: int
    ranks: int
    out_dtype: str
    topology: MergeTopology
    schedule: PeerSchedule

    @property
    def layout(self) -> PeerLayout:
        return PeerLayout(ranks=self.ranks)


class _Emitter:
    """Writes the kernel's body for one thread; all addresses are 64-bit integers.

    Everything that touches memory is inline PTX with side effects, which nobody reorders.
    """

    def __init__(self, plan: _Plan, x: Any, table: Any, out: Any) -> None:
        self.plan, self.layout = plan, plan.layout
        self.i32 = ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        self.f32 = ir.F32Type.get()
        self.x, self.out = self._address_of(x), self._address_of(out)
        self.table = table
        self.thread = utils.thread_idx()
        self.cta = arith.index_cast(self.i32, gpu.block_id(gpu.Dimension.x))
        self.bases = [self._base(self._index(rank)) for rank in range(plan.ranks)]
        self.me = memref.load(table, [self._index(plan.ranks), self._index(0)])
        self.own = self._base(arith.index_cast(ir.IndexType.get(), self.me))
        self.control = self._wide(self._times(self.cta, CONTROL))
        self.count_at = self._add(self._add(self.own, self.control), self._c64(COUNT_AT))

    # Integers.

    def _c(self, value: int) -> Any:
        return utils.c(value, self.i32)

    def _c64(self, value: int) -> Any:
        return utils.c(value, self.i64)

    def _index(self, value: int) -> Any:
        return utils.c(value, ir.IndexType.get())

    def _times(self, value: Any, factor: int) -> Any:
        return arith.muli(value, utils.c(factor, value.type))

    def _add(self, a: Any, b: Any) -> Any:
        return arith.addi(a, b)

    def _wide(self, value: Any) -> Any:
        return arith.extui(self.i64, value)

    def _address_of(self, ref: Any) -> Any:
        return llvm.ptrtoint(self.i64, utils.memref_ptr(ref))

    def _base(self, row: Any) -> Any:
        """The address of a rank's workspace, from the table."""
        low, high = (memref.load(self.table, [row, self._index(half)]) for half in range(2))
        shifted = arith.shli(self._wide(high), self._c64(32))
        return arith.ori(self._wide(low), shifted)

    # Memory.

    def _load(self, address: Any, count: int, kind: str = "global") -> list[Any]:
        if count == 1:
            ptx = f"ld.{kind}.b32 $0, [$1];"
            return [utils.inline_ptx(ptx, address, result_types=self.i32, has_side_effects=True)]
        names = ", ".join(f"${i}" for i in range(count))
        ptx = f"ld.{kind}.v{count}.b32 {{{names}}}, [${count}];"
        types = [self.i32] * count
        return list(utils.inline_ptx(ptx, address, result_types=types, has_side_effects=True))

    def _store(self, address: Any, words: list[Any], kind: str = "global") -> None:
        if len(words) == 1:
            utils.inline_ptx(f"st.{kind}.b32 [$0], $1;", address, words[0], has_side_effects=True)
            return
        names = ", ".join(f"${i + 1}" for i in range(len(words)))
        ptx = f"st.{kind}.v{len(words)}.b32 [$0], {{{names}}};"
        utils.inline_ptx(ptx, address, *words, has_side_effects=True)

    # Counts of exchanges, flags.

    def _count(self) -> Any:
        """How many exchanges this CTA had before."""
        return self._load(self.count_at, 1)[0]

    def _next(self, count: Any) -> Any:
        """One more; never 0, which is what unwritten memory holds."""
        more = self._add(count, self._c(1))
        return arith.select(arith.cmpi(arith.CmpIPredicate.eq, more, self._c(0)), self._c(2), more)

    def _remember(self, count: Any) -> None:
        """After a barrier behind every thread's `_count`."""
        first = arith.cmpi(arith.CmpIPredicate.eq, self.thread, self._c(0))
        utils.inline_ptx(
            "st.global.b32 [$0], $1;", self.count_at, count, predicate=first, has_side_effects=True
        )

    def _meet(self, count: Any) -> None:
        """Every thread's stores to the peers are seen by them, and theirs by every thread here."""
        utils.warpgroup_barrier()
        mine = arith.cmpi(arith.CmpIPredicate.ult, self.thread, self._c(self.plan.ranks))
        branch = scf.IfOp(mine)
        with ir.InsertionPoint(branch.then_block):
            peer = self._base(arith.index_cast(ir.IndexType.get(), self.thread))
            there = self._add(self._add(peer, self.control), self._wide(self._times(self.me, 4)))
            self._store(there, [count], "release.sys.global")
            here = self._wide(self._times(self.thread, 4))
            here = self._add(self._add(self.own, self.control), here)
            utils.inline_ptx(
                _until("ld.acquire.sys.global.b32 v, [$0]; sub.s32 v, v, $1; setp.lt.s32 p, v, 0;"),
                here,
                count,
                has_side_effects=True,
            )
            scf.yield_([])
        utils.warpgroup_barrier()

    # Slots.

    def _slot(self, area: int, half: Any, rounds: int) -> Any:
        """Offset of (this CTA, half, rank 0, round 0, this thread); half None: there is one."""
        place = self.cta if half is None else self._add(self._times(self.cta, 2), half)
        place = self._times(self._wide(place), self.plan.ranks * rounds * SLOT)
        place = self._add(place, self._wide(self._times(self.thread, 16)))
        return self._add(place, self._c64(area))

    def _of_rank(self, slot: Any, rank: Any, rounds: int) -> Any:
        if isinstance(rank, int):
            return self._add(slot, self._c64(rank * rounds * SLOT))
        return self._add(slot, self._wide(self._times(rank, rounds * SLOT)))

    def _element(self, first: Any, vec: int) -> Any:
        """The thread's elements of a tile; those behind the end are the last ones once more."""
        at = self._add(first, self._times(self.thread, vec))
        return arith.minui(at, self._c(self.plan.elements - vec))

    def _of_x(self, element: Any) -> Any:
        return self._add(self.x, self._times(self._wide(element), 4))

    # Numbers.

    def _merged(self, terms: list[list[Any]]) -> list[Any]:
        """Words of the ranks' float32 terms -> the sums in float32."""
        count = len(terms[0])
        as_float = [[arith.bitcast(self.f32, word) for word in words] for words in terms]
        return [
            merged([words[i] for words in as_float], self.plan.topology, arith.addf)
            for i in range(count)
        ]

    def _rounded(self, sums: list[Any]) -> list[Any]:
        """float32 -> words of out_dtype."""
        if self.plan.out_dtype == "float32":
            return [arith.bitcast(self.i32, value) for value in sums]
        narrow = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}[self.plan.out_dtype].get()
        pair, wide = ir.VectorType.get((2,), narrow), ir.VectorType.get((2,), self.f32)
        words = []
        for low, high in zip(sums[::2], sums[1::2], strict=True):
            two = arith.truncf(pair, vector.from_elements(wide, [low, high]))
            words.append(utils.bitcast(two, self.i32))
        return words

    def _put(self, element: Any, words: list[Any]) -> None:
        width = jnp.dtype(self.plan.out_dtype).itemsize
        self._store(self._add(self.out, self._times(self._wide(element), width)), words)

    # The three forms.

    def words(self) -> None:
        count = self._next(self._count())
        half = arith.andi(count, self._c(1))
        slot = self._slot(self.layout.words, half, WORDS_ROUNDS)
        mine = self._of_rank(slot, self.me, WORDS_ROUNDS)
        there = [self._add(base, mine) for base in self.bases]
        here = self._add(self.own, slot)
        tiles = self._tiles(2)
        held = [self._load(self._of_x(element), 2) for element in tiles]
        for i, (low, high) in enumerate(held):
            for base in there:
                at = self._add(base, self._c64(i * SLOT))
                self._store(at, [low, count, high, count], "volatile.global")
        for i, element in enumerate(tiles):
            from_here = self._add(here, self._c64(i * SLOT))
            ranks = range(self.plan.ranks)
            at = [self._of_rank(from_here, rank, WORDS_ROUNDS) for rank in ranks]
            self._put(element, self._rounded(self._merged(self._flagged(at, count))))
        utils.warpgroup_barrier()
        self._remember(count)

    def _flagged(self, at: list[Any], count: Any) -> list[list[Any]]:
        """Two words from each address, as soon as the flags beside them are `count`."""
        n = len(at)
        looks = ["mov.pred p, 0;"]
        for i in range(n):
            looks.append(
                f"ld.volatile.global.v4.b32 {{${2 * i}, v, ${2 * i + 1}, w}}, [${2 * n + i}];"
                f" setp.ne.or.b32 p, v, ${3 * n}, p; setp.ne.or.b32 p, w, ${3 * n}, p;"
            )
        types = [self.i32] * (2 * n)
        ptx = _until(" ".join(looks))
        found = utils.inline_ptx(ptx, *at, count, result_types=types, has_side_effects=True)
        return [list(found[2 * i : 2 * i + 2]) for i in range(n)]

    def _tiles(self, vec: int) -> list[Any]:
        """This thread's elements, round by round."""
        schedule = self.plan.schedule
        step = THREADS * vec
        return [
            self._element(self._times(self._add(self.cta, self._c(i * schedule.ctas)), step), vec)
            for i in range(schedule.rounds)
        ]

    def terms(self) -> None:
        count = self._next(self._count())
        half = arith.andi(count, self._c(1))
        slot = self._slot(self.layout.terms, half, TERMS_ROUNDS)
        mine = self._of_rank(slot, self.me, TERMS_ROUNDS)
        there = [self._add(base, mine) for base in self.bases]
        here = self._add(self.own, slot)
        tiles = self._tiles(4)
        held = [self._load(self._of_x(element), 4) for element in tiles]
        for i, words in enumerate(held):
            for base in there:
                self._store(self._add(base, self._c64(i * SLOT)), words)
        self._meet(count)
        self._remember(count)
        for i, element in enumerate(tiles):
            from_here = self._add(here, self._c64(i * SLOT))
            ranks = range(self.plan.ranks)
            at = [self._of_rank(from_here, rank, TERMS_ROUNDS) for rank in ranks]
            self._put(element, self._rounded(self._merged([self._load(a, 4) for a in at])))

    def shares(self) -> None:
        plan, ranks = self.plan, range(self.plan.ranks)
        share = SHARE_ROUNDS * SLOT // 4
        slot = self._slot(self.layout.shares, None, SHARE_ROUNDS)
        sums_slot = self._slot(self.layout.sums, None, SHARE_ROUNDS)
        mine = self._of_rank(slot, self.me, SHARE_ROUNDS)
        my_sums = self._of_rank(sums_slot, self.me, SHARE_ROUNDS)
        chunks = -(-plan.elements // (plan.ranks * share))
        loop = scf.ForOp(self.cta, self._c(chunks), self._c(plan.schedule.ctas), [self._count()])
        with ir.InsertionPoint(loop.body):
            chunk = self._times(loop.induction_variable, plan.ranks * share)
            count = self._next(loop.inner_iter_args[0])
            places = {
                (rank, i): self._element(
                    self._add(chunk, self._c(rank * share + i * THREADS * 4)), 4
                )
                for rank in ranks
                for i in range(SHARE_ROUNDS)
            }
            held = {key: self._load(self._of_x(at), 4) for key, at in places.items()}
            for (rank, i), words in held.items():
                at = self._add(self.bases[rank], mine)
                self._store(self._add(at, self._c64(i * SLOT)), words)
            self._meet(count)
            here = self._add(self.own, slot)
            at = {
                (rank, i): self._of_rank(self._add(here, self._c64(i * SLOT)), rank, SHARE_ROUNDS)
                for rank in ranks
                for i in range(SHARE_ROUNDS)
            }
            terms = {key: self._load(where, 4) for key, where in at.items()}
            for i in range(SHARE_ROUNDS):
                words = self._rounded(self._merged([terms[rank, i] for rank in ranks]))
                for base in self.bases:
                    there = self._add(self._add(base, my_sums), self._c64(i * SLOT))
                    self._store(there, words)
            count = self._next(count)
            self._meet(count)
            here = self._add(self.own, sums_slot)
            width = 4 * jnp.dtype(plan.out_dtype).itemsize // 4
            found = {}
            for rank, i in places:
                where = self._of_rank(self._add(here, self._c64(i * SLOT)), rank, SHARE_ROUNDS)
                found[rank, i] = self._load(where, width)
            for key, words in found.items():
                self._put(places[key], words)
            scf.yield_([count])
        # Every thread has met others since it read the count.
        self._remember(loop.results[0])


def _until(looks: str) -> str:
    """PTX that looks again while `p` is set, and gives up after PATIENCE looks."""
    # A label is seen in its braces only.
    return (
        "{ .reg .pred p, q; .reg .b32 v, w, n; mov.b32 n, 0; AGAIN: "
        f"{looks} add.u32 n, n, 1; setp.gt.u32 q, n, {PATIENCE}; @q trap; @p bra AGAIN; }}"
    )


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
      table: uint32 [ranks + 1, 2]: the low and high half of the address of each rank's workspace,
        and in the last row this rank's number.
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
    )
    return kernel(x.reshape(-1), table).reshape(x.shape)


def merge_peers_op(
    x: jax.Array, table: jax.Array, *, out_dtype: str, topology: MergeTopology
) -> tuple[jax.Array]:
    """`merge_peers_hopper` as an implementation of the primitive."""
    return (merge_peers_hopper(x, table, out_dtype=out_dtype, topology=topology),)
