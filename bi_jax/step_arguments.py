"""A step on the host, and one that the device has been given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from bi_jax.pallas_kernels.ragged import RaggedBatch

from .batch import LogitRow, TokenArrays
from .sampling import SamplingRows, TokenChoice
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
        return {"top": self.top, "filters": self.filters, "steps": self.steps}


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that the device has been given.

    Attributes:
      plan: what was asked for.
      rows: the rows of logits, as they stood `later` steps before.
      step: its arrays.
      choice: what will come, on the device.
      started: when, by `time.perf_counter`.
    """

    plan: StepPlan
    rows: Sequence[LogitRow]
    later: int = 0
    step: StepArguments
    choice: TokenChoice
    started: float


def ragged(arrays: TokenArrays) -> RaggedBatch:
    """What the model's ops see of a step's tokens."""
    host: Any = arrays  # NumPy arrays: the jitted step takes them as they are
    return RaggedBatch(
        positions=host.positions,
        request=host.request,
        query_start=host.query_start,
        page_table=host.page_table,
        num_tokens=host.num_tokens,
    )
