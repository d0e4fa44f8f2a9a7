"""Each planted fault is caught, named and located; what is exact is let through."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from bi_jax.audit_program import AuditError, audit, inspect
from bi_jax.pallas_kernels.matmul import matmul
from bi_jax.pallas_kernels.primitive import REFERENCE, define_op
from bi_jax.pallas_kernels.rms_norm import rms_norm
from bi_jax.testing import assert_no_foreign_reductions

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(1, 2, 24, dtype=np.float32).reshape(3, 8)
IDS = np.array([0, 1, 1], np.int32)


def ours(x, w):
    return matmul(x, jnp.asarray(w), backend="reference")


class Pooled(nnx.Module):
    """A model whose author hid a mean."""

    def __init__(self):
        self.weight = nnx.Param(jnp.asarray(W))

    def __call__(self, x):
        return jnp.mean(ours(x, self.weight[...]), axis=-1)


def hidden_in_a_model(x):
    return Pooled()(x)


def inside_our_scope(x):
    with jax.named_scope("bi_matmul"):
        return ours(x, W).sum(axis=-1)


def borrowed_name(x):
    primitive = jax.extend.core.Primitive("bi_matmul")
    primitive.def_abstract_eval(lambda a: a)
    jax.interpreters.mlir.register_lowering(
        primitive, jax.interpreters.mlir.lower_fun(lambda a: a * 3 + 1, multiple_results=False)
    )
    return primitive.bind(x)


def scatter_add(x):
    return x.at[IDS].add(x[IDS])


def scatter_with_duplicates(x):
    return x.at[IDS].set(x[IDS])


def round_trip(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def mixed_precision(x):
    return jnp.dot(x.astype(jnp.bfloat16), W.T.astype(jnp.bfloat16), preferred_element_type=x.dtype)


def wide_sum_of_narrow(x):
    return lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16).astype(jnp.float32) + 1.0


def vmapped_op(x):
    return jax.vmap(lambda row: ours(row[None], W)[0])(x)


def foreign_pallas(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(
        x
    )


def callback(x):
    return jax.pure_callback(lambda a: np.asarray(a), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def in_a_loop(x):
    return lax.fori_loop(0, 3, lambda i, c: c @ c.T @ c, x)


def in_a_scan(x):
    return lax.scan(lambda c, row: (c, row.sum()), x, x)


def in_a_branch(x):
    return lax.cond(x[0, 0] > 0, lambda: x.sum(), lambda: x[0, 0])


def under_remat(x):
    return jax.checkpoint(lambda a: jnp.cumsum(a, axis=0))(x)


def in_a_custom_derivative(x):
    @jax.custom_vjp
    def fn(a):
        return a.sum()

    fn.defvjp(lambda a: (a.sum(), None), lambda _, g: (jnp.full((4, 8), g),))
    return fn(x)


def in_nested_jit(x):
    return jax.jit(lambda a: jax.jit(jnp.mean)(a))(x)


def unstable_sort(x):
    return lax.sort((x, -x), num_keys=1, is_stable=False)


FAULTS = [
    (lambda x: jnp.dot(x, x.T), "dot_general", "float32[4,4]", "dot"),
    (hidden_in_a_model, "reduce_sum", "float32[4]", "reduction"),
    (inside_our_scope, "reduce_sum", "float32[4]", "reduction"),
    (borrowed_name, "bi_matmul", "float32[4,8]", "unknown"),
    (jax.nn.softmax, "exp", "float32[4,8]", "arithmetic"),
    (scatter_add, "scatter-add", "float32[4,8]", "scatter"),
    (scatter_with_duplicates, "scatter", "float32[4,8]", "scatter"),
    (lambda x: jnp.cumsum(x, axis=-1), "cumsum", "float32[4,8]", "cumulative"),
    (round_trip, "convert_element_type", "bfloat16[4,8]", "convert"),
    (mixed_precision, "dot_general", "float32[4,3]", "dot"),
    (wide_sum_of_narrow, "add", "float32[4,8]", "arithmetic"),
    (vmapped_op, "bi_matmul", "unknown", "vmap"),
    (foreign_pallas, "pallas_call", "float32[4,8]", "kernel"),
    (callback, "pure_callback", "float32[4,8]", "kernel"),
    (lambda x: x * 2 + 1, "mul", "float32[4,8]", "arithmetic"),
    (in_a_loop, "dot_general", "float32[4,4]", "dot"),
    (in_a_scan, "reduce_sum", "float32[]", "reduction"),
    (in_a_branch, "reduce_sum", "float32[]", "reduction"),
    (under_remat, "cumsum", "float32[4,8]", "cumulative"),
    (in_a_custom_derivative, "reduce_sum", "float32[]", "reduction"),
    (in_nested_jit, "reduce_sum", "float32[]", "reduction"),
    (unstable_sort, "sort", "float32[4,8], float32[4,8]", "unknown"),
    (lambda x: lax.rng_uniform(0.0, 1.0, x.shape), "rng_uniform", "float32[4,8]", "random"),
]


@pytest.mark.parametrize("fn, operation, shape, kind", FAULTS)
def test_a_planted_fault_is_caught(fn, operation, shape, kind):
    with pytest.raises(AuditError) as caught:
        audit(fn, X, compiled=False)
    found = [f for f in caught.value.report.findings if f.operation == operation]
    assert found, str(caught.value)
    assert (found[0].shape, found[0].kind) == (shape, kind)
    line = r"test_audit_faults\.py:\d+"
    assert re.search(line, found[0].where) or fn is jax.nn.softmax, found[0].where
    assert f"{operation} -> {shape} at " in str(caught.value)


@pytest.mark.parametrize(
    "collective", [lax.psum, lax.pmax, functools.partial(lax.psum_scatter, tiled=True)]
)
def test_a_collective_that_computes_is_caught(collective):
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(
        lambda x: collective(x, "tp"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    with pytest.raises(AuditError, match="collective"):
        audit(fn, X, compiled=False)
    moves = jax.shard_map(
        lambda x: lax.all_gather(x, "tp"), mesh=mesh, in_specs=P("tp"), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    assert audit(moves, X).collectives == {"all-gather": 1}


def test_what_the_partitioner_adds_is_seen_in_the_optimised_program():
    """The jaxpr holds our product only; the all-reduce is the compiler's."""
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    place = functools.partial(jax.sharding.NamedSharding, mesh)
    fn = jax.jit(
        lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))),
        in_shardings=(place(P(None, "tp")), place(P(None, "tp"))),
        out_shardings=place(P()),
    )
    report = inspect(fn, X, W, allow={"dot_general": "only to look at what comes out"})
    assert [f.operation for f in report.findings] == ["all-reduce"]
    assert report.findings[0].level == "optimised program"


def test_derivatives_are_audited():
    def loss(x):
        return rms_norm(x, jnp.asarray(W[0]), eps=1e-6, backend="reference")[0, 0] * 1.0

    def through_custom_rule(x):
        @jax.custom_vjp
        def fn(a):
            return a

        fn.defvjp(lambda a: (a, None), lambda _, g: (g.sum(axis=0, keepdims=True) + g,))
        return fn(x)[0, 0]

    assert audit(through_custom_rule, X, compiled=False).passed
    with pytest.raises(AuditError, match="reduce_sum"):
        audit(jax.grad(through_custom_rule), X, compiled=False)
    with pytest.raises(AuditError, match="mul"):
        audit(loss, X, compiled=False)


def exact_work(x, ids):
    rounded = lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)
    gathered = x.at[ids].get(mode="clip")
    moved = x.at[jnp.arange(4)].set(x[::-1], unique_indices=True)
    bits = lax.bitcast_convert_type(x, jnp.int32).sum(axis=0) + jnp.cumsum(ids).sum()
    key = jax.random.fold_in(jax.random.key(1, impl="threefry2x32"), ids[0])
    drawn = jax.random.bits(key, (3,))
    return (
        rounded.astype(jnp.float32),
        gathered,
        moved,
        bits,
        jnp.where(x > 0, -x, x),
        drawn,
        jnp.sort(x),
    )


def test_exact_work_passes_and_is_counted():
    report = audit(exact_work, X, IDS)
    assert report.passed and report.exact["gather"] >= 1 and report.exact["scatter"] == 1
    assert report.integer > 0 and report.instructions > 0 and report.ours == {}


def test_our_ops_pass_and_are_counted():
    report = audit(lambda x: ours(ours(x, W), W.T), X)
    assert report.ours == {"bi_matmul": 2}
    assert report.ours_compiled > 0.5 * report.instructions
    assert "passed" in str(report) and "2 x bi_matmul" in str(report)


def test_what_the_caller_allows_is_reported_with_its_reason():
    report = audit(lambda x: x + 1.0, X, allow={"add": "one addition, nothing to contract"})
    assert report.allowed == {"add": (1, "one addition, nothing to contract")}
    assert "one addition" in str(report)


def test_ops_of_others_count_only_when_they_are_trusted():
    bind = define_op(
        "of_a_stranger", out_avals=lambda a: [a], implementations={REFERENCE: lambda a: (a * 2,)}
    )
    fn = lambda x: bind(x, backend=REFERENCE)[0]  # noqa: E731
    with pytest.raises(AuditError, match="not among the trusted"):
        audit(fn, X)
    assert audit(fn, X, trusted=[__name__]).ours == {"bi_of_a_stranger": 1}


def test_only_additions_count_as_foreign_reductions():
    assert_no_foreign_reductions(lambda x: jnp.exp(ours(x, W)) * 2, X)
    with pytest.raises(AssertionError, match=r"1 foreign reductions:\n  - reduce_sum -> float32"):
        assert_no_foreign_reductions(lambda x: jnp.exp(ours(x, W)).sum(), X)


def test_cotangents_are_added_in_float32_only():
    """JAX adds the cotangents of a value that is used twice."""

    @jax.custom_vjp
    def fn(a):
        return a

    fn.defvjp(lambda a: (a, None), lambda _, g: (g,))

    def twice(x):
        return jax.vjp(lambda a: (fn(a), fn(a)), x)[1]((x, x))

    report = audit(twice, X)
    assert report.exact["add_any"] == 1
    with pytest.raises(AuditError, match=r"add_any -> bfloat16\[4,8\]"):
        audit(twice, jnp.zeros((4, 8), jnp.bfloat16))
