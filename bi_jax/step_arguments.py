"""A step on the host, and one that the device has been given."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from bi_jax.pallas_kernels.ragged import RaggedBatch

from .batch import LogitRow, TokenArrays
from .sampling import SamplingRows, TokenChoice
from .sampling_rows import ROW_DTYPES
from .scheduler import StepPlan


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LogitRows:
    """The rows of logits that a step needs, as arrays of R entries.

    Attributes:
      row: int32 [R], index into the step's tokens.
      target: int32 [R], the token to score, or CHOOSE.
      num_rows: int32 [], entries that are real.
      sampling: the rows' sampling parameters.
    """

    row: Any
    target: Any
    num_rows: Any
    sampling: SamplingRows


@dataclass(frozen=True, kw_only=True)
class StepArguments:
    """A step on the host: its arrays, padded to its buckets, and what is static about it."""

    tokens: TokenArrays
    rows: LogitRows
    top: int
    filters: bool
    steps: int

    @property
    def program(self) -> tuple[int, int, int, bool, int]:
        """Which compiled program runs it: tokens, logit rows, top tokens, filters, steps."""
        return len(self.tokens.tokens), len(self.rows.row), self.top, self.filters, self.steps

    @property
    def statics(self) -> dict[str, Any]:
        """The step function's static arguments."""
        named = {"top": self.top, "filters": self.filters, "steps": self.steps}
        return {**named, "logit_rows": len(self.rows.row)}


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that the device has been given.

    Attributes:
      plan: what was asked for.
      rows: the rows of logits, as they stood `later` steps before.
      step: its arrays.
      choice: what will come, on the device.
      following: int32 [T] on the device, the tokens of the step after it if each row draws.
      started: when, by `time.perf_counter`.
    """

    plan: StepPlan
    rows: Sequence[LogitRow]
    later: int = 0
    step: StepArguments
    choice: TokenChoice
    following: jax.Array
    started: float


def pack(step: StepArguments) -> np.ndarray:
    """All arrays of a step but its tokens as one.

    Returns:
      uint32 [N], the bit patterns one after the other, each array filled up to `ALIGNED` words.
    """
    batch, rows = step.tokens, step.rows
    counts = np.array([batch.num_tokens, rows.num_rows], np.int32)
    head = (batch.positions, batch.request, batch.query_start, batch.page_table, counts)
    parts = [_words(array) for array in (*head, *_columns(rows))]
    packed = np.zeros(sum(_filled(part.size) for part in parts), np.uint32)
    start = 0
    for part in parts:
        packed[start : start + part.size] = part
        start += _filled(part.size)
    return packed


def unpack(
    words: UInt32[Array, " N"],
    *,
    num_tokens: int,
    num_requests: int,
    pages_a_request: int,
    logit_rows: int,
) -> tuple[RaggedBatch, LogitRows]:
    """The arrays that `pack` put together, inside the program.

    Args:
      words: what `pack` returned.
      num_tokens, num_requests, pages_a_request, logit_rows: T, B, Mp and R.
    """
    sizes = [num_tokens, num_tokens, num_requests + 1, num_requests * pages_a_request, 2]
    sizes += [logit_rows] * len(_ROW_DTYPES)
    filled = lax.split(words, [_filled(size) for size in sizes])
    parts = [part[:size] for part, size in zip(filled, sizes, strict=True)]
    integers = [_as(part, np.dtype(np.int32)) for part in parts[:5]]
    positions, request, query_start, page_table, counts = integers
    batch = RaggedBatch(
        positions=positions,
        request=request,
        query_start=query_start,
        page_table=page_table.reshape(num_requests, pages_a_request),
        num_tokens=counts[0],
    )
    named = {
        name: _as(column, np.dtype(dtype))
        for (name, dtype), column in zip(_ROW_DTYPES.items(), parts[5:], strict=True)
    }
    own = {name: named.pop(name) for name in ("row", "target")}
    key_words = jnp.stack([named.pop(name) for name in _KEY], axis=1)
    sampling = SamplingRows(key_words=key_words, **named)
    rows = LogitRows(**own, num_rows=counts[1], sampling=sampling)
    # Arrays of their own: no kernel is to be fused with the slice that its operand comes from.
    return lax.optimization_barrier((batch, rows))


ALIGNED = 64  # words: what kernels want their operands aligned to
_KEY = ("first key word", "second key word")
_ROW_DTYPES: dict[str, Any] = {
    "row": np.int32,
    "target": np.int32,
    **dict.fromkeys(_KEY, ROW_DTYPES["key_words"]),
    **{name: dtype for name, dtype in ROW_DTYPES.items() if name != "key_words"},
}


def _columns(rows: LogitRows) -> Iterator[np.ndarray]:
    """The arrays of R entries, in the order of _ROW_DTYPES."""
    keys: Any = rows.sampling.key_words
    for name, dtype in _ROW_DTYPES.items():
        if name in _KEY:
            column = keys[:, _KEY.index(name)]
        else:
            column = getattr(rows if name in ("row", "target") else rows.sampling, name)
        assert column.dtype == dtype, f"{name} is of {column.dtype}"
        yield column


def _filled(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _words(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.bool_:
        return array.astype(np.uint32)
    return np.ascontiguousarray(array).view(np.uint32).reshape(-1)


def _as(words: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return words != 0 if dtype == np.bool_ else lax.bitcast_convert_type(words, dtype)


def ragged(arrays: TokenArrays) -> RaggedBatch:
    """What the model's ops see of a step's tokens."""
    host: Any = arrays
    return RaggedBatch(
        positions=host.positions,
        request=host.request,
        query_start=host.query_start,
        page_table=host.page_table,
        num_tokens=host.num_tokens,
    )
