"""A completion's SamplingParams as the numbers that the device takes.

Made on the host once, at admission: whatever needs a division, a logarithm or 64 bits is done here.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from bi_jax.pallas_kernels.sampling import fold_in

from .sampling_params import SEED_BITS, SamplingParams, inverse_temperature


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """The parameters of one completion as the device takes them; plain numbers, host only.

    Attributes:
      key_words: the two uint32 of fold_in(key(seed), sample index).
      inv_temperature: 1 / temperature, rounded once to float32; 0.0 is greedy.
      top_k: 0 is off.
      top_p: round(p * 2^32); 0 is off.
      log_min_p: log(min_p); -inf is off.
      logprob_inv_temperature: the same as inv_temperature, or 1.0 in mode "raw" and when greedy.
      logprob_cut: whether log-probabilities are of the kept tokens only: mode "processed".
    """

    key_words: tuple[int, int]
    inv_temperature: float
    top_k: int
    top_p: int
    log_min_p: float
    logprob_inv_temperature: float
    logprob_cut: bool

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p may cut this row."""
        return self.top_k > 0 or self.top_p > 0 or self.log_min_p > -math.inf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """`RowSampling` of R rows as arrays, and where each row stands.

    Attributes:
      position: int32 [R], the absolute position that the new token will have: the first one after
        a prompt of 5 tokens has 5.
      others: as in `RowSampling`, one entry a row.
    """

    key_words: UInt32[Array, "R 2"]
    position: Int32[Array, " R"]
    inv_temperature: Float32[Array, " R"]
    top_k: Int32[Array, " R"]
    top_p: UInt32[Array, " R"]
    log_min_p: Float32[Array, " R"]
    logprob_inv_temperature: Float32[Array, " R"]
    logprob_cut: Bool[Array, " R"]


def request_key(seed: int, sample_index: int) -> tuple[int, int]:
    """The words of fold_in(key(seed, impl="threefry2x32"), sample_index).

    All 63 bits of the seed count, as in JAX with 64-bit types enabled.

    Raises: ValueError: seed or sample_index out of range.
    """
    if not 0 <= seed < 2**SEED_BITS:
        raise ValueError(f"seed={seed} must be from 0 to 2**{SEED_BITS} - 1")
    if not 0 <= sample_index < 2**31:
        raise ValueError(f"sample_index={sample_index} must be from 0 to 2**31 - 1")
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)
    first, second = fold_in(words, np.array([sample_index], np.uint32))
    return int(first[0]), int(second[0])


def row_sampling(params: SamplingParams, *, sample_index: int) -> RowSampling:
    """The numbers of one completion.

    Greedy (temperature 0) looks at no filter, and its log-probabilities are the raw ones in every
    mode. Otherwise temperature comes first, then min_p, top_k, and top_p of what they leave.

    Raises: ValueError: the parameters have no seed yet.
    """
    if params.seed is None:
        raise ValueError("seed=None must be assigned before sampling; see SamplingParams.with_seed")
    inverse = 0.0 if params.greedy else inverse_temperature(params.temperature)
    fraction = round(params.top_p * 2**32)
    raw = params.greedy or params.logprobs_mode == "raw"
    on = not params.greedy
    return RowSampling(
        key_words=request_key(params.seed, sample_index),
        inv_temperature=inverse,
        top_k=min(params.top_k, 2**31 - 1) if on else 0,
        top_p=max(fraction, 1) if on and fraction < 2**32 else 0,
        log_min_p=math.log(params.min_p) if on and params.min_p > 0 else -math.inf,
        logprob_inv_temperature=1.0 if raw else inverse,
        logprob_cut=on and params.logprobs_mode == "processed",
    )


@dataclass(frozen=True, kw_only=True)
class StackedRows:
    """The sampling arrays of a step's rows, kept for the next step."""

    sampling: list[RowSampling]
    size: int
    arrays: SamplingRows

    def is_of(self, sampling: list[RowSampling], size: int) -> bool:
        same = size == self.size and len(sampling) == len(self.sampling)
        return same and all(map(operator.is_, sampling, self.sampling))


# Of each array of `SamplingRows`, [R] but for the key words [R, 2].
ROW_DTYPES: dict[str, Any] = {
    "key_words": np.uint32,
    "position": np.int32,
    "inv_temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.uint32,
    "log_min_p": np.float32,
    "logprob_inv_temperature": np.float32,
    "logprob_cut": np.bool_,
}


def stack_rows(rows: Sequence[RowSampling], positions: Sequence[int], *, size: int) -> SamplingRows:
    """Arrays (NumPy) of `size` rows: those given, then greedy padding.

    Args:
      rows: one entry a row of logits.
      positions: the absolute position of each row's new token.
      size: the bucket, at least len(rows).
    """
    if len(rows) != len(positions) or len(rows) > size:
        raise ValueError(
            f"stack_rows: expected one position a row and at most {size} rows, got {len(rows)} "
            f"rows and {len(positions)} positions"
        )
    rows = [*rows, *[_PADDING] * (size - len(rows))]

    positions = [*positions, *[0] * (size - len(positions))]

    def values(name: str) -> Sequence[Any]:
        return positions if name == "position" else [getattr(row, name) for row in rows]

    columns: dict[str, Any] = {
        name: np.array(values(name), dtype) for name, dtype in ROW_DTYPES.items()
    }
    return SamplingRows(**columns)


_PADDING = RowSampling(
    key_words=(0, 0),
    inv_temperature=0.0,
    top_k=0,
    top_p=0,
    log_min_p=-math.inf,
    logprob_inv_temperature=1.0,
    logprob_cut=False,
)
