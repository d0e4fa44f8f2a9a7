"""From a step's plan to the arrays of its bucket. Host only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from .sampling_rows import RowSampling
from .scheduler import PlannedSequence, StepPlan

CHOOSE = -1  # target of a row whose token is to be chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitRow:
    """One row of logits that a step needs.

    Attributes:
      row: index into the step's tokens.
      item: index into the plan's items.
      position: absolute position of the token that the row predicts.
      target: the token to score, or CHOOSE.
      sampling: the completion's parameters as the device takes them, its random key among them.
      top: how many most likely tokens to report.
    """

    row: int
    item: int
    position: int
    target: int
    sampling: RowSampling
    top: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenArrays:
    """int32 arrays of one step: tokens, positions, request [T], query_start [B + 1], page_table
    [B, Mp], num_tokens []."""

    tokens: np.ndarray
    positions: np.ndarray
    request: np.ndarray
    query_start: np.ndarray
    page_table: np.ndarray
    num_tokens: np.ndarray


def bucket_for(num_rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `num_rows`.

    Raises:
      ValueError: none does.
    """
    for bucket in buckets:
        if num_rows <= bucket:
            return bucket
    raise ValueError(f"expected at most {buckets[-1]} rows in a step, got {num_rows}")


def token_arrays(
    plan: StepPlan, *, num_rows: int, num_requests: int, pages_a_request: int
) -> TokenArrays:
    """Lays the plan's tokens out flat; what is beyond them is zero, and never looked at.

    Args:
      plan: what to compute.
      num_rows: T, the bucket.
      num_requests: B, rows of the page table.
      pages_a_request: Mp.
    """
    # Whole columns at a time: with hundreds of requests a step, this is the host's work.
    items = plan.items
    counts = np.array([item.count for item in items], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    end = int(ends[-1])
    tokens, positions, request = (np.zeros(num_rows, np.int32) for _ in range(3))
    tokens[:end] = list(chain.from_iterable(map(_planned_tokens, items)))
    starts = np.array([item.start for item in items], np.int32)
    request[:end] = np.repeat(np.arange(len(items), dtype=np.int32), counts)
    offsets = np.arange(end, dtype=np.int32) - np.repeat(ends - counts, counts)
    positions[:end] = np.repeat(starts, counts) + offsets
    query_start = np.full(num_requests + 1, end, np.int32)
    query_start[0], query_start[1 : len(items) + 1] = 0, ends
    pages_used = np.array([len(item.pages) for item in items], np.int32)
    page_table = np.zeros((num_requests, pages_a_request), np.int32)
    filled = np.arange(pages_a_request, dtype=np.int32)[None] < pages_used[:, None]
    page_table[: len(items)][filled] = list(chain.from_iterable(item.pages for item in items))
    return TokenArrays(
        tokens=tokens,
        positions=positions,
        request=request,
        query_start=query_start,
        page_table=page_table,
        num_tokens=np.asarray(end, np.int32),
    )


def arrays_one_on(arrays: TokenArrays, plan: StepPlan, page_size: int) -> TokenArrays:
    """The arrays of a plan that takes each sequence of the step before one token further.

    Args:
      arrays: of the step before, one token a sequence; they stay as they are.
      plan: the same sequences in the same order, each one position on.
      page_size: tokens a page.

    Returns:
      Arrays that name no tokens: those are drawn by the step before.
    """
    starts = np.array([item.start for item in plan.items], np.int32)
    positions = arrays.positions.copy()
    positions[: len(starts)] = starts
    page_table = arrays.page_table
    begun = np.flatnonzero(starts % page_size == 0)
    if begun.size:
        page_table = page_table.copy()
        for row in begun.tolist():
            page = plan.items[row].start // page_size
            page_table[row, page] = plan.items[row].pages[page]
    return replace(arrays, positions=positions, page_table=page_table)


def _planned_tokens(item: PlannedSequence) -> Sequence[int]:
    ids = item.sequence.token_ids
    return ids[item.start : item.start + item.count]


def first_rows(plan: StepPlan) -> list[tuple[int, PlannedSequence, int]]:
    """(index, item, flat row of the item's first token) of every item of the plan."""
    out, start = [], 0
    for index, item in enumerate(plan.items):
        out.append((index, item, start))
        start += item.count
    return out


def top_bucket(rows: Sequence[LogitRow], vocab_size: int) -> int:
    """How many top tokens a step reports: few sizes, so that few programs are compiled."""
    most = max((row.top for row in rows), default=0)
    return min(vocab_size, max(8, 1 << (most - 1).bit_length())) if most else 0
