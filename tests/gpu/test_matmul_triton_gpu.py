"""The Hopper matmul's float32 bits are those of an independent kernel in another language."""

import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.matmul.kernel_hopper import matmul_hopper
from bi_jax.pallas_kernels.matmul.schedule import schedule_for
from tests.gpu.test_matmul_gpu import spread

pytest.importorskip("jax_triton")
pytestmark = pytest.mark.gpu

N, K = 1024, 2048
BLOCKS = (
    dict(block_m=64, block_n=64, block_k=64, warps=4),
    dict(block_m=128, block_n=128, block_k=32, warps=8),
    dict(block_m=16, block_n=64, block_k=128, warps=4),  # 16 rows: mma.sync, no wgmma
)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [8, 200])
def test_an_independent_kernel_gives_the_same_float32_bits(rows, dtype):
    from tests.gpu.triton_matmul import triton_matmul

    x, w = spread(10, rows, K, dtype=dtype), spread(11, N, K, dtype=dtype)
    schedule = schedule_for(rows, N, K, out_dtype="float32")
    ours = np.asarray(matmul_hopper(x, w, out_dtype="float32", schedule=schedule))
    for blocks in BLOCKS:
        theirs = np.asarray(triton_matmul(x, w, out_dtype="float32", **blocks))
        assert theirs.tobytes() == ours.tobytes(), blocks
    # Control: the other direction along K shows on this fixture.
    backwards = triton_matmul(x[:, ::-1], w[:, ::-1], out_dtype="float32", **BLOCKS[0])
    assert np.asarray(backwards).tobytes() != ours.tobytes()
