"""The Hopper matmul without a GPU: the real kernel interpreted, and every case lowered for sm90.

The interpreter runs the kernel's warpgroups, barriers and copies and looks for races; it does not
give the chip's bits, which tests/gpu/test_matmul_gpu.py compares on the device.
"""

import dataclasses
import functools
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels import shared_memory
from bi_jax.pallas_kernels.matmul import cases, kernel_hopper, layout_hopper, segmented_matmul
from bi_jax.pallas_kernels.matmul.kernel_hopper import (
    matmul_hopper,
    pad_weights,
    swiglu_matmul_hopper,
)
from bi_jax.pallas_kernels.matmul.op_hopper import matmul_hopper_op, swiglu_hopper_op
from bi_jax.pallas_kernels.matmul.schedule import (
    FIXED,
    MANY,
    SEGMENTED,
    TUNED,
    Schedule,
    fitted,
    round_up,
    schedule_for,
    segmented_schedule_for,
    with_room,
)
from bi_jax.pallas_kernels.matmul.topology import MatmulTopology
from bi_jax.pallas_kernels.primitive import HOPPER
from bi_jax.pallas_kernels.shared_memory import CTA_BYTES

NORMAL = Schedule(tile_m=64, tile_n=32, stages=3, ctas=3)
SWAPPED = Schedule(tile_m=16, tile_n=64, stages=3, ctas=2, swap=True)
TWO_WARPGROUPS = Schedule(tile_m=128, tile_n=64, stages=3, ctas=2, warpgroups=2)
SPLIT_N = Schedule(tile_m=64, tile_n=128, stages=3, ctas=1, warpgroups=2, split="n")
THREE_SWAPPED = Schedule(
    tile_m=24, tile_n=192, stages=3, ctas=2, swap=True, split="n", warpgroups=3, out_slots=1
)
CLUSTERED = Schedule(tile_m=64, tile_n=64, stages=3, ctas=4, cluster_n=2)
TURNS = Schedule(tile_m=128, tile_n=64, stages=3, ctas=2, warpgroups=2, split="turns", cluster_n=2)


def operand(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def interpreted(x, w, bias=None, *, out_dtype=jnp.float32, schedule, segments=1):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        if segments > 1:
            y = matmul_hopper(x, w, out_dtype=out_dtype, schedule=schedule, segments=segments)
        elif w.ndim == 3:
            y = swiglu_matmul_hopper(x, w, out_dtype=out_dtype, schedule=schedule)
        else:
            y = matmul_hopper(x, w, bias, out_dtype=out_dtype, schedule=schedule)
    return np.asarray(y)


def expected(x, w, bias=None):
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    if w.ndim == 3:
        gate = x @ w[0].T
        return gate / (1 + np.exp(-gate)) * (x @ w[1].T)
    return x @ w.T + (0 if bias is None else np.asarray(bias, np.float64))


@pytest.mark.parametrize(
    ("schedule", "rows", "n", "options"),
    [
        (NORMAL, 3, 128, {}),
        (NORMAL, 16, 120, {"bias": True}),  # a last tile that hangs over N
        (SWAPPED, 33, 128, {"bias": True}),  # rows that are no multiple of 8
        (SWAPPED, 16, 64, {"parts": 2}),
        (THREE_SWAPPED, 40, 192, {}),  # a last tile that hangs over the rows
        (TWO_WARPGROUPS, 200, 128, {"dtype": jnp.float16}),
        # The last tile leaves a warpgroup without rows.
        (dataclasses.replace(TWO_WARPGROUPS, pass_empty=True), 136, 128, {}),
        (dataclasses.replace(SPLIT_N, weights_first=True), 8, 128, {"parts": 2}),
        (CLUSTERED, 72, 256, {}),
        (TURNS, 136, 128, {}),  # in a cluster
    ],
)
def test_interpreted_product_is_right(schedule, rows, n, options):
    dtype, parts = options.get("dtype", jnp.bfloat16), options.get("parts", 1)
    x = operand(0, rows, 192, dtype=dtype)
    w = operand(1, *((parts,) if parts == 2 else ()), n, 192, dtype=dtype)
    bias = operand(2, n, dtype=dtype) if "bias" in options else None
    y = interpreted(x, w, bias, schedule=schedule)
    reference = expected(x, w, bias)
    error = np.linalg.norm(y - reference) / np.linalg.norm(reference)
    assert y.shape == (rows, n)
    assert error < 1e-6
    # Control: the check sees one wrong weight.
    wrong = expected(x, w.at[..., 0, 0].add(jnp.asarray(1, dtype)), bias)
    assert np.linalg.norm(y - wrong) / np.linalg.norm(reference) > 1e-4


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy inside the interpreter
@pytest.mark.parametrize("schedule", [NORMAL, SWAPPED])
def test_a_row_does_not_see_what_its_neighbours_hold(schedule):
    x, w = operand(0, 16, 192), operand(1, 64, 192)
    clean = interpreted(x, w, schedule=schedule)
    poison = jnp.asarray([np.nan, np.inf, 1e30, -0.0], x.dtype)[:, None]
    poisoned = interpreted(x.at[4:8].set(poison), w, schedule=schedule)
    keep = np.r_[0:4, 8:16]
    assert clean[keep].tobytes() == poisoned[keep].tobytes()
    assert clean[4:8].tobytes() != poisoned[4:8].tobytes()


# Half of the root's waiting sum in shared memory, for each of two warpgroups.
PARKED = dataclasses.replace(TWO_WARPGROUPS, tile_n=32, parked=16)


@pytest.mark.parametrize("schedule", [NORMAL, SWAPPED, PARKED])
def test_segments_are_added_by_one_balanced_tree(schedule):
    x, w = operand(0, 8, 256), operand(1, 64, 256)
    split = functools.partial(jnp.split, indices_or_sections=4, axis=1)
    whole = dataclasses.replace(schedule, parked=0)
    parts = [interpreted(a, b, schedule=whole) for a, b in zip(split(x), split(w), strict=True)]
    wanted = (parts[0] + parts[1]) + (parts[2] + parts[3])
    for weights in (w, jnp.stack(split(w))):
        found = interpreted(x, weights, schedule=schedule, segments=4)
        assert found.tobytes() == wanted.tobytes()
    ascending = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert ascending.tobytes() != wanted.tobytes()


def test_no_warpgroup_waits_for_registers_that_are_not_there():
    assert [kernel_hopper.consumer_registers(n) for n in (1, 2, 3, 4)] == [240, 232, 152, 104]


def test_segments_that_are_no_whole_steps_are_refused():
    x = operand(0, 8, 320)
    with pytest.raises(NotImplementedError, match="4 segments of whole steps of 64"):
        matmul_hopper(x, x, out_dtype="float32", schedule=NORMAL, segments=4)
    with pytest.raises(NotImplementedError, match="8 segments of whole steps of 64"):
        segmented_schedule_for(8, 64, 320, segments=8)
    with pytest.raises(NotImplementedError, match="takes 2, 4, 8 segments of K, got 16"):
        segmented_schedule_for(8, 64, 1024, segments=16)


def test_weights_are_padded_once_and_add_nothing():
    x, w = operand(0, 8, 72), operand(1, 60, 72)
    padded = pad_weights(w)
    assert padded.shape == (64, 128)
    y = interpreted(x, padded, schedule=NORMAL)
    np.testing.assert_allclose(y[:, :60], expected(x, w), rtol=1e-5, atol=1e-5)
    assert not y[:, 60:].any()


def test_refusals_name_what_came():
    x, w = operand(0, 8, 128), operand(1, 64, 128)
    with pytest.raises(NotImplementedError, match="TF32"):
        matmul_hopper(
            x.astype(jnp.float32),
            w.astype(jnp.float32),
            out_dtype=jnp.float32,
            schedule=NORMAL,
        )
    with pytest.raises(ValueError, match="pad it with `pad_weights`"):
        matmul_hopper(x, w[:60], out_dtype=jnp.float32, schedule=NORMAL)
    with pytest.raises(ValueError, match="tile_n=12 must be a positive multiple of 8"):
        Schedule(tile_m=64, tile_n=12)
    with pytest.raises(ValueError, match="swapped"):
        dataclasses.replace(SWAPPED, tile_n=128, warpgroups=2, split="m")
    with pytest.raises(ValueError, match="parked=64 columns of a part of 32"):
        dataclasses.replace(NORMAL, parked=64)


def lowers(rows, n, k, *, parts, out_dtype, schedule, dtype=jnp.bfloat16, bias=False):
    """Compiles for sm90 as far as a machine without a GPU can; raises where the chip would."""
    x = jax.ShapeDtypeStruct((rows, k), dtype)
    w = jax.ShapeDtypeStruct((parts, n, k) if parts == 2 else (n, k), dtype)
    if parts == 2:
        traced = swiglu_matmul_hopper, (x, w)
    else:
        traced = matmul_hopper, (x, w, *([jax.ShapeDtypeStruct((n,), dtype)] if bias else []))
    function, operands = traced

    def call(*arrays):
        return function(*arrays, out_dtype=out_dtype, schedule=schedule)

    program = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",))
    assert program.as_text().count("mosaic_gpu") >= 1


CASES = sorted(
    {
        (2 if name == "gate_up" else 1, n // 2 if name == "gate_up" else n, k)
        for model in (cases.LLAMA_3_1_8B, cases.QWEN3_8B, cases.SMOLLM2_135M)
        for name, (n, k) in model.items()
    }
)


@pytest.mark.parametrize(("parts", "n", "k"), [c for c in CASES if c[2] == 576])
@pytest.mark.parametrize("rows", [3, 40])
def test_small_model_lowers_for_sm90(parts, n, k, rows):
    out = "float32" if n > 32768 else "bfloat16"
    schedule = schedule_for(rows, n, k, parts=parts, out_dtype=out)
    lowers(rows, n, k, parts=parts, out_dtype=out, schedule=schedule)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_one_schedule_mode_lowers_for_every_kind_of_output(parts):
    for rows, out in ((1, "bfloat16"), (264, "float32")):
        assert schedule_for(rows, 4096, 4096, fixed=True) is FIXED
        lowers(rows, 4096, 4096, parts=parts, out_dtype=out, schedule=FIXED)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_swapped_tiles_lower_for_sm90_for_every_kind_of_output(out_dtype):
    tiles = functools.partial(Schedule, swap=True, split="n", out_slots=1, stages=3)
    for s in (
        tiles(tile_m=8, tile_n=64),
        tiles(tile_m=136, tile_n=128, warpgroups=2, cluster_m=2),
        tiles(tile_m=136, tile_n=192, warpgroups=3),
        tiles(tile_m=88, tile_n=256, warpgroups=2),
    ):
        lowers(264, 4096, 1024, parts=1, out_dtype=out_dtype, schedule=s)


def test_wider_results_take_stages_from_the_pipeline():
    s = Schedule(tile_m=136, tile_n=192, swap=True, split="n", warpgroups=3, out_slots=1)
    assert with_room(s, 1, "bfloat16") == s
    assert with_room(s, 1, "float32").stages == 3
    for out_dtype in ("bfloat16", "float32"):
        full = fitted(s, 1, jnp.dtype(out_dtype).itemsize)
        assert memory(full, 264, 4096, 1024, out_dtype=out_dtype) <= CTA_BYTES
        more = dataclasses.replace(full, stages=full.stages + 1)
        asked = memory(more, 264, 4096, 1024, out_dtype=out_dtype)
        # Lowering on a CPU knows the limit too, and names the bytes.
        with pytest.raises(ValueError, match=f"smem_bytes={asked} > max_smem_bytes={CTA_BYTES}"):
            lowers(264, 4096, 1024, parts=1, out_dtype=out_dtype, schedule=more)
        lowers(264, 4096, 1024, parts=1, out_dtype=out_dtype, schedule=full)


def memory(s, rows, n, k, *, out_dtype, parts=1, bias=False, segments=1) -> int:
    problem = layout_hopper.Problem(
        m=round_up(rows, 8),
        n=n,
        k=k,
        parts=parts,
        bias=bias,
        dtype=jnp.dtype(jnp.bfloat16),
        out_dtype=jnp.dtype(out_dtype),
        s=s,
        segments=segments,
        stacked=segments > 1,
    )
    return shared_memory.bytes_of(layout_hopper.scratch_spec(problem).values())


# What nobody tuned: the widths that the rule tells apart, up to 64 columns a multiprocessor.
UNTUNED = [
    (n, k, parts)
    for n in (8, 576, 1024, 2048, 2560, 4608, 5120, 8192, 14336, 49152, 128256)
    for k in (64, 576, 1024, 2048, 5120)
    for parts in (1, 2)
]


def test_whatever_the_op_picks_fits_shared_memory():
    """Every row bucket of the tables and the rule, every kind of result, bias and segments."""
    limits = {limit for table in (TUNED, SEGMENTED) for rows in table.values() for limit, _ in rows}
    row_counts = sorted({1, 2, 4096} | {r for limit in limits - {MANY} for r in (limit, limit + 1)})
    picked = {}
    for n, k, parts in (*TUNED, *UNTUNED):
        for rows, out in itertools.product(row_counts, ("bfloat16", "float32")):
            s = schedule_for(rows, n, k, parts=parts, out_dtype=out)
            picked[s, parts, 1, out, n % 64] = n
            for segments in SEGMENTED if parts == 1 else ():
                if k % (64 * segments) == 0:
                    s = segmented_schedule_for(rows, n, k, segments=segments, out_dtype=out)
                    picked[s, parts, segments, out, n % 64] = n
    asked = {}
    for (s, parts, segments, out, _), n in picked.items():
        new = functools.partial(memory, s, 4096, n, 4096, out_dtype=out, parts=parts)
        asked[s, segments, out] = new(segments=segments, bias=parts == 1)
    assert len(asked) > 200
    assert {key: used for key, used in asked.items() if used > CTA_BYTES} == {}
    # Control: the check sees one stage more.
    assert max(asked.values()) > CTA_BYTES - 4096


def test_biases_and_float16_lower_for_sm90():
    for rows, schedule in ((8, NORMAL), (8, SWAPPED), (200, TWO_WARPGROUPS)):
        lowers(
            rows,
            1536,
            576,
            parts=1,
            out_dtype="float16",
            schedule=schedule,
            dtype=jnp.float16,
            bias=True,
        )


@pytest.mark.parametrize("rows", [8, 64, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("segments", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_segments_lower_for_sm90(rows, segments):
    def call(x, w, bias, num_rows):
        topology = MatmulTopology(k_segments=segments)
        return matmul_hopper_op(x, w, bias, num_rows, out_dtype="bfloat16", topology=topology)

    shapes = ((rows, 14336), "bfloat16"), ((4096, 14336), "bfloat16"), ((0,), "bfloat16")
    operands = [jax.ShapeDtypeStruct(*s) for s in (*shapes, ((), "int32"))]
    text = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("op", [matmul_hopper_op, swiglu_hopper_op])
def test_any_size_lowers_for_sm90(op):
    def call(x, w, num_rows):
        absent = () if op is swiglu_hopper_op else (jnp.zeros((0,), x.dtype),)
        return op(x, w, *absent, num_rows, out_dtype="float32", topology=MatmulTopology())

    w = (2, 1003, 77) if op is swiglu_hopper_op else (1003, 77)
    shapes = ((5, 77), "bfloat16"), (w, "bfloat16"), ((), "int32")
    operands = [jax.ShapeDtypeStruct(*s) for s in shapes]
    traced = jax.jit(call).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert [out.shape for out in jax.tree.leaves(traced.out_info)] == [(5, 1003)]


@pytest.mark.parametrize(
    ("segments", "out_dtype"), [(1, "float32"), (2, "float32"), (8, "bfloat16")]
)
def test_the_segmented_product_is_one_launch(segments, out_dtype):
    """Of a whole model's 8 segments, or of the fewer that a rank has, for a merge with others."""

    def call(x, w):
        return segmented_matmul(x, w, backend=HOPPER, out_dtype=out_dtype)

    for rows, n, depth in ((40, 577, 180), (1000, 576, 192)):
        x = jax.ShapeDtypeStruct((rows, segments * depth), "bfloat16")
        w = jax.ShapeDtypeStruct((segments, n, depth), "bfloat16")
        traced = jax.jit(call).trace(x, w)
        assert jax.tree.leaves(traced.out_info)[0].shape == (rows, n)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("segments", "rows"), [(2, 65), (4, 256), (4, 264), (8, 130), (8, 264), (8, 300), (8, 1 << 20)]
)
def test_the_sums_of_segments_fit_the_registers(segments, rows):
    for out_dtype in ("bfloat16", "float32"):
        s = segmented_schedule_for(rows, 4096, 4096, segments=segments, out_dtype=out_dtype)
        waiting = segments.bit_length() * s.part_n - s.parked
        assert waiting * s.part_m // 128 <= 216


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "n", "k"), CASES)
def test_every_case_lowers_for_sm90(parts, n, k):
    out = "float32" if n > 32768 else "bfloat16"
    for rows in (1, 3, 8, 16, 32, 33, 64, 100, 128, 256, 257, 512, 1000, 1024, 2048, 4096, 8192):
        schedule = schedule_for(rows, n, k, parts=parts, out_dtype=out)
        lowers(rows, n, k, parts=parts, out_dtype=out, schedule=schedule)


def test_equal_call_sites_are_traced_once():
    x, w = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((64, 128), "bfloat16")

    def step(x, w):
        return [matmul_hopper(x, w, out_dtype="bfloat16", schedule=NORMAL) for _ in range(5)]

    text = jax.jit(step).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("call @_launch") == 5
