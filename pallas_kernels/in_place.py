"""Kernels that change arrays in place.

The custom call of such a kernel says that a result and an operand are one buffer. XLA on GPUs may
fuse a call with the slice that makes any of its operands, or with the update of a larger array that
takes any of its results (dynamic-slice fusion, on by default in jaxlib 0.11.2), as in a loop over
stacked layers. The fusion does not say so any more, and each result gets a buffer of its own: the
kernel writes the operand, and whoever reads the result finds what happened to stand there. So
everything goes in and comes out through a barrier, which keeps slices and updates off and costs no
copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def run_in_place(
    kernel: Callable[..., Any], operands: Sequence[jax.Array], changed: Sequence[jax.Array]
) -> tuple[Any, list[jax.Array]]:
    """Runs a kernel on operands, and on refs of arrays that it changes.

    Args:
      kernel: takes the operands, then one ref for each of `changed`.
      operands: any shapes and dtypes.
      changed: any shapes and dtypes; changed in place where the caller gives them away.

    Returns:
      What the kernel returns, and `changed` as it left them.
    """
    operands, changed = lax.optimization_barrier((list(operands), list(changed)))
    refs = [jax.new_ref(array) for array in changed]
    results = kernel(*operands, *refs)
    return lax.optimization_barrier((results, [jax.freeze(ref) for ref in refs]))
