"""From a request's SamplingParams to tokens and log-probabilities.

The host turns each completion's parameters into a `RowSampling` once, at admission: every number
that needs a division, a logarithm or 64 bits is made there. The device folds the position into the
key, finds the cut, draws, and scores; `sample` and `score` share everything but the draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from bi_jax.pallas_kernels.float_order import LOWEST
from bi_jax.pallas_kernels.log_softmax import target_logprobs
from bi_jax.pallas_kernels.sampling import choose_token, find_cut, fold_in, top_tokens

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenChoice:
    """Tokens of R rows and their log-probabilities, in each row's own mode.

    Attributes:
      token: int32 [R].
      logprob: float32 [R].
      bad_row: bool [R], the logits hold a NaN or +inf, or nothing but -inf; use nothing of it.
      top_ids: int32 [R, N], the N largest logits, the lowest id first on ties.
      top_logprobs: float32 [R, N].
    """

    token: Int32[Array, " R"]
    logprob: Float32[Array, " R"]
    bad_row: Bool[Array, " R"]
    top_ids: Int32[Array, "R N"]
    top_logprobs: Float32[Array, "R N"]


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

    dtypes: dict[str, Any] = {
        "key_words": np.uint32,
        "inv_temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.uint32,
        "log_min_p": np.float32,
        "logprob_inv_temperature": np.float32,
        "logprob_cut": np.bool_,
    }
    columns: dict[str, Any] = {
        name: np.array([getattr(row, name) for row in rows], dtype)
        for name, dtype in dtypes.items()
    }
    columns["position"] = np.array([*positions, *[0] * (size - len(positions))], np.int32)
    return SamplingRows(**columns)


def sample(
    logits: Float32[Array, "R V"],
    rows: SamplingRows,
    *,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    top: int = 0,
    filters: bool = True,
    target: Int32[Array, " R"] | None = None,
) -> TokenChoice:
    """Draws one token of every row and scores it. For use inside a jitted step.

    Args:
      logits: [R, V] float32.
      rows: the R rows' parameters.
      backend: implementation of the ops by name.
      num_rows: int32 [], rows that hold data; None: all.
      top: how many most likely tokens to report too, static.
      filters: static; False leaves the search for the cut out of the program. It changes no bit
        as long as no row is filtered.
      target: int32 [R]; a row whose entry is 0 or more is not drawn but scored as `score` does.

    Invariance: what comes out for row r depends on logits[r] and the entries r of rows only.
    """
    rows = jax.tree.map(jnp.asarray, rows)
    cut = _cut(logits, rows, backend, num_rows, filters)
    words = jnp.stack(fold_in(rows.key_words, rows.position.astype(jnp.uint32)), axis=1)
    token, bad_row = choose_token(
        logits, words, rows.inv_temperature, *cut, backend=backend, num_rows=num_rows
    )
    if target is not None:
        token = jnp.where(target >= 0, target, token)
    logprob, top_ids, top_logprobs = _score(logits, token, rows, cut, backend, num_rows, top)
    return TokenChoice(
        token=token, logprob=logprob, bad_row=bad_row, top_ids=top_ids, top_logprobs=top_logprobs
    )


def score(
    logits: Float32[Array, "R V"],
    token: Int32[Array, " R"],
    rows: SamplingRows,
    *,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    top: int = 0,
    filters: bool = True,
) -> TokenChoice:
    """What `sample` reports, for given tokens instead of drawn ones: the same bits.

    Args: as in `sample`, and token int32 [R]. rows.key_words and rows.position are not looked at.

    Invariance: as `sample`.
    """
    rows = jax.tree.map(jnp.asarray, rows)
    cut = _cut(logits, rows, backend, num_rows, filters)
    logprob, top_ids, top_logprobs = _score(logits, token, rows, cut, backend, num_rows, top)
    return TokenChoice(
        token=token,
        logprob=logprob,
        bad_row=logprob != logprob,  # NaN
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _cut(
    logits: jax.Array,
    rows: SamplingRows,
    backend: str,
    num_rows: jax.Array | None,
    filters: bool,
) -> tuple[jax.Array, jax.Array]:
    if not filters:
        return _everything(logits)
    return find_cut(
        logits,
        rows.inv_temperature,
        rows.top_k,
        rows.top_p,
        rows.log_min_p,
        backend=backend,
        num_rows=num_rows,
    )


def _score(
    logits: jax.Array,
    token: jax.Array,
    rows: SamplingRows,
    cut: tuple[jax.Array, jax.Array],
    backend: str,
    num_rows: jax.Array | None,
    top: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if top:
        top_ids = top_tokens(logits, top, backend=backend, num_rows=num_rows)
    else:
        top_ids = jnp.zeros((logits.shape[0], 0), jnp.int32)
    whole = _everything(logits)
    logprobs, _ = target_logprobs(
        logits,
        jnp.concatenate([token[:, None], top_ids], axis=1),
        rows.logprob_inv_temperature,
        jnp.where(rows.logprob_cut, cut[0], whole[0]),
        jnp.where(rows.logprob_cut, cut[1], whole[1]),
        backend=backend,
        num_rows=num_rows,
    )
    return logprobs[:, 0], top_ids, logprobs[:, 1:]


def _everything(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, vocab = logits.shape
    return jnp.full((rows,), LOWEST, jnp.int32), jnp.full((rows,), vocab, jnp.int32)


_PADDING = RowSampling(
    key_words=(0, 0),
    inv_temperature=0.0,
    top_k=0,
    top_p=0,
    log_min_p=-math.inf,
    logprob_inv_temperature=1.0,
    logprob_cut=False,
)
