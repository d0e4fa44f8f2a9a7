"""The Hopper attention kernel without a GPU: interpreted on small batches, lowered for sm90.

Interpretation checks the roles, the masks, the pages and the barriers; it does not give a GPU's
bits, and it accepts what does not compile, hence the lowering tests.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

from bi_jax.pallas_kernels.attention import hopper_block
from bi_jax.pallas_kernels.attention import hopper_work as work
from bi_jax.pallas_kernels.attention.kernel_hopper import attention_hopper, attention_hopper_op
from bi_jax.pallas_kernels.attention.schedule import Schedule, schedule_for
from bi_jax.pallas_kernels.attention.topology import AttentionTopology
from bi_jax.pallas_kernels.ragged import RaggedBatch

SCALE = 0.088

# Rows and keys that nobody wrote are NaN here, and NumPy, which interprets the products, says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A ragged step on small shapes; what no request wrote is NaN."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    rows: int
    kv_heads: int = 1
    group: int = 4
    head_dim: int = 64
    page: int = 64
    dtype: str = "bfloat16"

    def batch(self) -> RaggedBatch:
        rng = np.random.default_rng(3)
        pages = [-(-c // self.page) for c in self.contexts]
        order = rng.permutation(sum(pages)) + 1
        table = np.full((len(pages), max(pages) + 1), 2**30, np.int32)  # unused entries: any id
        starts = np.concatenate([[0], np.cumsum(self.queries)])
        positions, request = np.full(self.rows, 2**30), np.full(self.rows, 2**30)
        for b, (q, c) in enumerate(zip(self.queries, self.contexts, strict=True)):
            used = sum(pages[:b])
            table[b, : pages[b]] = order[used : used + pages[b]]
            positions[starts[b] : starts[b + 1]] = np.arange(c - q, c)
            request[starts[b] : starts[b + 1]] = b
        return RaggedBatch(
            positions=jnp.asarray(positions, jnp.int32),
            request=jnp.asarray(request, jnp.int32),
            query_start=jnp.asarray(starts, jnp.int32),
            page_table=jnp.asarray(table),
            num_tokens=jnp.int32(sum(self.queries)),
        )

    def arrays(self, batch: RaggedBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
        rng = np.random.default_rng(5)
        tokens = sum(self.queries)
        q = np.full((self.rows, self.kv_heads, self.group, self.head_dim), np.nan, np.float32)
        q[:tokens] = rng.standard_normal(q[:tokens].shape)
        count = sum(-(-c // self.page) for c in self.contexts) + 1
        shape = (count, self.kv_heads, self.page, self.head_dim)
        k, v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        table = np.asarray(batch.page_table)
        for b, c in enumerate(self.contexts):
            for t in range(c):
                for pages in (k, v):
                    new = rng.standard_normal((self.kv_heads, self.head_dim))
                    pages[table[b, t // self.page], :, t % self.page] = new
        return tuple(jnp.asarray(x, self.dtype) for x in (q, k, v))


def expected(q, k, v, batch: RaggedBatch, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64, one query token after the other."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    table, page = np.asarray(batch.page_table), k.shape[2]
    tokens = int(batch.num_tokens)
    o, lse = np.zeros(q[:tokens].shape), np.zeros(q.shape[:3])[:tokens]
    for t in range(tokens):
        last, b = int(batch.positions[t]), int(batch.request[t])
        keys = np.arange(0 if window is None else max(0, last - window + 1), last + 1)
        seen_k, seen_v = (x[table[b, keys // page], :, keys % page] for x in (k, v))  # [S, Nkv, Dh]
        s = np.einsum("ngd,snd->ngs", q[t], seen_k) * SCALE
        e = np.exp(s - s.max(-1, keepdims=True))
        o[t] = np.einsum("ngs,snd->ngd", e, seen_v) / e.sum(-1, keepdims=True)
        lse[t] = s.max(-1) + np.log(e.sum(-1))
    return o, lse


def interpreted(
    step: Step,
    schedule: Schedule,
    *,
    window: int | None = None,
    kv_block: int = 128,
    kv_split: int | None = None,
    interpret=plgpu.InterpretGPUParams(),  # noqa: B008
):
    batch = step.batch()
    q, k, v = step.arrays(batch)
    o, lse = attention_hopper(
        q, k, v, batch, scale=SCALE, window=window, kv_block=kv_block, kv_split=kv_split,
        schedule=schedule, interpret=interpret,
    )  # fmt: skip
    tokens = int(batch.num_tokens)
    return (np.asarray(o)[:tokens], np.asarray(lse)[:tokens]), expected(q, k, v, batch, window)


def check(got, want):
    (o, lse), (true_o, true_lse) = got, want
    assert np.abs(o.astype(np.float64) - true_o).max() < 0.015
    assert np.abs(lse - true_lse).max() < 1e-5


HALF: dict[str, Any] = dict(consumers=1, overlap="scores", half_rows=True)
BLOCKS: dict[str, Any] = HALF | dict(overlap="blocks", stages=3)
ONE_OF_TWO = Step(queries=(1,), contexts=(300,), rows=2, group=3, head_dim=128)
MIXED = Step(queries=(20, 1, 3), contexts=(150, 129, 3), rows=24)


@pytest.mark.parametrize(
    ("step", "schedule", "window"),
    [
        (MIXED, Schedule(consumers=2, ctas=2), None),
        pytest.param(MIXED, Schedule(overlap="scores"), None, marks=pytest.mark.slow),
        pytest.param(MIXED, Schedule(consumers=1, ctas=3), 100, marks=pytest.mark.slow),
        (Step(queries=(1, 1), contexts=(300, 64), rows=2, group=3, dtype="float16"),
         Schedule(**HALF, stages=3, columns=2, ctas=1), None),
        pytest.param(Step(queries=(1, 1), contexts=(130, 64), rows=2, group=3, dtype="float16"),
                     Schedule(consumers=1, stages=3, ctas=1), None, marks=pytest.mark.slow),
        pytest.param(Step(queries=(1, 2, 1), contexts=(300, 140, 520), rows=4),
                     Schedule(**HALF, columns=2, ctas=3), 200, marks=pytest.mark.slow),
        pytest.param(Step(queries=(1, 1), contexts=(140, 130), rows=2, group=1, kv_heads=2),
                     Schedule(**HALF, ctas=2), None, marks=pytest.mark.slow),
        (Step(queries=(1, 1), contexts=(550, 64), rows=2, group=3, dtype="float16"),
         Schedule(**BLOCKS, columns=2, ctas=2), None),
        pytest.param(Step(queries=(1, 2, 1), contexts=(300, 140, 520), rows=4),
                     Schedule(**BLOCKS, ctas=2), 200, marks=pytest.mark.slow),
        pytest.param(ONE_OF_TWO, Schedule(**BLOCKS, columns=2, most_columns=4, ctas=4), None,
                     marks=pytest.mark.slow),
        pytest.param(ONE_OF_TWO, Schedule(**BLOCKS, columns=2, most_columns=4, ctas=2), None,
                     marks=pytest.mark.slow),
        pytest.param(Step(queries=(20, 40), contexts=(150, 41), rows=64, kv_heads=2),
                     Schedule(ctas=3, order="heads"), None, marks=pytest.mark.slow),
        pytest.param(Step(queries=(1, 18), contexts=(129, 18), rows=24, group=8, page=128),
                     Schedule(consumers=2, ctas=1), None, marks=pytest.mark.slow),
    ],
    ids=["two_warpgroups", "overlap_scores", "window", "half_rows", "decode_group_3",
         "half_rows_window", "half_rows_group_1", "blocks", "blocks_window",
         "most_columns", "columns", "by_heads", "page_of_128"],
)  # fmt: skip
def test_interpreted_kernel_attends(step, schedule, window):
    check(*interpreted(step, schedule, window=window))


@pytest.mark.parametrize(
    ("step", "schedule", "window"),
    [
        (MIXED, Schedule(consumers=2, ctas=2), None),
        pytest.param(
            Step(queries=(1, 2), contexts=(300, 140), rows=3, group=3, dtype="float16"),
            Schedule(consumers=1, ctas=3), 150, marks=pytest.mark.slow),
    ],
    ids=["chunks", "window"],
)  # fmt: skip
def test_ranges_of_keys_are_merged(step, schedule, window):
    check(*interpreted(step, schedule, window=window, kv_split=128))


def has_races(overlap: str) -> bool:
    attention_hopper.clear_cache()
    if overlap == "blocks":
        step, schedule = (
            Step(queries=(1, 1), contexts=(290, 129), rows=8),
            Schedule(**BLOCKS, ctas=1),
        )
    else:
        step = Step(queries=(20, 1), contexts=(150, 129), rows=24)
        schedule = Schedule(overlap=overlap, ctas=1)
    watch = plgpu.InterpretGPUParams(detect_races=True)
    check(*interpreted(step, schedule, interpret=watch))
    return interpreter.get_races().races_found


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["turns", "scores", "blocks"])
def test_no_races(overlap):
    assert not has_races(overlap)


@pytest.mark.slow
def test_a_race_is_found(monkeypatch):
    """Control: both warpgroups zero the values' tail, and neither waits for the other."""

    def zero_without_waiting(context, block, slot, _, cta):
        hopper_block.zero_tail(cta.memory.v_smem.at[slot], context - block * 128)

    monkeypatch.setattr(hopper_block, "zero_values_behind", zero_without_waiting)
    assert has_races("scores")


def test_the_check_notices_a_wrong_window():
    step = Step(queries=(1,), contexts=(130,), rows=1)
    batch = step.batch()
    q, k, v = step.arrays(batch)
    got = tuple(x[:1] for x in expected(q, k, v, batch, window=None))
    check(got, got)
    with pytest.raises(AssertionError):
        check(got, expected(q, k, v, batch, window=129))


# --- lowering ------------------------------------------------------------------------------------

SHAPES = [  # KV heads, group, head size
    (8, 4, 128),  # Llama 3.1 8B, Qwen3 8B
    (3, 3, 64),  # SmolLM2
]
MORE_SHAPES = [  # Qwen2.5 7B, Llama 2 7B, and groups of 2, 5, 6 and 8
    (4, 7, 128), (32, 1, 128), (8, 2, 128), (8, 5, 128), (2, 6, 128), (8, 8, 64),
]  # fmt: skip


def lowered(tokens, requests, shape, *, dtype="bfloat16", page=64, **options):
    """The program with the kernel in it, lowered on this machine for a Hopper GPU."""
    kv_heads, group, head_dim = shape
    ints = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)  # noqa: E731
    batch = RaggedBatch(
        positions=ints(tokens), request=ints(tokens), query_start=ints(requests + 1),
        page_table=ints(requests, 33), num_tokens=ints(),
    )  # fmt: skip
    q = jax.ShapeDtypeStruct((tokens, kv_heads, group, head_dim), dtype)
    pages = jax.ShapeDtypeStruct((40, kv_heads, page, head_dim), dtype)
    schedule = schedule_for(
        tokens=tokens, requests=requests, kv_heads=kv_heads, group=group, head_dim=head_dim
    )
    options = dict(scale=SCALE, window=None, kv_block=128, schedule=schedule) | options

    def call(q, k, v, batch):
        return attention_hopper(q, k, v, batch, **options)

    program = jax.jit(call).trace(q, pages, pages, batch).lower(lowering_platforms=("cuda",))
    return program.as_text()


@pytest.mark.parametrize(
    "shape",
    [*SHAPES, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE_SHAPES)],
    ids=lambda s: "x".join(map(str, s)),
)
@pytest.mark.parametrize(("tokens", "requests"), [(2048, 4), (16, 16)], ids=["prefill", "decode"])
def test_lowers_for_sm90(shape, tokens, requests):
    text = lowered(tokens, requests, shape, dtype="float16" if shape[2] == 64 else "bfloat16")
    assert text.count("@mosaic_gpu") >= 1


@pytest.mark.parametrize(
    "options",
    [
        dict(window=100, page=256),
        dict(schedule=Schedule(overlap="scores"), out_dtype="float32"),
        pytest.param(dict(page=16), marks=pytest.mark.slow),
        pytest.param(dict(schedule=Schedule(consumers=1), kv_block=64), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lowers_for_sm90_with(options):
    assert "@mosaic_gpu" in lowered(72, 3, (2, 4, 128), **options)


def test_rows_that_are_no_multiple_of_the_tile_lower():
    assert "@mosaic_gpu" in lowered(3, 3, (2, 4, 128))


@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (16, 64)])
def test_ranges_of_keys_lower_for_sm90(tokens, width):
    def call(q, pages, batch):
        integers = batch.positions, batch.request, batch.query_start, batch.page_table
        topology = AttentionTopology(kv_block=128, kv_split=512)
        return attention_hopper_op(
            *(q, pages, pages, *integers, batch.num_tokens),
            scale=SCALE,
            window=None,
            topology=topology,
        )

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    batch = RaggedBatch(
        positions=array(tokens),
        request=array(tokens),
        query_start=array(tokens + 1),
        page_table=array(tokens, 32),
        num_tokens=array(),
    )
    q, pages = (
        array(tokens, 2, 3, width, dtype=jnp.bfloat16),
        array(40, 2, 64, width, dtype=jnp.bfloat16),
    )
    text = jax.jit(call).trace(q, pages, batch).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def test_ranges_of_a_tile():
    """Two tiles, keys in ranges of 128: a window leaves the first range of the later tile out."""
    tiles = jnp.array([[0, 0, 0, 8, 250, 258, 0, 0], [1, 8, 0, 2, 100, 102, 0, 0], [0] * 8])
    found = {
        window: work.split_tiles(tiles, kv_split=128, splits=3, window=window)
        for window in (None, 120)
    }
    table = np.asarray(found[None])
    count = table[:, work.COUNT]
    used = [(r, s) for r, s in zip(table[:, work.REQUEST], table[:, work.SPLIT], strict=True)]
    assert count[0] == 4 and used[:4] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    table = np.asarray(found[120])
    count = table[:, work.COUNT]
    assert count[0] == 3 and table[:3, work.SPLIT].tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(dtype="float32"), NotImplementedError, "bfloat16 or float16"),
        (dict(shape=(2, 4, 96)), NotImplementedError, "64 and 128"),
        (dict(shape=(2, 9, 128)), NotImplementedError, "1 to 8"),
        (dict(page=12), NotImplementedError, "page_size=12"),
        (dict(schedule=Schedule(stages=4)), ValueError, "shared memory"),
        (
            dict(shape=(2, 5, 128), schedule=Schedule(consumers=1, half_rows=True)),
            ValueError,
            "half_rows",
        ),
        (dict(scale=0.0), ValueError, "scale=0.0"),
    ],
    ids=str,
)
def test_refuses_by_name(change, error, message):
    arguments = dict(tokens=64, requests=2, shape=(2, 4, 128)) | change
    with pytest.raises(error, match=message):
        lowered(**arguments)


# --- the work list -------------------------------------------------------------------------------


ROWS, REQUESTS = 256, 8


@pytest.mark.parametrize(
    ("tile_tokens", "rows", "few"),
    [(8, ROWS, work.FEW), (32, ROWS, work.FEW), (128, ROWS, work.FEW), (8, 8, 512), (128, 256, 4)],
)
def test_tiles_cover_every_token_once(tile_tokens, rows, few, monkeypatch):
    monkeypatch.setattr(work, "FEW", few)
    rng = np.random.default_rng(0)
    cut = jax.jit(lambda batch: work.make_tiles(batch, tokens=rows, tile_tokens=tile_tokens))
    find = jax.jit(lambda tiles: work.token_places(tiles, tokens=rows))
    for trial in range(40):
        shares = rng.dirichlet(np.full(REQUESTS, 0.5))
        queries = rng.multinomial(rng.integers(1, rows + 1), shares)
        contexts = queries + rng.integers(0, 300, REQUESTS) + (queries == 0)
        tokens = int(queries.sum())
        starts = np.concatenate([[0], np.cumsum(queries)])
        positions = [np.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)]
        positions = np.concatenate([*positions, np.full(rows - tokens, -7)])
        batch = RaggedBatch(
            positions=jnp.asarray(positions, jnp.int32),
            request=jnp.zeros(rows, jnp.int32),
            query_start=jnp.asarray(starts, jnp.int32),
            page_table=jnp.zeros((REQUESTS, 1), jnp.int32),
            num_tokens=jnp.int32(tokens),
        )
        tiles = np.asarray(cut(batch))
        count = int(tiles[0, work.COUNT])
        assert count <= tiles.shape[0], trial
        seen = np.zeros(tokens, int)
        for request, first, begin, end, position, context, *_ in tiles[:count]:
            assert first % work.ALIGN == 0 and 0 <= begin < end <= tile_tokens
            own = np.arange(first + begin, first + end)
            seen[own] += 1
            assert starts[request] <= own[0] and own[-1] < starts[request + 1]
            assert np.array_equal(positions[own], position + np.arange(begin, end))
            assert context == contexts[request]
        assert np.all(seen == 1)
        if len(tiles) > work.AT_ONCE:  # longest first
            lengths = tiles[:count, work.POSITION] + tiles[:count, work.END]
            assert np.all(np.diff(lengths) <= 0)
        assert np.all(tiles[count:, work.END] == 0)
        tile, place = (np.asarray(x)[:tokens] for x in find(jnp.asarray(tiles)))
        assert np.array_equal(tiles[tile, work.FIRST_ROW] + place, np.arange(tokens))
