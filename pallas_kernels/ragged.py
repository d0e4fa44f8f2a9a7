"""The ragged batch: how tokens of many requests stand in one flat array."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """Where each of T flat tokens belongs.

    Attributes:
      positions: int32 [T], each token's absolute position in its request.
      request: int32 [T], the token's row of `page_table`.
      query_start: int32 [B + 1], request b's tokens are query_start[b] .. query_start[b+1]-1, at
        consecutive positions; rows without tokens have an empty range.
      page_table: int32 [B, Mp], page ids in order of absolute position; unused entries may hold
        any id.
      num_tokens: int32 [], tokens that are real; those after them are padding and may hold
        anything.
    """

    positions: Int32[Array, " T"]
    request: Int32[Array, " T"]
    query_start: Int32[Array, " B_plus_1"]
    page_table: Int32[Array, "B Mp"]
    num_tokens: Int32[Array, ""]
