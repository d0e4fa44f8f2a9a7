"""Gives a marked primitive its backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .primitive import BLOCKS, HOPPER, REFERENCE

# Where a reference body runs on a GPU: large blocks, so few launches, at one shape.
ON_GPU = dict(rows=256, counted=False)

Bind = Callable[..., tuple[jax.Array, ...]]
Backward = Callable[..., Sequence[jax.Array | None]]


def _all(operands: Sequence[jax.Array], outputs: Sequence[jax.Array]) -> Any:
    return operands, outputs


def differentiable(bind: Bind, backward: Backward, *, saves: Callable[..., Any] = _all) -> Bind:
    """`bind` with a custom VJP.

    Args:
      bind: ``(*operands, **params) -> outputs``, as `define_op` returns it.
      backward: ``(operands, outputs, cotangents, **params) -> cotangents of the operands``, None
        for those without one. Whatever it computes on floats must be marked primitives too.
      saves: ``(operands, outputs) -> (operands, outputs)``, what of them `backward` is given; an
        array that it would hold on to cannot be changed in place.

    Returns:
      A function like `bind`; its bits are those of `bind`, differentiated or not.
    """

    @functools.cache
    def with_params(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        named = dict(params)

        @jax.custom_vjp
        def op(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return bind(*operands, **named)

        def forward(*operands: jax.Array) -> tuple[Any, Any]:
            outputs = bind(*operands, **named)
            return outputs, saves(operands, outputs)

        def pull(saved: Any, cotangents: Any) -> tuple[Any, ...]:
            operands, outputs = saved
            return tuple(backward(operands, outputs, cotangents, **named))

        op.defvjp(forward, pull)
        return op

    def call(*operands: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
        return with_params(tuple(sorted(params.items())))(*operands)

    return call


def backward_backend(backend: str) -> str:
    """The backend of a backward pass that is no kernel, but may consist of some."""
    return BLOCKS if backend == HOPPER else REFERENCE
