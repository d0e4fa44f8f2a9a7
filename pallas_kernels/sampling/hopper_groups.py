"""Maxima of groups of a row's logits on Hopper: one pass, for rows that are cut.

    g[b, t] = max over i of x[b, t + 128 i]        m[b] = max over t of g[b, t]

As many groups as 128 a block: of the k largest of them each stands for a logit of its own, so that
the k-th largest group bounds the k-th largest logit from below. Grid: (segment of blocks, row).
"""

import dataclasses
import functools
import types
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..log_softmax import hopper_blocks as blocks
from ..log_softmax.hopper_blocks import I32, PLACE_LAYOUT, PLACES, Vocabulary
from ..log_softmax.schedule import Schedule

U32 = jnp.uint32
FILTERS = ("inverse", "top_k", "top_p", "log_min_p")  # arrays of a row's parameters, in order


@dataclasses.dataclass(frozen=True)
class Filters:
    """What one row asks for.

    Attributes:
      inverse, top_k, top_p, log_min_p: as of `find_cut`.
      by_count, by_weight, by_gap: whether top-k, top-p and min-p are on.
    """

    inverse: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    log_min_p: jax.Array
    by_count: jax.Array
    by_weight: jax.Array
    by_gap: jax.Array

    @classmethod
    def load(cls, gmem: types.SimpleNamespace, row, vocab_size: int) -> "Filters":
        inverse, k, p, gap = (getattr(gmem, name)[row] for name in FILTERS)
        return cls(inverse, k, p, gap, (k > 0) & (k < vocab_size), p > U32(0), gap > -jnp.inf)

    @property
    def cuts(self):
        return (self.by_count | self.by_weight | self.by_gap) & (self.inverse > 0.0)

    @property
    def weight_alone(self):
        """Whether nothing but top-p cuts, so that the weight of the whole row counts."""
        return self.by_weight & ~(self.by_count | self.by_gap) & (self.inverse > 0.0)


def load_strips(logits_gmem, row, index, vocabulary: Vocabulary) -> list[jax.Array]:
    """The strips of block `index`, float32 [PLACES] each; see `hopper_blocks.load_values`."""
    start = _start(index, vocabulary)
    return [
        plgpu.load(
            logits_gmem.at[row, pl.ds(start + offset, PLACES)],
            layout=PLACE_LAYOUT,
            optimized=False,
        )
        for offset in range(0, vocabulary.block, PLACES)
    ]


def own_values(strips: list[jax.Array], index, vocabulary: Vocabulary) -> list[jax.Array]:
    """The strips of a block, -inf for columns of the block before."""
    if vocabulary.size % vocabulary.block == 0:
        return strips
    foreign = index * vocabulary.block - _start(index, vocabulary)
    place = plgpu.broadcasted_iota(I32, (PLACES,), 0, layout=PLACE_LAYOUT)
    return [
        jnp.where(place < foreign - n * PLACES, -jnp.inf, strip) for n, strip in enumerate(strips)
    ]


def _start(index, vocabulary: Vocabulary):
    return jnp.minimum(index * vocabulary.block, vocabulary.size - vocabulary.block)


def walk_strips(
    logits_gmem, row, segment, blocks_a_cta: int, vocabulary: Vocabulary, visit: Callable
) -> None:
    """`hopper_blocks.walk_blocks` in strips: visit(index, list of strips)."""
    first = segment * blocks_a_cta
    last = jnp.minimum(first + blocks_a_cta, vocabulary.blocks) - 1
    load = functools.partial(load_strips, logits_gmem, row, vocabulary=vocabulary)
    strips = load(first)

    def step(index, strips):
        following = load(index + 1)
        visit(index, strips)
        return following

    if blocks_a_cta > 1:
        strips = lax.fori_loop(first, last, step, strips)
    visit(last, strips)


def _body(*refs, names, vocabulary: Vocabulary, schedule: Schedule, vocab_size: int):
    gmem = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    segment, row = lax.axis_index("segment"), lax.axis_index("row")
    needed = row < gmem.num_rows[0]
    if hasattr(gmem, "top_k"):
        needed &= Filters.load(gmem, row, vocab_size).cuts

    @pl.when(needed)
    def _summarise():
        def visit(index, strips):
            largest = functools.reduce(jnp.maximum, own_values(strips, index, vocabulary))
            gmem.groups[row, pl.ds(index * PLACES, PLACES)] = largest
            gmem.maxima[row, index] = jnp.max(largest)

        walk_strips(gmem.logits, row, segment, schedule.blocks_a_cta, vocabulary, visit)


@functools.partial(jax.jit, static_argnames=("vocabulary", "vocab_size", "schedule", "interpret"))
def group_maxima(
    arrays: dict[str, jax.Array],
    *,
    vocabulary: Vocabulary,
    vocab_size: int,
    schedule: Schedule,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """logits [R, V] -> maxima float32 [R, PLACES], groups float32 [R, blocks * PLACES].

    Args:
      arrays: logits, num_rows int32 [1], and perhaps the FILTERS [R]: then only rows that are cut.

    Invariance: row r depends on the rows r of all arrays only.
    """
    rows = arrays["logits"].shape[0]
    outs = {
        "maxima": jax.ShapeDtypeStruct((rows, PLACES), jnp.float32),
        "groups": jax.ShapeDtypeStruct((rows, vocabulary.blocks * PLACES), jnp.float32),
    }
    return plgpu.kernel(
        functools.partial(
            _body,
            names=(*arrays, *outs),
            vocabulary=vocabulary,
            schedule=schedule,
            vocab_size=vocab_size,
        ),
        out_type=tuple(outs.values()),
        grid=(-(-vocabulary.blocks // schedule.blocks_a_cta), rows),
        grid_names=("segment", "row"),
        # Nothing that one thread writes is read by another.
        compiler_params=blocks.compiler_params(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="group_maxima",
        interpret=blocks.interpret_params(interpret),
    )(*arrays.values())
