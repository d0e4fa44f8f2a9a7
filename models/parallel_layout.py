"""Which part of every parameter lies on which rank: arithmetic on the host, no device in it.

    column-parallel   qkv over KV heads, gate_up over F, lm_head and embedding over V
    row-parallel      out and down: K is cut into segments, [D, K] becomes [S, D, Kseg]

Segments are cut at fixed places of the global K, i * n // S of its n heads (out) or steps of 16
columns (down). So a cut for 8 segments holds those for 4 and 2 among its own, and neighbouring
ranks get heads as evenly as whole heads allow. Shorter segments are filled up with zeros. A rank
holds the query heads of its segments, and a KV head wherever one of its query heads lies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .config import TP_INVARIANT, TransformerConfig

SEGMENTS = 8  # of the tp-invariant topology, at every degree
K_STEP = 16  # columns; a product never adds fewer at a time
ABSENT = -1  # in a table: zeros stand here

Shape = tuple[int, ...]


def segments_for(topology: str, degree: int) -> int:
    """S, the segments that row-parallel products are cut into."""
    return SEGMENTS if topology == TP_INVARIANT else degree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The layout of one model over `degree` ranks.

    Attributes:
      config: the model.
      degree: ranks, the size of the mesh axis "tp".
      k_multiple: segments are filled up to a multiple of this many columns; schedule.

    Raises:
      ValueError: the degree does not fit.
    """

    config: TransformerConfig
    degree: int
    k_multiple: int = K_STEP

    def __post_init__(self) -> None:
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 1:
            raise ValueError(
                f"tensor_parallel_size={self.degree!r} must be a positive whole number"
            )
        if self.segments % self.degree:
            raise ValueError(
                f"tensor_parallel_size={self.degree} must divide the {SEGMENTS} segments of the "
                f"topology {TP_INVARIANT!r}: 1, 2, 4 or 8"
            )

    @property
    def segments(self) -> int:
        """S, of the whole model."""
        return segments_for(self.config.topology, self.degree)

    @property
    def local_segments(self) -> int:
        """S of one rank."""
        return self.segments // self.degree

    @property
    def trivial(self) -> bool:
        """Whether every parameter lies as in the checkpoint."""
        return self.segments == 1

    @functools.cached_property
    def head_cuts(self) -> tuple[int, ...]:
        """S + 1 numbers: segment s holds the query heads from cut s up to cut s + 1."""
        return _cuts(self.config.num_query_heads, self.segments)

    @functools.cached_property
    def width_cuts(self) -> tuple[int, ...]:
        """S + 1 numbers: segment s holds the columns of F from cut s up to cut s + 1."""
        width = self.config.intermediate_size
        steps = _cuts(-(-width // K_STEP), self.segments)
        return tuple(min(step * K_STEP, width) for step in steps)

    @property
    def out_depth(self) -> int:
        """Kseg of the out projection."""
        return _round_up(_longest(self.head_cuts) * self.config.head_dim, self.k_multiple)

    @property
    def down_depth(self) -> int:
        """Kseg of the down projection."""
        return _round_up(_longest(self.width_cuts), self.k_multiple)

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary on one rank; those beyond V are zeros."""
        if self.degree == 1:
            return self.config.vocab_size
        return _round_up(-(-self.config.vocab_size // self.degree), K_STEP)

    @functools.cached_property
    def rank_heads(self) -> tuple[tuple[int, int], ...]:
        """The query heads of each rank, from the first up to the one after the last."""
        cuts = self.head_cuts[:: self.local_segments]
        return tuple(itertools.pairwise(cuts))

    @functools.cached_property
    def rank_kv_heads(self) -> tuple[range, ...]:
        """The KV heads of each rank; one that several ranks need is on all of them."""
        group = self.config.queries_per_kv
        return tuple(
            range(a // group, -(-b // group) if b > a else a // group) for a, b in self.rank_heads
        )

    @property
    def slots(self) -> int:
        """KV heads that every rank has room for."""
        return max(1, *(len(heads) for heads in self.rank_kv_heads))

    @property
    def cache_heads(self) -> int:
        """KV heads of all ranks together, those that several have counted each time."""
        return self.degree * self.slots

    @functools.cached_property
    def group(self) -> int:
        """Query heads that a slot has room for."""
        return max(
            1,
            *(
                len(self._queries(rank, kv))
                for rank, heads in enumerate(self.rank_kv_heads)
                for kv in heads
            ),
        )

    @functools.cached_property
    def qkv_table(self) -> np.ndarray:
        """int32 [degree, slots, group + 2]: row of the qkv weight seen as [Nkv * (G + 2), ...]."""
        config = self.config
        table = np.full((self.degree, self.slots, self.group + 2), ABSENT, np.int32)
        for rank, heads in enumerate(self.rank_kv_heads):
            for slot, kv in enumerate(heads):
                first = kv * (config.queries_per_kv + 2)
                queries = [first + q % config.queries_per_kv for q in self._queries(rank, kv)]
                table[rank, slot, : len(queries)] = queries
                table[rank, slot, -2:] = first + config.queries_per_kv + np.arange(2)
        return table

    @functools.cached_property
    def head_table(self) -> np.ndarray:
        """int32 [degree, segments of a rank, heads of a segment]: place among slots * group."""
        config, count = self.config, _longest(self.head_cuts)
        table = np.full((self.segments, count), ABSENT, np.int32)
        for segment in range(self.segments):
            heads = self.rank_kv_heads[segment // self.local_segments]
            for i, q in enumerate(range(*self.head_cuts[segment : segment + 2])):
                slot = q // config.queries_per_kv - heads.start
                place = self._queries(segment // self.local_segments, heads[slot]).index(q)
                table[segment, i] = slot * self.group + place
        return table.reshape(self.degree, self.local_segments, count)

    @property
    def heads_in_order(self) -> bool:
        """Whether every rank's heads lie in its slots as its segments want them, without gaps."""
        flat = self.head_table.reshape(self.degree, -1)
        whole = flat.shape[1] == self.slots * self.group
        return whole and bool((flat == np.arange(flat.shape[1])).all())

    def shapes(self, canonical: dict[str, Shape]) -> dict[str, Shape]:
        """Shapes of all parameters in this layout, over all ranks."""
        return {
            name: shape if self.trivial else self._shape(name, shape)
            for name, shape in canonical.items()
        }

    def sharded_axis(self, name: str) -> int | None:
        """The axis of a laid-out parameter that is cut over ranks; None: every rank has it all."""
        return None if self.trivial else _SHARDED_AXIS.get(_kind(name))

    def plain_axis(self, name: str) -> int | None:
        """The axis of a checkpoint's parameter whose equal parts are what the ranks hold.

        None: every rank has it all, or parts are unequal, overlap or have gaps.
        """
        kind = "" if self.trivial else _kind(name)
        if kind == "qkv":
            table, rows = self.qkv_table, self.config.num_kv_heads * (self.group + 2)
        elif kind == "vocab":
            table, rows = self._vocab(), self.config.vocab_size
        elif kind:
            table = self._columns("out" if kind == "out" else "down")
            rows = table.size if ABSENT not in table else 0
        else:
            return None
        plain = np.array_equal(table.reshape(-1), np.arange(rows))
        return {"out": 1, "down": 1}.get(kind, _SHARDED_AXIS[kind]) if plain else None

    def lay_out(self, name: str, array: Any, xp: Any = np) -> Any:
        """A parameter as checkpoints have it -> as the ranks have it; copies, adds nothing.

        Args:
          name: "layers.3.mlp.down.weight".
          array: of NumPy, or of JAX with `xp=jax.numpy`.
        """
        kind = "" if self.trivial else _kind(name)
        if kind == "qkv":
            rows = array.reshape(-1, *array.shape[2:])
            picked = _pick(rows, self.qkv_table.reshape(-1), 0, xp)
            return picked.reshape(-1, self.group + 2, *array.shape[2:])
        if kind in ("out", "down"):
            picked = _pick(array, self._columns(kind), 1, xp)
            return xp.moveaxis(picked.reshape(array.shape[0], self.segments, -1), 1, 0)
        if kind == "gate_up":
            return _pick(array, self._columns("down"), 1, xp)
        return _pick(array, self._vocab(), 0, xp) if kind == "vocab" else array

    def restore(self, name: str, array: Any, xp: Any = np) -> Any:
        """The inverse of `lay_out`."""
        config, kind = self.config, "" if self.trivial else _kind(name)
        if kind == "qkv":
            rows = array.reshape(-1, *array.shape[2:])
            table = _inverse(self.qkv_table, config.num_kv_heads * (config.queries_per_kv + 2))
            return _pick(rows, table, 0, xp).reshape(config.num_kv_heads, -1, *array.shape[2:])
        if kind in ("out", "down"):
            size = config.query_size if kind == "out" else config.intermediate_size
            wide = xp.moveaxis(array, 0, 1).reshape(array.shape[1], -1)
            return _pick(wide, _inverse(self._columns(kind), size), 1, xp)
        if kind == "gate_up":
            return _pick(array, _inverse(self._columns("down"), config.intermediate_size), 1, xp)
        return array[: config.vocab_size] if kind == "vocab" else array

    def _shape(self, name: str, shape: Shape) -> Shape:
        kind = _kind(name)
        if kind == "qkv":
            return (self.degree * self.slots, self.group + 2, *shape[2:])
        if kind in ("out", "down"):
            depth = self.out_depth if kind == "out" else self.down_depth
            return (self.segments, shape[0], depth)
        if kind == "gate_up":
            return (2, self.segments * self.down_depth, shape[2])
        return (self.degree * self.vocab_rows, *shape[1:]) if kind == "vocab" else shape

    def _queries(self, rank: int, kv: int) -> range:
        """The query heads of a rank that share a KV head."""
        group, (first, last) = self.config.queries_per_kv, self.rank_heads[rank]
        return range(max(first, kv * group), min(last, (kv + 1) * group))

    def _columns(self, kind: str) -> np.ndarray:
        """int32 [S * Kseg]: column of the checkpoint's weight."""
        if kind == "down":
            return _segment_table(self.width_cuts, self.down_depth)
        width = self.config.head_dim
        return _segment_table([cut * width for cut in self.head_cuts], self.out_depth)

    def _vocab(self) -> np.ndarray:
        return _segment_table((0, self.config.vocab_size), self.degree * self.vocab_rows)


_KINDS = {
    "embed.embedding": "vocab",
    "lm_head.weight": "vocab",
    "attention.qkv.weight": "qkv",
    "attention.qkv.bias": "qkv",
    "attention.out.weight": "out",
    "mlp.gate_up.weight": "gate_up",
    "mlp.down.weight": "down",
}
_SHARDED_AXIS = {"vocab": 0, "qkv": 0, "out": 0, "gate_up": 1, "down": 0}


def _kind(name: str) -> str:
    parts = name.split(".")
    return _KINDS.get(".".join(parts[2:] if parts[0] == "layers" else parts), "")


def _cuts(count: int, parts: int) -> tuple[int, ...]:
    return tuple(i * count // parts for i in range(parts + 1))


def _longest(cuts: Sequence[int]) -> int:
    return max(b - a for a, b in itertools.pairwise(cuts))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _segment_table(cuts: Sequence[int], depth: int) -> np.ndarray:
    """int32 [S * depth]: the ranges between the cuts, each filled up to `depth` entries."""
    table = np.full((len(cuts) - 1, depth), ABSENT, np.int32)
    for segment, (first, last) in enumerate(itertools.pairwise(cuts)):
        table[segment, : last - first] = np.arange(first, last)
    return table.reshape(-1)


def _inverse(table: np.ndarray, size: int) -> np.ndarray:
    """int32 [size]: a place at which each entry stands."""
    flat = table.reshape(-1)
    places = np.full(size, ABSENT, np.int32)
    present = np.flatnonzero(flat != ABSENT)
    places[flat[present]] = present
    assert (places != ABSENT).all()
    return places


def _pick(array: Any, table: np.ndarray, axis: int, xp: Any) -> Any:
    """Entries of one axis by index, zeros where the table says ABSENT."""
    if np.array_equal(table, np.arange(array.shape[axis])):
        return array
    picked = xp.take(array, np.maximum(table, 0), axis=axis)
    absent = (table == ABSENT).reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    return xp.where(absent, xp.zeros((), array.dtype), picked) if absent.any() else picked
