"""What kernels over peers are made of: addresses, slots, flags and counts, written in inline PTX.

Nothing of it is known to the runtime: it launches one kernel as any other, without the rendezvous
of all hosts' threads and the barrier kernel that go before each call of a kernel with remote refs.
So every card must run the same calls in the same order, as the ranks of one program do, and a
program must hold a collective of the compiler's own, whose rendezvous has every kernel loaded
before one of them waits. A wait without end is ended by a trap, minutes later.

Peers' memory is written by plain stores over NVLink, never by multicast; a CTA reads its own.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax._src.lib.mlir.dialects import gpu, llvm
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector

from .peer_layout import CONTROL, COUNT_AT, SLOT, TERMS_ROUNDS, WORDS_ROUNDS, PeerLayout
from .topology import MergeTopology, merged

PATIENCE = 1 << 28  # looks at a flag before the kernel gives up
LOOKS = 16  # loads in flight while words are waited for


class Exchange:
    """What one thread does, emitted step by step; addresses are 64-bit integers.

    Everything that touches memory is inline PTX with side effects, which nobody reorders.

    Args:
      ranks, topology, out_dtype: of the sum.
      table: uint32 [ranks + 1, 2] in global memory: the low and high half of the address of each
        rank's workspace, and in the last row this rank's number.
    """

    def __init__(self, ranks: int, topology: MergeTopology, out_dtype: str, table: Any) -> None:
        self.ranks, self.topology, self.out_dtype = range(ranks), topology, out_dtype
        self.layout = PeerLayout(ranks=ranks)
        self.i32 = ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        self.f32 = ir.F32Type.get()
        self.table = table
        self.thread = utils.thread_idx()
        self.cta = arith.index_cast(self.i32, gpu.block_id(gpu.Dimension.x))
        self.bases = [self._base(self._index(rank)) for rank in self.ranks]
        self.me = memref.load(table, [self._index(ranks), self._index(0)])
        self.own = self._base(arith.index_cast(ir.IndexType.get(), self.me))
        self.control = self.wide(self.times(self.cta, CONTROL))
        self.count_at = self.plus(arith.addi(self.own, self.control), COUNT_AT)

    # Integers.

    def times(self, value: Any, factor: int) -> Any:
        return arith.muli(value, utils.c(factor, value.type))

    def plus(self, value: Any, other: int) -> Any:
        return arith.addi(value, utils.c(other, value.type))

    def wide(self, value: Any) -> Any:
        """32 bits -> 64."""
        return arith.extui(self.i64, value)

    def address_of(self, ref: Any) -> Any:
        return llvm.ptrtoint(self.i64, utils.memref_ptr(ref))

    def turned(self) -> list[tuple[Any, Any]]:
        """Every rank's number and workspace, this rank's own last.

        Ranks that send to all begin with different ones, so no link is the first of all.
        """
        found, ranks = [], utils.c(len(self.ranks), self.i32)
        for away in [*self.ranks[1:], 0]:
            number = arith.remui(self.plus(self.me, away), ranks)
            base = self._base(arith.index_cast(ir.IndexType.get(), number))
            found.append((number, base))
        return found

    def _index(self, value: int) -> Any:
        return utils.c(value, ir.IndexType.get())

    def _base(self, row: Any) -> Any:
        """The address of a rank's workspace, from the table."""
        low, high = (memref.load(self.table, [row, self._index(half)]) for half in range(2))
        return arith.ori(self.wide(low), arith.shli(self.wide(high), utils.c(32, self.i64)))

    # Memory, in words of 32 bits, `at` bytes behind an address.

    def load(self, address: Any, count: int, *, at: int = 0) -> list[Any]:
        names = ", ".join(f"${i}" for i in range(count))
        ptx = f"ld.global.v{count}.b32 {{{names}}}, [${count}+{at}];"
        if count == 1:
            ptx = f"ld.global.b32 $0, [$1+{at}];"
        types = [self.i32] * count
        return list(utils.inline_ptx(ptx, address, result_types=types, has_side_effects=True))

    def store(
        self, address: Any, words: Sequence[Any], *, at: int = 0, kind: str = "global"
    ) -> None:
        names = ", ".join(f"${i + 1}" for i in range(len(words)))
        ptx = f"st.{kind}.v{len(words)}.b32 [$0+{at}], {{{names}}};"
        if len(words) == 1:
            ptx = f"st.{kind}.b32 [$0+{at}], $1;"
        utils.inline_ptx(ptx, address, *words, has_side_effects=True)

    # Counts of exchanges, and the meeting of CTAs.

    def count(self) -> Any:
        """How many exchanges this CTA had before."""
        return self.load(self.count_at, 1)[0]

    def next(self, count: Any) -> Any:
        """One more; never 0, which is what unwritten memory holds."""
        more, zero = self.plus(count, 1), utils.c(0, self.i32)
        return arith.select(
            arith.cmpi(arith.CmpIPredicate.eq, more, zero), utils.c(2, self.i32), more
        )

    def remember(self, count: Any) -> None:
        """After a barrier behind every thread's `count`."""
        first = arith.cmpi(arith.CmpIPredicate.eq, self.thread, utils.c(0, self.i32))
        utils.inline_ptx(
            "st.global.b32 [$0], $1;", self.count_at, count, predicate=first, has_side_effects=True
        )

    def meet(self, count: Any) -> None:
        """All threads' stores to the peers are seen by them, and theirs by all threads here."""
        utils.warpgroup_barrier()
        ranks = utils.c(len(self.ranks), self.i32)
        branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, self.thread, ranks))
        with ir.InsertionPoint(branch.then_block):
            peer = self._base(arith.index_cast(ir.IndexType.get(), self.thread))
            words = (self.times(rank, 4) for rank in (self.me, self.thread))
            mine, theirs = (arith.addi(self.control, self.wide(word)) for word in words)
            self.store(arith.addi(peer, mine), [count], kind="release.sys.global")
            looks = "ld.acquire.sys.global.b32 v, [$0]; sub.s32 v, v, $1; setp.lt.s32 p, v, 0;"
            here = arith.addi(self.own, theirs)
            utils.inline_ptx(_until(looks), here, count, has_side_effects=True)
            scf.yield_([])
        utils.warpgroup_barrier()

    # Slots.

    def slot(self, area: int, count: Any, rounds: int, *, words: int = 4) -> Any:
        """Offset of (this CTA, the count's half, rank 0, round 0, this thread's `words` words)."""
        half = arith.andi(count, utils.c(1, self.i32))
        place = arith.addi(self.times(self.cta, 2), half)
        place = self.times(self.wide(place), len(self.ranks) * rounds * SLOT)
        return self.plus(arith.addi(place, self.wide(self.times(self.thread, 4 * words))), area)

    def of_rank(self, slot: Any, rank: Any, rounds: int) -> Any:
        if isinstance(rank, int):
            return self.plus(slot, rank * rounds * SLOT)
        return arith.addi(slot, self.wide(self.times(rank, rounds * SLOT)))

    def _halves(self, area: int, count: Any, rounds: int) -> tuple[list[Any], list[Any]]:
        """Where this rank's numbers go, a rank each, and where the ranks' numbers come."""
        slot = self.slot(area, count, rounds)
        mine = self.of_rank(slot, self.me, rounds)
        here = arith.addi(self.own, slot)
        there = [arith.addi(base, mine) for base in self.bases]
        return there, [self.of_rank(here, rank, rounds) for rank in self.ranks]

    # Numbers.

    def merged(self, terms: Sequence[Sequence[Any]]) -> list[Any]:
        """Words of the ranks' float32 terms -> the sums in float32."""
        floats = [[arith.bitcast(self.f32, word) for word in words] for words in terms]
        return [merged(column, self.topology, arith.addf) for column in zip(*floats, strict=True)]

    def rounded(self, sums: Sequence[Any]) -> list[Any]:
        """float32 -> words of out_dtype."""
        if self.out_dtype == "float32":
            return [arith.bitcast(self.i32, value) for value in sums]
        narrow = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}[self.out_dtype].get()
        pair, wide = ir.VectorType.get((2,), narrow), ir.VectorType.get((2,), self.f32)
        words = []
        for low, high in zip(sums[::2], sums[1::2], strict=True):
            two = arith.truncf(pair, vector.from_elements(wide, [low, high]))
            words.append(utils.bitcast(two, self.i32))
        return words

    # The forms in which every rank adds all numbers.

    def words(self, held: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
        """Rounds of 2 words -> their sums; a number waits for its own flag and nothing else."""
        count = self.next(self.count())
        there, here = self._halves(self.layout.words, count, WORDS_ROUNDS)
        for i, (low, high) in enumerate(held):
            for base in there:
                words = [low, count, high, count]
                self.store(base, words, at=i * SLOT, kind="volatile.global")
        together = max(1, LOOKS // len(self.ranks))
        for i in range(0, len(held), together):
            rounds = range(i, min(i + together, len(held)))
            for terms in self._flagged(here, count, rounds):
                yield self.merged(terms)
        utils.warpgroup_barrier()
        self.remember(count)

    def terms(self, held: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
        """Rounds of 4 words -> their sums; CTAs meet once."""
        count = self.next(self.count())
        there, here = self._halves(self.layout.terms, count, TERMS_ROUNDS)
        for i, words in enumerate(held):
            for base in there:
                self.store(base, words, at=i * SLOT)
        self.meet(count)
        self.remember(count)
        for i in range(len(held)):
            yield self.merged([self.load(address, 4, at=i * SLOT) for address in here])

    def _flagged(
        self, addresses: Sequence[Any], count: Any, rounds: Sequence[int]
    ) -> list[list[list[Any]]]:
        """Each round's two words of each address, as soon as all flags beside them are `count`."""
        n = len(addresses)
        found = 2 * n * len(rounds)
        flag, looks = f"${found + n}", ["mov.pred p, 0;"]
        for k, i in enumerate(rounds):
            for rank in range(n):
                word, at = 2 * (k * n + rank), f"${found + rank}+{i * SLOT}"
                looks.append(f"ld.volatile.global.v4.b32 {{${word}, v, ${word + 1}, w}}, [{at}];")
                looks += [f"setp.ne.or.b32 p, {seen}, {flag}, p;" for seen in ("v", "w")]
        words = list(
            utils.inline_ptx(
                _until(" ".join(looks)),
                *addresses,
                count,
                result_types=[self.i32] * found,
                has_side_effects=True,
            )
        )
        pairs = [words[i : i + 2] for i in range(0, found, 2)]
        return [pairs[i : i + n] for i in range(0, len(pairs), n)]


def _until(looks: str) -> str:
    """PTX that looks again while `p` is set, and gives up after PATIENCE looks."""
    # A label is seen in its braces only.
    return (
        "{ .reg .pred p, q; .reg .b32 v, w, n; mov.b32 n, 0; AGAIN: "
        f"{looks} add.u32 n, n, 1; setp.gt.u32 q, n, {PATIENCE}; @q trap; @p bra AGAIN; }}"
    )
