"""Vocabulary blocks on Hopper: what the kernels of log_softmax and sampling share.

A CTA is one warpgroup. A block of float32 logits lies in its registers, thread t holding columns
t, t + 128, t + 256, ... of the block, loaded straight from global memory (a warp reads 128
consecutive bytes). The last block of a row is loaded from the row's last `block` columns, so that
nothing is read beyond the row; the columns in front, which are the block before's, are masked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..float_order import NEG_INF, from_order_key

I32 = jnp.int32
Interpret = bool | plgpu.InterpretGPUParams  # how to run in the interpreter, if at all
THREADS = 128  # of one warpgroup
PLACES = 128  # blocks of a row at most: the per-block arrays are [R, PLACES]
MAX_ROWS = 65535  # of a launch grid's second axis
REDUCTION_SCRATCH_BYTES = 1024
LOG2_E = 1.4426950408889634
PLACE_LAYOUT = plgpu.Layout.WG_STRIDED((PLACES,), vec_size=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Columns of a row as the kernels see them, and the columns of a block."""

    size: int
    block: int

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block)

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.block,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class Block:
    """The logits of one block in registers.

    Attributes:
      values: float32 [block].
      ids: int32 [block].
      foreign: bool [block], the columns of the block before, or None if there are none.
      index: int32, which block of the row.
    """

    values: jax.Array
    ids: jax.Array
    foreign: jax.Array | None
    index: jax.Array


def vocabulary_of(op: str, logits: jax.Array, block: int) -> tuple[jax.Array, Vocabulary]:
    """The logits, with at least one block of columns, and how they are cut.

    Raises:
      NotImplementedError: too many blocks or rows.
    """
    rows, vocab = logits.shape
    if vocab > PLACES * block:
        raise NotImplementedError(
            f"{op} on Hopper takes up to {PLACES * block} columns in blocks of {block}, got {vocab}"
        )
    if rows > MAX_ROWS:
        raise NotImplementedError(f"{op} on Hopper takes up to {MAX_ROWS} rows, got {rows}")
    if block % THREADS:
        raise NotImplementedError(
            f"{op} on Hopper takes blocks that are a multiple of {THREADS}, got {block}"
        )
    if vocab < block:
        logits = jnp.pad(logits, ((0, 0), (0, block - vocab)), constant_values=-jnp.inf)
    return logits, Vocabulary(size=max(vocab, block), block=block)


def load_values(logits_gmem, row, index, vocabulary: Vocabulary):
    """float32 [block] of block `index`, the last one moved forward to end with the row."""
    start = jnp.minimum(index * vocabulary.block, vocabulary.size - vocabulary.block)
    columns = logits_gmem.at[row, pl.ds(start, vocabulary.block)]
    return plgpu.load(columns, layout=vocabulary.layout, optimized=False)


def as_block(values, index, vocabulary: Vocabulary) -> Block:
    """What `load_values` brought, with its ids."""
    begin = index * vocabulary.block
    start = jnp.minimum(begin, vocabulary.size - vocabulary.block)
    shape = (vocabulary.block,)
    ids = start + plgpu.broadcasted_iota(I32, shape, 0, layout=vocabulary.layout)
    foreign = None if vocabulary.size % vocabulary.block == 0 else ids < begin
    return Block(values, ids, foreign, index)


def walk_blocks(
    logits_gmem,
    row,
    segment,
    blocks_a_cta: int,
    vocabulary: Vocabulary,
    visitor: Callable[[], Callable[[Block], None]],
) -> None:
    """Visits the segment's blocks in ascending order, each loaded while the one before is used.

    visitor: makes the function that visits, while the first block is on its way.
    """
    first = segment * blocks_a_cta
    last = jnp.minimum(first + blocks_a_cta, vocabulary.blocks) - 1
    values = load_values(logits_gmem, row, first, vocabulary)
    visit = visitor()

    def step(index, values):
        following = load_values(logits_gmem, row, index + 1, vocabulary)
        visit(as_block(values, index, vocabulary))
        return following

    if blocks_a_cta > 1:
        values = lax.fori_loop(first, last, step, values)
    visit(as_block(values, last, vocabulary))


def kept_logits(block: Block, cut_value, cut_id, vocabulary: Vocabulary):
    """The block's logits, -inf for columns that are not its own or come after the cut.

    A NaN is never behind the cut: it must show. Most blocks need no mask and branch around it.
    """

    def masked():
        dropped = is_dropped(block.values, block.ids, cut_value, cut_id)
        if block.foreign is not None:
            dropped |= block.foreign
        return jnp.where(dropped, -jnp.inf, block.values)

    needed = cut_value > -jnp.inf  # a cut at -inf leaves nothing but -inf behind it
    if block.foreign is not None:
        needed |= block.index == vocabulary.blocks - 1
    return lax.cond(needed, masked, lambda: block.values)


def is_dropped(x, ids, cut_value, cut_id):
    """Whether (x, id) comes after the cut in descending order, lowest id first; no for a NaN."""
    return (x < cut_value) | ((x == cut_value) & (ids > cut_id))


def cut_values(cut_key: jax.Array) -> jax.Array:
    """The cut's logit; -inf where everything is kept. On the host side of a launch."""
    return jnp.where(cut_key < NEG_INF, -jnp.inf, from_order_key(cut_key))


def exponential(x):
    """exp(x) as exp2: a few instructions; an error of 2^-24 |x| on top of the instruction's."""
    return jnp.exp2(lax.optimization_barrier(x * LOG2_E))


def load_places(ref, row, beyond, vocabulary: Vocabulary):
    """[PLACES] of the row's blocks, `beyond` in the places where the row has no block."""
    values = plgpu.load(ref.at[row], layout=PLACE_LAYOUT, optimized=False)
    place = plgpu.broadcasted_iota(I32, (PLACES,), 0, layout=PLACE_LAYOUT)
    return jnp.where(place < vocabulary.blocks, values, jnp.full_like(values, beyond))


def row_top(maxima):
    """The row's exact maximum; 0.0 for a zero of either sign, NaN if there is a NaN."""
    top = jnp.max(maxima)
    return jnp.where(top == 0.0, 0.0, top)


def compiler_params(**options: Any) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES, **options)


def interpret_params(interpret: Interpret) -> plgpu.InterpretGPUParams | None:
    return plgpu.InterpretGPUParams() if interpret is True else interpret or None
