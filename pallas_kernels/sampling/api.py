"""Public token choice: checks, then marked primitives."""

from typing import Any

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from .. import contracts
from ..primitive import HOPPER, REFERENCE, define_op
from .cut_reference import find_cut_reference
from .kernel_cut_hopper import find_cut_hopper_op, top_tokens_hopper_op
from .kernel_hopper import choose_and_score_hopper_op, choose_token_hopper_op
from .reference import choose_token_reference, top_tokens_reference
from .topology import SamplingTopology, topology_for


def _row_avals(*dtypes: Any) -> Any:
    def avals(logits: Any, *_: Any, **__: Any) -> list[Any]:
        return [ShapeDtypeStruct((logits.shape[0],), jnp.dtype(dtype)) for dtype in dtypes]

    return avals


def _top_avals(logits: Any, *_: Any, count: int, **__: Any) -> list[Any]:
    return [ShapeDtypeStruct((logits.shape[0], count), jnp.dtype("int32"))]


_bind_choose = define_op(
    "choose_token",
    out_avals=_row_avals("int32", "bool"),
    implementations={REFERENCE: choose_token_reference, HOPPER: choose_token_hopper_op},
)
_bind_both = define_op(
    "choose_and_score",
    out_avals=_row_avals("int32", "bool", "float32"),
    implementations={HOPPER: choose_and_score_hopper_op},
)
_bind_cut = define_op(
    "find_cut",
    out_avals=_row_avals("int32", "int32"),
    implementations={REFERENCE: find_cut_reference, HOPPER: find_cut_hopper_op},
)
_bind_top = define_op(
    "top_tokens",
    out_avals=_top_avals,
    implementations={REFERENCE: top_tokens_reference, HOPPER: top_tokens_hopper_op},
)


def choose_token(
    logits: Float32[Array, "R V"],
    key_words: UInt32[Array, "R 2"],
    inv_temperature: Float32[Array, " R"],
    cut_key: Int32[Array, " R"],
    cut_id: Int32[Array, " R"],
    *,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    topology: SamplingTopology | None = None,
) -> tuple[Int32[Array, " R"], Bool[Array, " R"]]:
    """Draws one token of every row, exactly as `SamplingTopology` defines it.

    Args:
      logits: [R, V] float32; -inf forbids a token.
      key_words: [R, 2] uint32, the threefry key of this row at this position.
      inv_temperature: [R] float32, 1 / temperature rounded on the host; 0 is greedy: the largest
        logit, the lowest id on ties, -0.0 equal to 0.0.
      cut_key, cut_id: [R] int32 of `find_cut`: tokens after the cut are not drawn. Not looked at
        when greedy.
      backend: implementation by name.
      num_rows: int32 [], rows that hold data; the others' outputs are unspecified. None: all.
      topology: the definition of the draw; None: the one for V.

    Returns:
      token [R] int32, and bad_row [R] bool: the row holds a NaN or +inf, or nothing but -inf; its
      token is 0 and must not be used.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend, or V is above 2^18.

    Invariance: the results of row r depend on logits[r], key_words[r], inv_temperature[r],
    cut_key[r], cut_id[r], topology and backend only; sums are of integers, exact in any order.
    """
    op = "choose_token"
    _check_logits(op, logits)
    contracts.check_dtype(op, "key_words", key_words, "uint32")
    contracts.check_shape(op, "key_words", key_words, (logits.shape[0], 2))
    _check_rows(op, logits, "float32", inv_temperature=inv_temperature)
    _check_rows(op, logits, "int32", cut_key=cut_key, cut_id=cut_id)
    token, bad_row = _bind_choose(
        logits,
        key_words,
        inv_temperature,
        cut_key,
        cut_id,
        contracts.row_count(logits, num_rows),
        backend=backend,
        topology=topology or topology_for(vocab_size=logits.shape[1]),
    )
    return token, bad_row


def choose_and_score(
    logits: Float32[Array, "R V"],
    key_words: UInt32[Array, "R 2"],
    inv_temperature: Float32[Array, " R"],
    cut: tuple[Int32[Array, " R"], Int32[Array, " R"]],
    logprob_inv_temperature: Float32[Array, " R"],
    logprob_cut: tuple[Int32[Array, " R"], Int32[Array, " R"]],
    *,
    backend: str,
    given: Int32[Array, " R"] | None = None,
    num_rows: Int32[Array, ""] | None = None,
    topology: SamplingTopology | None = None,
) -> tuple[Int32[Array, " R"], Bool[Array, " R"], Float32[Array, " R"]]:
    """`choose_token`, then `target_logprobs` of its token: the bits of both, the logits read once.

    Args:
      logits, key_words, inv_temperature: as in `choose_token`.
      cut: its cut_key and cut_id.
      logprob_inv_temperature, logprob_cut: inv_temperature, cut_key and cut_id of
        `target_logprobs`; the cut keeps the row's maximum, as every cut of `find_cut` does.
      backend: "hopper"; the reference has nothing to share, call the two ops.
      given: int32 [R]; a row whose entry is 0 or more is not drawn but scored.
      num_rows, topology: as in `choose_token`; both ops have blocks of `topology.block`.

    Returns:
      token int32 [R], bad_row bool [R] and logprob float32 [R].

    Raises: as `choose_token`.

    Invariance: as the two ops.
    """
    op = "choose_and_score"
    _check_logits(op, logits)
    contracts.check_dtype(op, "key_words", key_words, "uint32")
    contracts.check_shape(op, "key_words", key_words, (logits.shape[0], 2))
    if given is None:
        given = jnp.full(logits.shape[:1], -1, jnp.int32)
    _check_rows(
        op,
        logits,
        "float32",
        inv_temperature=inv_temperature,
        logprob_inv_temperature=logprob_inv_temperature,
    )
    cuts = dict(cut_key=cut[0], cut_id=cut[1], given=given)
    scored = dict(logprob_cut_key=logprob_cut[0], logprob_cut_id=logprob_cut[1])
    _check_rows(op, logits, "int32", **cuts, **scored)
    token, bad_row, logprob = _bind_both(
        *(logits, key_words, inv_temperature, *cut),
        *(logprob_inv_temperature, *logprob_cut),
        contracts.row_count(logits, num_rows),
        given,
        backend=backend,
        topology=topology or topology_for(vocab_size=logits.shape[1]),
    )
    return token, bad_row, logprob


def find_cut(
    logits: Float32[Array, "R V"],
    inv_temperature: Float32[Array, " R"],
    top_k: Int32[Array, " R"],
    top_p: UInt32[Array, " R"],
    log_min_p: Float32[Array, " R"],
    *,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    topology: SamplingTopology | None = None,
) -> tuple[Int32[Array, " R"], Int32[Array, " R"]]:
    """The last token that top-k, top-p and min-p keep, in descending order of the logit.

    Args:
      logits: [R, V] float32.
      inv_temperature: [R] float32; 0 (greedy) keeps everything.
      top_k: [R] int32; 0, or V and more, is off. Ties at the end keep the lowest ids.
      top_p: [R] uint32, p * 2^32; 0 is off. Of what top-k and min-p leave.
      log_min_p: [R] float32, log(min_p); -inf is off.
      backend, num_rows, topology: as in `choose_token`.

    Returns:
      cut_key and cut_id, [R] int32 each: token v is kept if its `order_key` is above cut_key, or
      equal and v <= cut_id. `float_order.LOWEST` and V where everything is kept. Unspecified for a
      bad row.

    Raises: as `choose_token`.

    Invariance: as `choose_token`. Each implementation cuts by the weights that its own draw takes.
    """
    op = "find_cut"
    _check_logits(op, logits)
    _check_rows(op, logits, "float32", inv_temperature=inv_temperature, log_min_p=log_min_p)
    _check_rows(op, logits, "int32", top_k=top_k)
    _check_rows(op, logits, "uint32", top_p=top_p)
    cut_key, cut_id = _bind_cut(
        logits,
        inv_temperature,
        top_k,
        top_p,
        log_min_p,
        contracts.row_count(logits, num_rows),
        backend=backend,
        topology=topology or topology_for(vocab_size=logits.shape[1]),
    )
    return cut_key, cut_id


def top_tokens(
    logits: Float32[Array, "R V"],
    count: int,
    *,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
) -> Int32[Array, "R N"]:
    """The ids of the `count` largest logits, largest first, the lowest id first on ties.

    Args:
      logits: [R, V] float32.
      count: from 1 to V, static; "hopper" takes up to `MOST_ORDERED`.
      backend, num_rows: as in `choose_token`.

    Returns:
      [R, count] int32; unspecified for a row that holds a NaN.

    Raises:
      ValueError: count, shapes or dtypes do not fit.
      NotImplementedError: as `choose_token`, or the backend does not take that count.

    Invariance: the ids of row r depend on logits[r] only; a smaller count gives a prefix.
    """
    op = "top_tokens"
    _check_logits(op, logits)
    if not 1 <= count <= logits.shape[1]:
        raise ValueError(f"{op}: count must be from 1 to {logits.shape[1]}, got {count}")
    num_rows = contracts.row_count(logits, num_rows)
    return _bind_top(logits, num_rows, backend=backend, count=count)[0]


def _check_logits(op: str, logits: Any) -> None:
    contracts.check_dtype(op, "logits", logits, "float32")
    contracts.check_shape(op, "logits", logits, (None, None))


def _check_rows(op: str, logits: Any, dtype: str, **arrays: Any) -> None:
    for name, array in arrays.items():
        contracts.check_dtype(op, name, array, dtype)
        contracts.check_shape(op, name, array, (logits.shape[0],))
