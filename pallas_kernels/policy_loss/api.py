"""The public policy loss: checks, then one marked primitive.

XLA rounds exp differently at different shapes, and a micro-batch is a shape: a loss written in jnp
would give each micro-batch size gradients of its own from the second inner update on.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Bool, Float32

from .. import contracts
from ..differentiable import differentiable
from ..primitive import REFERENCE, define_op
from .reference import policy_terms_reference, push_reference


class PolicyTerms(NamedTuple):
    """What `policy_loss` returns.

    Attributes:
      loss: float32 [B], each row's share of the loss.
      ratio: float32 [B, T], exp(logprobs - old); 1 where masked. No gradient.
      kl: float32 [B, T], the estimate against the reference; 0 where masked. No gradient.
    """

    loss: Float32[Array, " B"]
    ratio: Float32[Array, "B T"]
    kl: Float32[Array, "B T"]


def _avals(logprobs: Any, *_: Any, **__: Any) -> list[Any]:
    whole = ShapeDtypeStruct(logprobs.shape, jnp.dtype("float32"))
    return [ShapeDtypeStruct(logprobs.shape[:1], jnp.dtype("float32")), whole, whole, whole]


_bind = define_op(
    "policy_loss", out_avals=_avals, implementations={REFERENCE: policy_terms_reference}
)
_bind_push = define_op(
    "policy_loss_gradient",
    out_avals=lambda slope, _: [ShapeDtypeStruct(slope.shape, slope.dtype)],
    implementations={REFERENCE: push_reference},
)


def _backward(operands: Any, outputs: Any, cotangents: Any, *, backend: str, **_: Any) -> Any:
    (pushed,) = _bind_push(outputs[1], cotangents[0], backend=backend)
    return pushed, *[None] * (len(operands) - 1)


_terms = differentiable(_bind, _backward)


def policy_loss(
    logprobs: Float32[Array, "B T"],
    old: Float32[Array, "B T"],
    advantages: Float32[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    normaliser: Float32[Array, ""],
    reference: Float32[Array, "B T"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    backend: str = REFERENCE,
) -> PolicyTerms:
    """The clipped surrogate (arXiv:1707.06347) with GRPO's KL penalty (arXiv:2402.03300).

        loss[b] = sum over t of (kl_coef (exp(d) - d - 1) - min(r a, clip(r) a)) / normaliser
        r = exp(logprobs - old),  d = reference - logprobs,  a = advantages[b]

    Args:
      logprobs: [B, T], of the model that learns; the only argument with a gradient.
      old: [B, T], as emitted while sampling.
      advantages: [B].
      mask: [B, T], tokens that count; the others may hold anything, NaN too.
      normaliser: [], of the *global* batch: its tokens or its sequences.
      reference: [B, T], of the model to stay near to; None: `old`.
      clip_low, clip_high: the ratio is clipped to 1 - clip_low .. 1 + clip_high.
      kl_coef: weight of the KL penalty.
      backend: implementation by name.

    Returns:
      The loss of each row, ratio and KL of each token.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend.

    Invariance: loss[b] and its gradient depend on row b's tokens that count, in their order, on
    advantages[b] and the settings; not on B, T, padding or other rows.
    """
    op = "policy_loss"
    reference = old if reference is None else reference
    arrays = {"logprobs": logprobs, "old": old, "reference": reference, "mask": mask}
    for name, array in arrays.items():
        contracts.check_dtype(op, name, array, "bool" if name == "mask" else "float32")
        contracts.check_shape(op, name, array, (logprobs.shape[0], logprobs.shape[1]))
    contracts.check_dtype(op, "advantages", advantages, "float32")
    contracts.check_shape(op, "advantages", advantages, (logprobs.shape[0],))
    contracts.check_dtype(op, "normaliser", normaliser, "float32")
    loss, _, ratio, kl = _terms(
        logprobs,
        old,
        reference,
        advantages,
        mask,
        normaliser,
        backend=backend,
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
    )
    return PolicyTerms(loss, ratio, kl)
