"""Marked primitives: how an op of ours is told from the compiler's in a jaxpr.

Every op that does floating-point arithmetic is one JAX primitive whose name starts with
``bi_``. A name scope can be forged by any code, a primitive cannot, so the audit trusts
primitives only. The primitive carries the name of its implementation as a parameter;
nothing here substitutes one implementation for another.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import dispatch
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

PREFIX = "bi_"

REFERENCE = "reference"
HOPPER = "hopper"
BLOCKS = "blocks"  # a body that XLA compiles for a GPU, at one fixed shape
HOPPER_INTERPRET = "hopper_interpret"

_PLATFORMS = {
    REFERENCE: ("cpu", "cuda", "gpu"),
    HOPPER: ("cuda", "gpu"),
    BLOCKS: ("cuda", "gpu"),
    HOPPER_INTERPRET: ("cpu",),
}

# Every primitive that `define_op` made, to the modules of its implementations. Primitives compare
# by identity, so another one of the same name is not in here.
_MADE: dict[Any, tuple[str, ...]] = {}

Implementation = Callable[..., Sequence[jax.Array]]
OutAvals = Callable[..., Sequence[jax.ShapeDtypeStruct]]


def define_op(
    name: str, *, out_avals: OutAvals, implementations: Mapping[str, Implementation]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Makes the marked primitive ``bi_<name>`` and returns the function that binds it.

    Args:
      name: the op's name without the prefix.
      out_avals: ``(*operand_avals, **params) -> [ShapeDtypeStruct]``, without ``backend``.
      implementations: backend name to ``(*operands, **params) -> [Array]``; all must run the
        same topology. Parameters must be hashable.

    Returns:
      ``bind(*operands, backend, **params) -> tuple of arrays``.

    Raises:
      NotImplementedError: (from the returned function) the op has no such backend; at lowering,
        the backend does not run on the platform that is compiled for; under ``vmap``.
    """
    primitive = Primitive(PREFIX + name)
    primitive.multiple_results = True

    def abstract_eval(*avals: Any, backend: str, **params: Any) -> list[Any]:
        del backend
        outs = out_avals(*avals, **params)
        return [ShapedArray(out.shape, out.dtype) for out in outs]

    def lower(ctx: Any, *operands: Any, backend: str, **params: Any) -> Any:
        for platform in ctx.module_context.platforms:
            if platform not in _PLATFORMS[backend]:
                raise NotImplementedError(
                    f"{primitive.name}: the backend '{backend}' does not run on "
                    f"'{platform}' (it runs on {', '.join(_PLATFORMS[backend])})"
                )
        implementation = implementations[backend]

        def run(*arrays: jax.Array) -> Sequence[jax.Array]:
            # The scope lets a reader find the op in the optimised program; it proves nothing.
            with jax.named_scope(primitive.name):
                return implementation(*arrays, **params)

        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)

    def refuse_vmap(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{primitive.name} under vmap is refused: a batched kernel is another program whose "
            "order of additions nobody has proved; put the rows in one flat batch instead"
        )

    primitive.def_impl(lambda *xs, **params: dispatch.apply_primitive(primitive, *xs, **params))
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lower, inline=False)
    batching.primitive_batchers[primitive] = refuse_vmap
    # A partial's own module would be functools: what counts is where its body is written.
    bodies = (getattr(i, "func", i) for i in implementations.values())
    _MADE[primitive] = tuple(sorted({body.__module__ for body in bodies}))

    def bind(*operands: jax.Array, backend: str, **params: Any) -> tuple[jax.Array, ...]:
        if backend not in implementations:
            raise NotImplementedError(
                f"{primitive.name}: expected a backend among "
                f"{sorted(implementations)}, got '{backend}'"
            )
        return tuple(primitive.bind(*operands, backend=backend, **params))

    return bind


def is_marked(primitive: Any) -> bool:
    """Whether a jaxpr equation's primitive is one made by `define_op`; its name proves nothing."""
    return primitive in _MADE


def defining_modules(primitive: Any) -> tuple[str, ...]:
    """Modules of a marked primitive's implementations, sorted; empty for other primitives."""
    return _MADE.get(primitive, ())
