"""The cache gets what weights and steps leave, and the arithmetic is there to be read."""

import re

import pytest

from bi_jax.cache_size import CacheSize, cache_size, plan_pages, step_bytes_of
from bi_jax.config import EngineConfig
from bi_jax.kv_cache import bytes_a_page
from bi_jax.models.families.qwen3 import QWEN3_8B

GIB = 2**30
# What an H200 with JAX's limit at 0.94 of its memory says with the weights of Qwen3-8B on it.
H200 = [{"bytes_limit": 131 * GIB, "bytes_in_use": 16_381_000_000}]
# tokens, rows of logits: temporary bytes of the step's program, read from it on that card.
MEASURED = {
    (8, 8): 7_563_624,
    (64, 64): 41_598_312,
    (256, 256): 158_290_280,
    (8192, 256): 406_974_824,
}


def sized(memory=H200, *, tokens: int = 8192, rows: int = 256, fraction: float = 0.94) -> CacheSize:
    return cache_size(
        memory,
        fraction=fraction,
        step_bytes=step_bytes_of(QWEN3_8B, tokens=tokens, rows=rows),
        page_bytes=bytes_a_page(QWEN3_8B, 64),
        pages_of_one=40_960 // 64,
    )


def test_pages_use_nine_tenths_of_what_weights_and_steps_leave():
    found = sized()
    left = found.limit - found.weights - MEASURED[8192, 256]
    assert found.pages * found.page >= 0.9 * left
    # And all of it fits.
    assert found.weights + found.step + found.pages * found.page <= found.limit * found.fraction


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_the_estimate_of_a_step_holds_what_was_measured(shape):
    tokens, rows = shape
    assert step_bytes_of(QWEN3_8B, tokens=tokens, rows=rows) >= MEASURED[shape]


def test_the_arithmetic_can_be_checked_by_hand():
    text = str(sized())
    limit, fraction, weights, step, left, page, pages = map(float, re.findall(r"[\d.]+", text))
    assert limit * fraction - weights - step == pytest.approx(left, abs=0.02)
    assert left * 1024 / page == pytest.approx(pages, rel=1e-3)


def test_the_fullest_of_several_devices_decides():
    full = {"bytes_limit": 131 * GIB, "bytes_in_use": 60 * GIB}
    assert sized([*H200, full]).pages == sized([full]).pages < sized().pages


def test_no_room_is_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match=r"GiB of weights.*the longest sequence needs 640"):
        sized([{"bytes_limit": 24 * GIB, "bytes_in_use": 16 * GIB}])


def test_a_cpu_and_a_stated_number_need_no_memory_statistics():
    pages = [
        plan_pages(EngineConfig(**settings), QWEN3_8B, max_model_len=1000)
        for settings in ({"num_pages": 77}, {}, {"cache_bytes": 40 * bytes_a_page(QWEN3_8B, 64)})
    ]
    assert pages == [(77, None), (28, None), (40, None)]


def test_a_share_is_a_share():
    with pytest.raises(ValueError, match=r"memory_fraction=1.5 must be in \(0, 1\]"):
        EngineConfig(memory_fraction=1.5)
