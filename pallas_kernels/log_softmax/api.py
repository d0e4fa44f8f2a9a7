"""The public log-probability: checks, then one marked primitive."""

from typing import Any

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float32, Int32

from .. import contracts
from ..differentiable import differentiable
from ..primitive import HOPPER, REFERENCE, define_op
from .kernel_hopper import target_logprobs_hopper_op
from .reference import target_logprobs_reference
from .topology import LogSoftmaxTopology, topology_for
from .vjp import target_logprobs_backward


def _avals(logits: Any, target: Any, *_: Any, **__: Any) -> list[Any]:
    dtype = jnp.dtype("float32")
    return [ShapeDtypeStruct(target.shape, dtype), ShapeDtypeStruct(logits.shape[:1], dtype)]


_bind = define_op(
    "target_logprobs",
    out_avals=_avals,
    implementations={REFERENCE: target_logprobs_reference, HOPPER: target_logprobs_hopper_op},
)
_target_logprobs = differentiable(_bind, target_logprobs_backward)


def target_logprobs(
    logits: Float32[Array, "R V"],
    target: Int32[Array, "R N"],
    inv_temperature: Float32[Array, " R"],
    cut_key: Int32[Array, " R"],
    cut_id: Int32[Array, " R"],
    *,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    topology: LogSoftmaxTopology | None = None,
) -> tuple[Float32[Array, "R N"], Float32[Array, " R"]]:
    """log softmax(logits * inv_temperature over the kept tokens)[target], and the log-sum-exp.

    Sampling and scoring, in every mode, come here: raw has inv_temperature 1 and keeps
    everything, scaled has the request's inv_temperature, processed also its cut.

    Args:
      logits: [R, V] float32.
      target: [R, N] int32, N ids a row: the drawn or given token, then any others.
      inv_temperature: [R] float32, above 0: 1 / temperature rounded on the host.
      cut_key, cut_id: [R] int32, the last kept (key, id) in descending order;
        `float_order.LOWEST` and V keep everything.
      backend: implementation by name.
      num_rows: int32 [], rows that hold data; the others' outputs are unspecified. None: all.
      topology: the order of additions; None: the one for V.

    Returns:
      logprob [R, N] float32: -inf for a token that is not kept; NaN for an id outside the
      vocabulary and for all of a row that holds a NaN or +inf, or nothing but -inf.
      log_sum_exp [R] float32.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend.

    Invariance: logprob[r, n] depends on logits[r], target[r, n], inv_temperature[r],
    cut_key[r], cut_id[r], topology and backend only; not on R, N, num_rows or other rows.
    """
    op = "target_logprobs"
    contracts.check_dtype(op, "logits", logits, "float32")
    contracts.check_shape(op, "logits", logits, (None, None))
    rows = logits.shape[0]
    contracts.check_dtype(op, "target", target, "int32")
    contracts.check_shape(op, "target", target, (rows, None))
    contracts.check_dtype(op, "inv_temperature", inv_temperature, "float32")
    contracts.check_shape(op, "inv_temperature", inv_temperature, (rows,))
    for name, array in (("cut_key", cut_key), ("cut_id", cut_id)):
        contracts.check_dtype(op, name, array, "int32")
        contracts.check_shape(op, name, array, (rows,))
    logprob, log_sum_exp = _target_logprobs(
        logits,
        target,
        inv_temperature,
        cut_key,
        cut_id,
        contracts.row_count(logits, num_rows),
        backend=backend,
        topology=topology or topology_for(vocab_size=logits.shape[1]),
    )
    return logprob, log_sum_exp
