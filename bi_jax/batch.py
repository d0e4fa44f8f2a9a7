"""From a step's plan to the arrays of its bucket. Host only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .sampling_rows import RowSampling
from .scheduler import PlannedSequence, StepPlan

CHOOSE = -1  # target of a row whose token is to be chosen


@dataclass(frozen=True, kw_only=True)
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
    tokens, positions, request = (np.zeros(num_rows, np.int32) for _ in range(3))
    query_start = np.zeros(num_requests + 1, np.int32)
    page_table = np.zeros((num_requests, pages_a_request), np.int32)
    end = 0
    for index, item in enumerate(plan.items):
        begin, end = end, end + item.count
        tokens[begin:end] = item.sequence.token_ids[item.start : item.start + item.count]
        positions[begin:end] = np.arange(item.start, item.start + item.count)
        request[begin:end] = index
        query_start[index + 1] = end
        page_table[index, : len(item.pages)] = item.pages
    query_start[len(plan.items) + 1 :] = end
    return TokenArrays(
        tokens=tokens,
        positions=positions,
        request=request,
        query_start=query_start,
        page_table=page_table,
        num_tokens=np.asarray(end, np.int32),
    )


def first_rows(plan: StepPlan) -> list[tuple[int, PlannedSequence, int]]:
    """(index, item, flat row of the item's first token) of every item of the plan."""
    out, start = [], 0
    for index, item in enumerate(plan.items):
        out.append((index, item, start))
        start += item.count
    return out
