"""From padded or packed [B, T] tokens to one flat ragged batch, by integer work alone."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from bi_jax.pallas_kernels.ragged import RaggedBatch

PAGE_SIZE = 64  # tokens a page; schedule


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """N = B * T tokens, padding moved behind the real ones.

    Attributes:
      tokens: int32 [N].
      batch: where each of them belongs; sequence s of row b is request b * max_segments + s.
      target: int32 [N], the token that each row of logits has to score: the next of its sequence.
      target_place: int32 [N], where that token stands in the flattened [B, T]; N or more where
        there is none, each its own.
      bad_row: bool [B], the row holds more sequences or a longer one than there is room for, or an
        id outside the vocabulary.
    """

    tokens: Int32[Array, " N"]
    batch: RaggedBatch
    target: Int32[Array, " N"]
    target_place: Int32[Array, " N"]
    bad_row: Bool[Array, " B"]


def pages_for(rows: int, length: int, max_segments: int) -> int:
    """Pages that hold any layout of `rows` rows of `length` tokens."""
    return rows * length // PAGE_SIZE + rows * max_segments


def lay_out(
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"] | None,
    segment_ids: Int32[Array, "B T"] | None,
    *,
    max_segments: int,
    max_position: int,
    vocab_size: int,
) -> TokenLayout:
    """Compacts the real tokens of every row, in order.

    Args:
      tokens: [B, T]; padding may hold any id.
      positions: None, or [B, T]: a sequence starts wherever it is 0.
      segment_ids: None: all tokens are real; else 0 or less is padding, and a sequence starts
        wherever the id differs from the row's real token before.
      max_segments: sequences that a row may hold.
      max_position: longest sequence.
      vocab_size: real tokens are below it.

    Invariance: integers only.
    """
    rows, length = tokens.shape
    count = rows * length
    requests = rows * max_segments
    index = jnp.arange(count, dtype=jnp.int32)
    ids = jnp.ones((count,), jnp.int32) if segment_ids is None else segment_ids.reshape(-1)
    real = ids > 0
    place = jnp.where(real, jnp.cumsum(real, dtype=jnp.int32) - 1, count + index)
    source = jnp.zeros((count,), jnp.int32)
    source = source.at[place].set(index, mode="drop", unique_indices=True)
    num_tokens = jnp.sum(real, dtype=jnp.int32)
    valid = index < num_tokens

    ids, row = ids[source], source // length
    row_starts = (index == 0) | (row != jnp.roll(row, 1))
    starts = row_starts | (ids != jnp.roll(ids, 1))
    if positions is not None:
        starts |= positions.reshape(-1)[source] == 0
    position = jnp.where(valid, index - _last(starts, index), 0)
    ordinal = jnp.cumsum(starts, dtype=jnp.int32)
    in_row = ordinal - ordinal[_last(row_starts, index)]
    request = row * max_segments + jnp.minimum(in_row, max_segments - 1)
    request = jnp.where(valid, request, requests - 1)

    tokens = tokens.reshape(-1)[source]
    foreign = (tokens < 0) | (tokens >= vocab_size)
    misfit = valid & ((in_row >= max_segments) | (position >= max_position) | foreign)
    bad_row = jnp.zeros((rows,), jnp.int32).at[row].max(misfit.astype(jnp.int32)) > 0

    lengths = jnp.zeros((requests,), jnp.int32)
    lengths = lengths.at[jnp.where(valid, request, requests)].add(1, mode="drop")
    pages = (lengths + (PAGE_SIZE - 1)) // PAGE_SIZE
    first_page = jnp.cumsum(pages, dtype=jnp.int32) - pages
    columns = jnp.arange(-(-length // PAGE_SIZE), dtype=jnp.int32)
    page_table = first_page[:, None] + columns[None]

    following = jnp.minimum(index + 1, count - 1)
    has_next = (index + 1 < num_tokens) & ~starts[following]
    return TokenLayout(
        tokens=tokens,
        batch=RaggedBatch(
            positions=position,
            request=request,
            query_start=jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0)),
            page_table=jnp.minimum(page_table, pages_for(rows, length, max_segments) - 1),
            num_tokens=num_tokens,
        ),
        target=jnp.where(has_next, tokens[following], 0),
        target_place=jnp.where(has_next, source[following], count + index),
        bad_row=bad_row,
    )


def _last(marks: jax.Array, index: jax.Array) -> jax.Array:
    """The index of the last mark at or before each entry; 0 where there is none."""
    return lax.cummax(jnp.where(marks, index, 0))
