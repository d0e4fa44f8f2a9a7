"""Movement between devices passes the audit; float sums over devices do not, wherever they hide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bi_jax import collectives
from bi_jax.audit_hlo import HloAudit
from bi_jax.audit_program import AuditError, audit, inspect
from bi_jax.pallas_kernels.matmul import matmul

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
RANKS, WHOLE = P("tp"), P()
MESH = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def mapped(fn, *, into=RANKS, out=WHOLE, check_vma=False):
    return jax.shard_map(fn, mesh=MESH, in_specs=into, out_specs=out, check_vma=check_vma)


def around(x):
    return lax.ppermute(x, "tp", [(r, (r + 1) % 4) for r in range(4)])


def exact(x):
    gathered = lax.all_gather(x, "tp", tiled=True)
    swapped = lax.all_to_all(gathered, "tp", split_axis=1, concat_axis=0, tiled=True)
    counted = lax.psum(jnp.arange(3, dtype=jnp.int32), "tp")
    chosen = lax.pmax(lax.bitcast_convert_type(x, jnp.int32), "tp")
    ours = collectives.ordered_psum(x, "tp", backend="reference", one_shot_bytes=0)
    return around(gathered), swapped, counted, chosen, ours, collectives.exact_psum_of_one(x, "tp")


def test_movement_and_integer_sums_pass():
    report = audit(mapped(exact), X)
    assert report.passed and report.ours == {"bi_merge_parts": 1}
    assert set(report.collectives) >= {"all-gather", "all-to-all", "collective-permute"}
    assert report.collectives["all-reduce"] >= 1


def in_a_scan(x):
    return lax.scan(lambda c, row: (c, lax.psum(row, "tp")), x, x)[1]


def in_a_branch(x):
    return lax.cond(lax.axis_index("tp") >= 0, lambda: lax.psum(x, "tp"), lambda: x)


def scattered(x):
    return lax.psum_scatter(jnp.tile(x, (4, 1)), "tp", tiled=True)


FAULTS = [
    (lambda x: lax.psum(x, "tp"), "psum"),
    (lambda x: lax.psum(lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16), "tp"), "psum"),
    (lambda x: lax.pmax(x, "tp"), "pmax"),
    (scattered, "reduce_scatter"),
    (in_a_scan, "psum"),
    (in_a_branch, "psum"),
    (jax.checkpoint(lambda x: lax.psum(x, "tp")), "psum"),
    (lambda x: jax.jit(lambda a: lax.psum(a, "tp"))(x), "psum"),
]


@pytest.mark.parametrize("fn, operation", FAULTS)
def test_a_float_sum_over_devices_is_caught(fn, operation):
    with pytest.raises(AuditError) as caught:
        audit(mapped(fn), X, compiled=False)
    found = [f for f in caught.value.report.findings if f.kind == "collective"]
    assert [f.operation for f in found] == [operation]
    assert "test_audit_collectives.py" in found[0].where


def test_it_is_caught_where_variance_over_devices_is_tracked():
    with pytest.raises(AuditError, match="psum_invariant"):
        audit(mapped(lambda x: lax.psum(x, "tp"), check_vma=True), X, compiled=False)


def pulled(fn, cotangent):
    """What jax.vjp makes of a shard_map from outside, with no float arithmetic of its own."""
    return lambda x: jax.vjp(fn, x)[1](cotangent)


@pytest.mark.parametrize("check_vma", [False, True])
def test_what_transposing_shard_map_adds_is_caught(check_vma):
    """A replicated operand, used by every rank: its cotangent is summed by psum."""
    fn = mapped(lambda x: -x, into=P(), out=P("tp"), check_vma=check_vma)
    assert audit(fn, X).passed
    with pytest.raises(AuditError, match="psum"):
        audit(pulled(fn, np.ones((16, 8), np.float32)), X, compiled=False)


def test_what_transposing_a_gather_adds_is_caught():
    def body(x, g):
        return jax.vjp(lambda a: lax.all_gather(a, "tp", tiled=True), x)[1](g)[0]

    def ours(x, g):
        return jax.vjp(lambda a: collectives.gather_along(a, "tp", axis=0), x)[1](g)[0]

    wrap = functools.partial(mapped, into=(P("tp"), P()), out=P("tp"))
    with pytest.raises(AuditError, match="reduce_scatter"):
        audit(wrap(body), X, X, compiled=False)
    assert audit(wrap(ours), X, X).passed


def test_what_a_partitioner_adds_inside_our_ops_is_caught():
    """A CPU's references are programs that a partitioner may cut: then it adds across devices."""
    place = functools.partial(NamedSharding, MESH)
    fn = jax.jit(
        lambda x, w: matmul(x, w, backend="reference"),
        in_shardings=(place(P(None, "tp")), place(P(None, "tp"))),
        out_shardings=place(P()),
    )
    found = [f for f in inspect(fn, X, X).findings if f.kind == "collective"]
    assert found and {f.level for f in found} == {"optimised program"}


ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def findings(start, done, ours=()):
    """Of a program of one asynchronous operation."""
    lines = (
        "HloModule step",
        ADD if "to_apply" in start else "",
        "ENTRY %main (p: f32[8,4]) -> f32[8,4] {",
        "  %p = f32[8,4] parameter(0)",
        f"  %start = {start}",
        f"  ROOT %done = {done}",
        "}",
    )
    return HloAudit("\n".join(lines), ours, {}).findings


PAIR = "(f32[8,4], f32[8,4])"


@pytest.mark.parametrize(
    "start, done",
    [
        (f"{PAIR} all-gather-start(%p), dimensions={{0}}", "f32[8,4] all-gather-done(%start)"),
        (f"(({PAIR}), f32[8,4]) all-to-all-start(%p)", "f32[8,4] all-to-all-done(%start)"),
        (f"{PAIR} collective-permute-start(%p)", "f32[8,4] collective-permute-done(%start)"),
        (f"{PAIR} copy-start(%p)", "f32[8,4] copy-done(%start)"),
        ("u32[8,4] all-reduce-start(%p), to_apply=%add", "u32[8,4] all-reduce-done(%start)"),
    ],
)
def test_asynchronous_movement_passes(start, done):
    assert findings(start, done) == []


@pytest.mark.parametrize(
    "start, done, kind",
    [
        ("f32[8,4] all-reduce-start(%p), to_apply=%add", "all-reduce-done", "collective"),
        (
            f'{PAIR} reduce-scatter-start(%p), to_apply=%add, metadata={{op_name="jit(f)/bi_x/y"}}',
            "reduce-scatter-done",
            "collective",
        ),
        (
            '(f32[8,4], u32[]) custom-call-start(%p), custom_call_target="foreign"',
            "custom-call-done",
            "kernel",
        ),
    ],
)
def test_asynchronous_sums_are_caught(start, done, kind):
    found = findings(start, f"f32[8,4] {done}(%start)", ours=("bi_x",))
    assert [f.kind for f in found] == [kind]
