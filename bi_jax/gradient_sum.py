"""Sums of gradients over the sequences of a global batch, in one order for every micro-batch size.

Sequence i of the global batch is leaf i of a binary tree: leaves 2i and 2i + 1 are added, then the
pairs of pairs, and so on. A micro-batch of 1, 2, 4, 8, ... sequences is a whole subtree, so adding
up micro-batches gives the same additions, and the same bits, at each of these sizes. Where the
number of sequences is no power of two, what is left at the end is added from the smallest subtree
up. That holds for losses and other sums as well as for gradients: any pytree of float arrays.

Normalise the loss by a number of the *global* batch (its sequences or its tokens), never of the
micro-batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from bi_jax.pallas_kernels.gradients import (
    clip_factor,
    merge,
    nonnegative_zero,
    scale_by,
    sum_of_squares,
    tree_sum,
)

Tree = Any
TOGETHER = 4  # leaves that are kept as they are and added at once; schedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientSum:
    """The sum of the first `sequences` leaves.

    Attributes:
      nodes: one subtree for every bit set in `sequences`, the largest first: with M micro-batches
        at most log2(M) + 1 copies of the gradients.
      sequences: leaves added so far; static.
    """

    nodes: tuple[Tree, ...]
    sequences: int = dataclasses.field(metadata={"static": True})

    def result(self) -> Tree:
        """The sum of all leaves.

        Raises:
          ValueError: there is none yet.
        """
        if not self.nodes:
            raise ValueError("expected at least one micro-batch before the sum is asked for")
        total = self.nodes[-1]
        for node in reversed(self.nodes[:-1]):
            total = _merge(node, total)
        return total


def accumulate(total: GradientSum | None, gradients: Tree, *, sequences: int) -> GradientSum:
    """Adds the gradients of the next micro-batch.

    Args:
      total: what came before; None at the start of a global batch.
      gradients: of the loss of `sequences` rows, as `jax.grad` of a loss over `token_logprobs`
        gives them: any pytree of float arrays.
      sequences: rows of the micro-batch, a power of two. Rows of padding fill a short one up: they
        change nothing.

    Returns:
      The new sum; `.result()` is the gradient of the global batch.

    Raises:
      ValueError: the size is no power of two, or does not divide the number of rows before it.

    Invariance: the result depends on the gradient of every sequence and on their order in the
    global batch; not on how they are cut into micro-batches.
    """
    if sequences < 1 or sequences & (sequences - 1):
        raise ValueError(f"sequences={sequences} must be a power of two")
    done = 0 if total is None else total.sequences
    if done % sequences:
        raise ValueError(
            f"a micro-batch of {sequences} sequences must start at a multiple of {sequences}, and "
            f"{done} came before it; let sizes descend"
        )
    nodes = [] if total is None else list(total.nodes)
    node = jax.tree.map(nonnegative_zero, gradients)
    size = sequences
    while done & size:
        node = _merge(nodes.pop(), node)
        size *= 2
    return GradientSum(nodes=(*nodes, node), sequences=done + sequences)


def sum_over(fn: Callable[..., Tree], xs: Tree, *, like: Tree = None) -> Tree:
    """The sum of fn(x) over the leading axis of xs by the same tree, inside one program.

    Args:
      fn: ``x -> pytree of float arrays``; called in a loop.
      xs: arrays [n, ...], n at least 1.
      like: a pytree of arrays in whose dtypes fn's are added; None: in their own.

    Returns:
      What `accumulate` gives for n calls of one sequence each. Memory: log2(n) copies at most, and
      those of up to 4 results of fn.

    Invariance: the sum over a multiple of 2^k consecutive entries, 2^k of them, is a subtree of
    the sum over all.
    """
    count = jax.tree.leaves(xs)[0].shape[0]
    together = min(count & -count, TOGETHER)

    def leaf(xs: Tree) -> Tree:
        """The subtree of `together` entries."""
        if together == 1:
            results = jax.tree.map(lambda a: a[None], fn(jax.tree.map(lambda a: a[0], xs)))
        else:
            results = lax.map(fn, xs)
        return jax.tree.map(
            lambda a, to: tree_sum(a, out_dtype=to.dtype.name),
            results,
            results if like is None else like,
        )

    if count == together:
        return leaf(xs)
    count //= together
    xs = jax.tree.map(lambda a: a.reshape(count, together, *a.shape[1:]), xs)
    levels = count.bit_length()
    shapes = jax.eval_shape(leaf, jax.tree.map(lambda a: a[0], xs))
    stack = jax.tree.map(lambda s: jnp.zeros((levels, *s.shape), s.dtype), shapes)

    def add(stack: Tree, step: tuple[jax.Array, Tree]) -> tuple[Tree, None]:
        index, x = step

        def carries(state: tuple[jax.Array, Tree]) -> jax.Array:
            return ((index >> state[0]) & 1) == 1

        def carry(state: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
            level, node = state
            return level + 1, _merge(_at(stack, level), node)

        level, node = lax.while_loop(carries, carry, (jnp.int32(0), leaf(x)))
        stack = jax.tree.map(
            lambda s, n: lax.dynamic_update_index_in_dim(s, n, level, axis=0), stack, node
        )
        return stack, None

    stack, _ = lax.scan(add, stack, (jnp.arange(count, dtype=jnp.int32), xs))
    left = [level for level in range(levels) if (count >> level) & 1]
    total = jax.tree.map(lambda s: s[left[0]], stack)
    for level in left[1:]:
        total = _merge(jax.tree.map(lambda s, at=level: s[at], stack), total)
    return total


def global_norm(gradients: Tree) -> Float32[Array, ""]:
    """The Euclidean norm over all leaves, float32 [].

    Each leaf's sum of squares has the order stated at `sum_of_squares`; the leaves are added in the
    order of `jax.tree.leaves`.

    Invariance: of the gradients alone, in every program.
    """
    return _norm_and_factor(gradients, jnp.inf)[0]


def clip_by_global_norm(gradients: Tree, max_norm: float) -> tuple[Tree, Float32[Array, ""]]:
    """Scales all leaves by max_norm / norm where the norm is above max_norm.

    Args:
      gradients: pytree of float arrays.
      max_norm: above 0.

    Returns:
      The gradients and the norm that they had.

    Raises:
      ValueError: max_norm is not above 0.

    Invariance: of the gradients alone, in every program.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be above 0")
    norm, factor = _norm_and_factor(gradients, max_norm)
    return jax.tree.map(lambda leaf: scale_by(leaf, factor), gradients), norm


def _norm_and_factor(gradients: Tree, max_norm: float) -> tuple[jax.Array, jax.Array]:
    squares = [sum_of_squares(leaf) for leaf in jax.tree.leaves(gradients)]
    total = squares[0]
    for square in squares[1:]:
        total = merge(total, square)
    return clip_factor(total, jnp.float32(max_norm))


def _at(stack: Tree, level: Int32[Array, ""]) -> Tree:
    return jax.tree.map(lambda s: lax.dynamic_index_in_dim(s, level, axis=0, keepdims=False), stack)


def _merge(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(merge, a, b)
