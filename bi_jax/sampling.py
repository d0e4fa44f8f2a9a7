"""Tokens and log-probabilities of a step's rows, each in its request's own way.

The device folds the position into the key, finds the cut, draws, and scores; `sample` and `score`
share everything but the draw.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from bi_jax.pallas_kernels.float_order import LOWEST
from bi_jax.pallas_kernels.log_softmax import target_logprobs
from bi_jax.pallas_kernels.sampling import (
    choose_and_score,
    choose_token,
    find_cut,
    fold_in,
    top_tokens,
)

from .ops import TokenBackends
from .sampling_rows import RowSampling, SamplingRows, request_key, row_sampling, stack_rows

__all__ = [
    "RowSampling",
    "SamplingRows",
    "TokenBackends",
    "TokenChoice",
    "request_key",
    "row_sampling",
    "sample",
    "score",
    "stack_rows",
]


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


def sample(
    logits: Float32[Array, "R V"],
    rows: SamplingRows,
    *,
    backend: str | TokenBackends,
    num_rows: Int32[Array, ""] | None = None,
    top: int = 0,
    filters: bool = True,
    target: Int32[Array, " R"] | None = None,
) -> TokenChoice:
    """Draws one token of every row and scores it. For use inside a jitted step.

    Args:
      logits: [R, V] float32.
      rows: the R rows' parameters.
      backend: implementation of each op by name, or one name for all.
      num_rows: int32 [], rows that hold data; None: all.
      top: how many most likely tokens to report too, static.
      filters: static; False leaves the search for the cut out of the program. It changes no bit
        as long as no row is filtered.
      target: int32 [R]; a row whose entry is 0 or more is not drawn but scored as `score` does.

    Invariance: what comes out for row r depends on logits[r] and the entries r of rows only.
    """
    rows = jax.tree.map(jnp.asarray, rows)
    names = _names(backend)
    cut = _cut(logits, rows, names, num_rows, filters)
    words = jnp.stack(fold_in(rows.key_words, rows.position.astype(jnp.uint32)), axis=1)
    if names.share_a_pass and not top:
        token, bad_row, logprob = choose_and_score(
            logits,
            words,
            rows.inv_temperature,
            cut,
            rows.logprob_inv_temperature,
            _logprob_cut(logits, rows, cut),
            backend=names.choose_token,
            given=target,
            num_rows=num_rows,
        )
        return _choice(token, logprob, bad_row, *_no_top(logits))
    token, bad_row = choose_token(
        logits, words, rows.inv_temperature, *cut, backend=names.choose_token, num_rows=num_rows
    )
    if target is not None:
        token = jnp.where(target >= 0, target, token)
    logprob, top_ids, top_logprobs = _score(logits, token, rows, cut, names, num_rows, top)
    return _choice(token, logprob, bad_row, top_ids, top_logprobs)


def score(
    logits: Float32[Array, "R V"],
    token: Int32[Array, " R"],
    rows: SamplingRows,
    *,
    backend: str | TokenBackends,
    num_rows: Int32[Array, ""] | None = None,
    top: int = 0,
    filters: bool = True,
) -> TokenChoice:
    """What `sample` reports, for given tokens instead of drawn ones: the same bits.

    Args: as in `sample`, and token int32 [R]. rows.key_words and rows.position are not looked at.

    Invariance: as `sample`.
    """
    rows = jax.tree.map(jnp.asarray, rows)
    names = _names(backend)
    cut = _cut(logits, rows, names, num_rows, filters)
    logprob, top_ids, top_logprobs = _score(logits, token, rows, cut, names, num_rows, top)
    bad_row = logprob != logprob  # NaN
    return _choice(token, logprob, bad_row, top_ids, top_logprobs)


def _names(backend: str | TokenBackends) -> TokenBackends:
    if isinstance(backend, str):
        return TokenBackends(choose_token=backend, target_logprobs=backend, cut=backend)
    return backend


def _choice(
    token: jax.Array,
    logprob: jax.Array,
    bad_row: jax.Array,
    top_ids: jax.Array,
    top_logprobs: jax.Array,
) -> TokenChoice:
    return TokenChoice(
        token=token, logprob=logprob, bad_row=bad_row, top_ids=top_ids, top_logprobs=top_logprobs
    )


def _no_top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = logits.shape[0], 0
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _cut(
    logits: jax.Array,
    rows: SamplingRows,
    names: TokenBackends,
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
        backend=names.cut,
        num_rows=num_rows,
    )


def _score(
    logits: jax.Array,
    token: jax.Array,
    rows: SamplingRows,
    cut: tuple[jax.Array, jax.Array],
    names: TokenBackends,
    num_rows: jax.Array | None,
    top: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if top:
        backend = names.top_tokens(top)
        top_ids = top_tokens(logits, top, backend=backend, num_rows=num_rows)
    else:
        top_ids, _ = _no_top(logits)
    logprobs, _ = target_logprobs(
        logits,
        jnp.concatenate([token[:, None], top_ids], axis=1),
        rows.logprob_inv_temperature,
        *_logprob_cut(logits, rows, cut),
        backend=names.target_logprobs,
        num_rows=num_rows,
    )
    return logprobs[:, 0], top_ids, logprobs[:, 1:]


def _logprob_cut(
    logits: jax.Array, rows: SamplingRows, cut: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The cut of rows whose log-probabilities leave out what the draw leaves out."""
    whole = _everything(logits)
    return (
        jnp.where(rows.logprob_cut, cut[0], whole[0]),
        jnp.where(rows.logprob_cut, cut[1], whole[1]),
    )


def _everything(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, vocab = logits.shape
    return jnp.full((rows,), LOWEST, jnp.int32), jnp.full((rows,), vocab, jnp.int32)
