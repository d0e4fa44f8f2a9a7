"""Sums over devices in one fixed order: the data is moved, and the additions are ours.

For use inside `jax.shard_map(..., check_vma=False)`. A float is only moved (all_gather, all_to_all,
an integer psum of bit patterns) or added by the marked op `merge_parts`, so the order of additions
is rank 0, 1, ... n - 1, or one balanced tree, whatever the message size, the rows and the place of
an element in the message.

Small messages take the one-shot form: every rank gathers all terms and adds them. Large ones take
the two-shot form: every rank gets all terms of its share (all_to_all), adds them, and the sums are
gathered. The additions of an element are the same, so the bits are; `ONE_SHOT_BYTES` is schedule.

Derivatives: differentiate *inside* the body, a function of one rank's values (`jax.vjp` of what the
rank computes). Every function here has a custom VJP that encloses its collectives, made for values
that are the same on every rank with cotangents that are: a sum over ranks hands its cotangent to
each term, `enter` adds in rank order what the ranks' products send back. Never differentiate
through shard_map from outside: its transpose adds floats with psum (the audit finds that).
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from bi_jax.pallas_kernels.merge import fits_peers, ordered_sum, peer_sum, tree_sum

ONE_SHOT_BYTES = 1 << 20  # largest float32 term that is sent to every rank whole; schedule
SHARE = 128  # a rank's share of a large message is a multiple of this many elements; schedule

AxisName = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """What is static about a sum over ranks."""

    axis_name: AxisName | None
    tree: bool
    out_dtype: str
    backend: str
    one_shot_bytes: int

    def add(self, terms: jax.Array, *, last: bool = True) -> jax.Array:
        """[n, ...] -> [...]; rounded if these are the last additions."""
        adder = tree_sum if self.tree else ordered_sum
        return adder(terms, out_dtype=self.out_dtype if last else "float32", backend=self.backend)


def ordered_psum(
    x: Float32[Array, "..."],
    axis_name: AxisName,
    *,
    out_dtype: Any = "float32",
    backend: str,
    one_shot_bytes: int = ONE_SHOT_BYTES,
    peers: jax.Array | None = None,
) -> Float[Array, "..."]:
    """The sum over ranks: ((x_0 + x_1) + x_2) + ..., in float32, rounded once.

    Args:
      x: float32, this rank's term.
      axis_name: mesh axis, or axes in the order of their ranks.
      out_dtype: float32, bfloat16 or float16.
      backend: of the additions, by name.
      one_shot_bytes: schedule; terms of more bytes take the two-shot form.
      peers: schedule; where the ranks' own memory is (`peer_memory`), through which one kernel then
        moves and adds the terms. It has no derivative.

    Returns:
      The sum in out_dtype, on every rank.

    Raises:
      ValueError: x is not float32.

    Invariance: element by element, of the ranks' terms; not of the shape, the size of the message,
    one_shot_bytes or peers. The number of ranks is part of the order.
    """
    if peers is not None and fits_peers(x.shape):
        return peer_sum(x, peers, tree=False, out_dtype=out_dtype, backend=backend)
    return _psum(x, _sum_of(axis_name, False, out_dtype, backend, one_shot_bytes))


def tree_psum(
    partials: Float32[Array, "n ..."],
    axis_name: AxisName | None,
    *,
    out_dtype: Any = "float32",
    backend: str,
    one_shot_bytes: int = ONE_SHOT_BYTES,
    peers: jax.Array | None = None,
) -> Float[Array, "..."]:
    """The sum over all ranks' partials by one balanced tree, in float32, rounded at its root.

    Rank r of R holds partials r * n ... r * n + n - 1 of the n * R; the lower levels of the tree
    are added at home, the upper ones across ranks.

    Args:
      partials: float32 [n, ...], n a power of two.
      axis_name: a mesh axis of a power of two of ranks, or axes; None: one rank, nothing is moved.
      out_dtype, backend, one_shot_bytes, peers: as in `ordered_psum`.

    Returns:
      [...] in out_dtype, on every rank.

    Raises:
      ValueError: partials are not float32, or the counts are no powers of two.

    Invariance: element by element, of the n * R partials; not of R, so not of how many devices
    share them, nor of shape, message size, one_shot_bytes or peers.
    """
    if peers is not None and axis_name is not None and fits_peers(partials.shape[1:]):
        mine = partials[0] if partials.shape[0] == 1 else tree_sum(partials, backend=backend)
        return peer_sum(mine, peers, tree=True, out_dtype=out_dtype, backend=backend)
    return _psum(partials, _sum_of(axis_name, True, out_dtype, backend, one_shot_bytes))


def enter(x: Float[Array, "..."], axis_name: AxisName, *, backend: str) -> Float[Array, "..."]:
    """x as it is, at the place where a replicated value meets weights that are sharded by outputs.

    Args:
      x: the same on every rank.
      axis_name, backend: as in `ordered_psum`.

    Invariance: forwards x. Backwards every rank's cotangent is a term: they are added in float32 in
    rank order and rounded once to x's dtype.
    """
    return _enter(x, _sum_of(axis_name, False, x.dtype, backend, ONE_SHOT_BYTES))


def gather_along(
    x: Shaped[Array, "..."], axis_name: AxisName, *, axis: int
) -> Shaped[Array, "..."]:
    """The ranks' parts one after the other along `axis`, on every rank. Moves only.

    Args:
      x: a rank's part, any dtype.
      axis_name: mesh axis or axes.
      axis: dimension of x that the ranks share.

    Invariance: copies; backwards a rank takes its part of the cotangent.
    """
    return _gather(x, axis_name, axis % x.ndim)


def exact_psum_of_one(x: Float[Array, "..."], axis_name: AxisName) -> Float[Array, "..."]:
    """For each element the value of the one rank where its bits are not all zero.

    The bit patterns are added as integers, at most one of which is not 0: exact for every float,
    -0.0 and NaN payloads included. For a table that is sharded by rows: each rank looks up the
    tokens that it holds and gives 0.0 for the others.

    Args:
      x: float32, bfloat16 or float16, +0.0 on all ranks but one.
      axis_name: mesh axis or axes.

    Raises:
      ValueError: x is of another dtype.

    Invariance: copies; backwards every rank has the cotangent whole, its own mask picks from it.
    """
    if x.dtype.name not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"exact_psum_of_one: x must be float32, bfloat16 or float16, got {x.dtype}"
        )
    return _psum_of_one(x, axis_name)


def uses_one_shot(shape: tuple[int, ...], one_shot_bytes: int = ONE_SHOT_BYTES) -> bool:
    """Whether a float32 term of this shape is sent to every rank whole."""
    elements = 1
    for size in shape:
        elements *= size
    return 4 * elements <= one_shot_bytes


def _sum_of(axis_name: Any, tree: bool, out_dtype: Any, backend: str, one_shot_bytes: int) -> _Sum:
    return _Sum(
        axis_name=axis_name,
        tree=tree,
        out_dtype=jnp.dtype(out_dtype).name,
        backend=backend,
        one_shot_bytes=one_shot_bytes,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum(x: jax.Array, call: _Sum) -> jax.Array:
    if call.tree:
        ranks = 1 if call.axis_name is None else lax.axis_size(call.axis_name)
        if ranks & (ranks - 1):
            raise ValueError(f"tree_psum: the ranks must be a power of two, got {ranks}")
        if ranks == 1:
            return call.add(x)
        x = call.add(x, last=False) if x.shape[0] > 1 else x[0]
    return _over_ranks(x, call)


def _over_ranks(x: jax.Array, call: _Sum) -> jax.Array:
    """The terms of all ranks, moved and added."""
    if uses_one_shot(x.shape, call.one_shot_bytes):
        return call.add(lax.all_gather(x, call.axis_name))
    ranks = lax.axis_size(call.axis_name)
    share = -(-x.size // (ranks * SHARE)) * SHARE
    flat = x.reshape(-1)
    if share * ranks > x.size:
        flat = jnp.pad(flat, (0, share * ranks - x.size))
    shares = flat.reshape(ranks, share)
    mine = lax.all_to_all(shares, call.axis_name, split_axis=0, concat_axis=0, tiled=True)
    total = lax.all_gather(call.add(mine), call.axis_name, tiled=True)
    return total[: x.size].reshape(x.shape)


def _psum_forward(x: jax.Array, call: _Sum) -> tuple[jax.Array, jax.Array]:
    # An empty array remembers how many partials there were.
    return _psum(x, call), jnp.zeros((*x.shape[:1], 0) if call.tree else (0,), x.dtype)


def _psum_backward(call: _Sum, terms: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    wide = cotangent.astype(jnp.float32)
    return (jnp.broadcast_to(wide, (*terms.shape[:-1], *wide.shape)),)


_psum.defvjp(_psum_forward, _psum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(x: jax.Array, call: _Sum) -> jax.Array:
    return x


_enter.defvjp(
    lambda x, call: (x, None),
    lambda call, _, cotangent: (_over_ranks(cotangent.astype(jnp.float32), call),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axis_name: AxisName, axis: int) -> jax.Array:
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def _gather_backward(axis_name: AxisName, axis: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    size = g.shape[axis] // lax.axis_size(axis_name)
    return (lax.dynamic_slice_in_dim(g, lax.axis_index(axis_name) * size, size, axis),)


_gather.defvjp(lambda x, axis_name, axis: (_gather(x, axis_name, axis), None), _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum_of_one(x: jax.Array, axis_name: AxisName) -> jax.Array:
    if x.dtype == jnp.float32:
        words = lax.bitcast_convert_type(x, jnp.uint32)
        return lax.bitcast_convert_type(lax.psum(words, axis_name), x.dtype)
    # Two to a word: collectives know no 16-bit integers on every platform. No carry can cross.
    flat = jnp.pad(x.reshape(-1), (0, x.size % 2)).reshape(-1, 2)
    words = lax.psum(lax.bitcast_convert_type(flat, jnp.uint32), axis_name)
    return lax.bitcast_convert_type(words, x.dtype).reshape(-1)[: x.size].reshape(x.shape)


_psum_of_one.defvjp(
    lambda x, axis_name: (_psum_of_one(x, axis_name), None),
    lambda axis_name, _, cotangent: (cotangent,),
)
