"""Decode attention with keys as the rows of its products: one token of one KV head an item."""

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

from bi_jax.pallas_kernels.attention.hopper_math import EIGHTS, HALF_TILE
from bi_jax.pallas_kernels.attention.kernel_hopper import attention_hopper
from bi_jax.pallas_kernels.attention.schedule import Schedule
from tests.pallas_kernels.test_attention_hopper import Step, check, interpreted, lowered

# Keys that nobody wrote are NaN here, and NumPy, which interprets the products, says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

TURNED = Schedule(consumers=1, overlap="scores", turned=True, ctas=2)
BLOCKS: dict[str, Any] = dict(overlap="blocks", stages=3)


@pytest.mark.parametrize(
    ("step", "options", "window", "kv_split"),
    [
        (Step(queries=(1,), contexts=(140,), rows=1, dtype="float16"), {}, None, None),
        pytest.param(Step(queries=(1, 1), contexts=(300, 64), rows=2), {}, None, None,
                     marks=pytest.mark.slow),
        pytest.param(Step(queries=(1, 2, 1), contexts=(300, 140, 520), rows=4, kv_heads=2, group=2,
                          head_dim=128), dict(columns=2, ctas=3), 200, None,
                     marks=pytest.mark.slow),
        pytest.param(Step(queries=(1, 1), contexts=(140, 129), rows=3, group=8),
                     dict(stages=3, ctas=1), None, None, marks=pytest.mark.slow),
        pytest.param(Step(queries=(1, 1), contexts=(300, 129), rows=2), {}, None, 128,
                     marks=pytest.mark.slow),
        pytest.param(Step(queries=(1, 2, 1), contexts=(300, 140, 520), rows=4, kv_heads=2, group=2,
                          head_dim=128), BLOCKS | dict(columns=2), 200, None,
                     marks=pytest.mark.slow),
    ],
    ids=["chain", "chains", "window", "group_8", "ranges", "blocks"],
)  # fmt: skip
def test_interpreted_kernel_attends(step, options, window, kv_split):
    schedule = dataclasses.replace(TURNED, **options)
    check(*interpreted(step, schedule, window=window, kv_split=kv_split))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 4, 128), dict(stages=3)),
        pytest.param((8, 1, 64), dict(stages=4), marks=pytest.mark.slow),
        pytest.param((2, 8, 128), dict(columns=2, stages=4), marks=pytest.mark.slow),
        pytest.param((2, 4, 128), BLOCKS | dict(columns=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lowers_for_sm90(shape, options):
    schedule = dataclasses.replace(TURNED, **options)
    assert "@mosaic_gpu" in lowered(16, 16, shape, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(stages=2), BLOCKS], ids=str)
def test_no_races(options):
    attention_hopper.clear_cache()
    step = Step(queries=(1, 1), contexts=(290, 129), rows=8)
    schedule = dataclasses.replace(TURNED, **options | dict(ctas=1))
    watch = plgpu.InterpretGPUParams(detect_races=True)
    check(*interpreted(step, schedule, interpret=watch))
    assert not interpreter.get_races().races_found


def test_says_what_it_does_not_serve():
    for wrong in (dict(consumers=2), dict(overlap="turns"), dict(half_rows=True)):
        with pytest.raises(ValueError, match="turned needs"):
            dataclasses.replace(TURNED, **wrong)
    with pytest.raises(ValueError, match="groups that divide 8"):
        lowered(16, 16, (2, 3, 128), schedule=TURNED)
    with pytest.raises(ValueError, match="64 columns a part"):
        lowered(16, 16, (2, 4, 64), schedule=dataclasses.replace(TURNED, columns=2))


def columns_of(layout, shape) -> np.ndarray:
    """Column of each number of row 0 that a thread of warp 0 holds, int [row 0's lanes, held]."""
    layout = layout.to_mgpu()
    strides = layout.tiling.tile_strides((shape[1], 1))
    sizes = layout.tiling.tile_shape(shape)
    registers, lanes = np.ndindex(layout.registers_shape(shape)), np.arange(32)
    held = np.array([sum(i * s for i, s in zip(at, strides, strict=True)) for at in registers])
    width = sizes[layout.vector_dim]
    held = (held[:, None] + np.arange(width) * strides[layout.vector_dim]).reshape(-1)
    place = np.zeros(32, int)
    for d in layout.lane_dims[::-1]:
        place += lanes % sizes[d] * strides[d]
        lanes = lanes // sizes[d]
    found = place[:, None] + held[None]
    return found[place < shape[1]]  # row 0


def butterfly(x: np.ndarray) -> np.float32:
    """The sum of neighbours, then of pairs of them, and so on."""
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]


def test_its_threads_add_in_the_order_of_the_other_layouts():
    """Sums of a row of e in float32: what a register holds of HALF_TILE a lane holds of EIGHTS."""
    e = np.exp2(np.random.default_rng(0).uniform(-20, 0, (64, 128))).astype(np.float32)
    half, eights = columns_of(HALF_TILE, (32, 128)), columns_of(EIGHTS, (8, 128))
    assert half.shape == (4, 32) and eights.shape == (16, 8)
    assert sorted(half.reshape(-1)) == sorted(eights.reshape(-1)) == list(range(128))

    def chain(x):  # [..., n] in order
        total = x[..., 0]
        for n in range(1, x.shape[-1]):
            total = total + x[..., n]
        return total

    differ = 0
    for row in e:
        pairs = row[half].reshape(4, 8, 2, 2)  # thread, pair of its parity, parity, of a pair
        sums = chain(np.moveaxis(pairs, 1, -1))
        of_pairs = sums[:, 0] + sums[:, 1]
        want = butterfly(of_pairs[:, 0] + of_pairs[:, 1])
        assert butterfly(chain(row[eights])) == want
        differ += chain(row) != want
    assert differ > 0  # another order gives other sums
