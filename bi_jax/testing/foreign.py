"""A check that a program leaves no addition to the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bi_jax.audit_program import inspect
from bi_jax.audit_rules import ADDING_KINDS


def assert_no_foreign_reductions(
    fn: Callable[..., Any],
    *args: Any,
    allow: Mapping[str, str] | None = None,
    trusted: Sequence[str] = (),
    **kwargs: Any,
) -> None:
    """Raises if `fn` adds floats up anywhere but in batch-invariant ops.

    Looks at the jaxpr and at the optimised program for dots, convolutions, sums, running sums,
    scatters, collectives that add, and kernels of unknown order. Element-wise arithmetic passes:
    `bi_jax.audit` is stricter.

    Args:
      fn: jitted or not; pass a differentiated function to check its derivative.
      *args, **kwargs: its arguments, arrays or ShapeDtypeStructs.
      allow: JAX primitive to the reason why it is harmless here.
      trusted: packages of yours whose `define_op` ops count as batch-invariant.

    Raises:
      AssertionError: names each operation, its shape and its source line.
    """
    report = inspect(fn, *args, allow=allow, trusted=trusted, **kwargs)
    found = [finding for finding in report.findings if finding.kind in ADDING_KINDS]
    if found:
        listed = "\n".join(f"  - {finding}" for finding in found)
        raise AssertionError(f"{report.name} has {len(found)} foreign reductions:\n{listed}")
