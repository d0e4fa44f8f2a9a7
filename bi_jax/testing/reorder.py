"""The automatic negative control: the same mathematics with another order of additions.

A test of invariance that passes proves something only if a change of order would have shown on its
operands. `reordered` rewrites a function so that every float reduction meets its terms shuffled; if
even that gives the same bits, the operands were too tame. (Backwards would not do: a tree that adds
halves to halves pairs the same terms either way round.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from bi_jax.pallas_kernels.primitive import is_marked

Values = list[Any]


class NothingToReorder(Exception):
    """The function adds nothing up, so it has no order of additions."""


class CannotReorder(Exception):
    """The function holds an op whose order of additions this control cannot change."""


def reordered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function like `fn` whose float dots and sums meet their terms in a shuffled order.

    Sees through jit, loops, conditionals, custom derivatives and rematerialisation; ops of ours are
    given operands that are shuffled along the axes that they reduce over.

    Raises:
      NothingToReorder: (from the returned function) there is no float reduction.
      CannotReorder: (likewise) the only reductions are inside kernels that are not known here.
    """

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        found = _Found()
        flat = jax.jit(lambda *xs: _evaluate(closed.jaxpr, closed.consts, xs, found))(
            *jax.tree.leaves(args)
        )
        if not found.reordered and found.unknown:
            raise CannotReorder(
                f"no control is known for {', '.join(sorted(found.unknown))}: pass a function that "
                "adds in another order as control"
            )
        if not found.reordered:
            raise NothingToReorder("the function adds nothing up")
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    return run


class _Found:
    def __init__(self) -> None:
        self.reordered = 0
        self.unknown: set[str] = set()


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], found: _Found) -> Values:
    env: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        outs = _step(eqn, [read(atom) for atom in eqn.invars], found)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _step(eqn: Any, xs: Values, found: _Found) -> Values:
    name, params = eqn.primitive.name, dict(eqn.params)
    if is_marked(eqn.primitive):
        return _marked(eqn, xs, found)
    floats = any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
    if name == "dot_general" and floats:
        (left, right), _ = params["dimension_numbers"]
        xs = [_shuffled(xs[0], left, found), _shuffled(xs[1], right, found)]
    elif name in ("reduce_sum", "reduce_prod") and floats:
        xs = [_shuffled(xs[0], params["axes"], found)]
    elif name in ("custom_jvp_call", "custom_vjp_call"):
        inner = params["call_jaxpr"]
        return _evaluate(inner, inner.consts, xs, found)
    elif name not in ("scatter-add", "reduce", "reduce_max", "reduce_min", "shard_map"):
        params = {key: _inside(value, found) for key, value in params.items()}
    outs = eqn.primitive.bind(*xs, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _inside(value: Any, found: _Found) -> Any:
    """The same parameter with every program in it rewritten."""
    if isinstance(value, tuple) and value and all(hasattr(v, "eqns") for v in value):
        return tuple(_rewritten(v, found) for v in value)
    return _rewritten(value, found) if hasattr(value, "eqns") else value


def _rewritten(jaxpr: Any, found: _Found) -> Any:
    avals = [v.aval for v in jaxpr.invars]
    return jax.make_jaxpr(lambda *xs: _evaluate(jaxpr, jaxpr.consts, xs, found))(*avals)


def _order(size: int) -> np.ndarray:
    return np.random.default_rng(size).permutation(size).astype(np.int32)


def _shuffled(x: Any, axes: Sequence[int], found: _Found) -> Any:
    found.reordered += 1
    for axis in axes:
        x = jnp.take(x, _order(x.shape[axis]), axis=axis)
    # Without the barrier a compiler may see that a sum of a shuffled array is a sum.
    return lax.optimization_barrier(x)


def _unshuffled(x: Any) -> Any:
    return jnp.take(x, np.argsort(_order(x.shape[-1])), axis=-1)


def _marked(eqn: Any, xs: Values, found: _Found) -> Values:
    name = eqn.primitive.name
    operands, results = _LAST_AXES.get(name, (None, ()))
    if name == "bi_target_logprobs":
        # Each target is looked for where its logit went.
        places = np.argsort(_order(xs[0].shape[-1])).astype(np.int32)
        logits = _shuffled(xs[0], [1], found)
        xs = [logits, jnp.take(places, xs[1], mode="clip"), *xs[2:]]
    elif name == "bi_merge_parts":
        xs = [_shuffled(xs[0], [0], found)]
    elif name == "bi_segmented_matmul":
        x, w, *rest = xs
        parts = _shuffled(x.reshape(len(x), w.shape[0], w.shape[2]), [2], found)
        xs = [parts.reshape(x.shape), _shuffled(w, [2], found), *rest]
    elif operands is None:
        if name not in _ADD_NOTHING or (name.startswith("bi_rope") and _norms(xs)):
            found.unknown.add(name)
    else:
        xs = [
            _shuffled(x, [x.ndim - 1], found) if i in operands and x.size else x
            for i, x in enumerate(xs)
        ]
    outs = list(eqn.primitive.bind(*xs, **eqn.params))
    return [_unshuffled(out) if i in results else out for i, out in enumerate(outs)]


# Operands and results of our ops whose last axis is shuffled in one way.
_LAST_AXES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "bi_matmul": ((0, 1), ()),
    "bi_swiglu_matmul": ((0, 1), ()),
    "bi_rms_norm": ((0, 1), (0,)),
    "bi_add_rms_norm": ((0, 1, 2), (0, 1)),
    "bi_attention": ((0, 1), ()),
}
# Sums of sampling are over integers, exact in any order.
_ADD_NOTHING = (
    *("bi_rope", "bi_rope_into_pages"),
    *("bi_top_tokens", "bi_choose_token", "bi_find_cut"),
)


def _norms(xs: Values) -> bool:
    """Whether a rope has scales of norms, whose sums are inside."""
    return any(x.ndim == 1 and x.size and jnp.issubdtype(x.dtype, jnp.floating) for x in xs)
