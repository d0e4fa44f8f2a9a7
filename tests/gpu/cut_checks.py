"""What cuts and top tokens have to be, from the weights that the draw's own kernels take."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from bi_jax.pallas_kernels.float_order import LOWEST
from bi_jax.pallas_kernels.log_softmax import hopper_blocks as blocks
from bi_jax.pallas_kernels.sampling.hopper_weights import likelihoods, limb_values
from bi_jax.pallas_kernels.sampling.wide import LIMB_BITS

FIELDS = ("inverse", "top_k", "top_p", "log_min_p")
OFF = dict(inverse=1.0, top_k=0, top_p=0, log_min_p=-np.inf)
DTYPES = dict(top_k=np.int32, top_p=np.uint32)


def _weigh(logits, inverse, top, high, low, *, vocabulary):
    row, index = lax.axis_index("row"), lax.axis_index("block")
    values = blocks.load_values(logits, row, index, vocabulary)
    block = blocks.as_block(values, index, vocabulary)
    everything = -jnp.inf, vocabulary.size
    limbs = limb_values(likelihoods(block, top[row], inverse[row], *everything, vocabulary))
    for out, limb in zip((high, low), limbs, strict=True):
        out[row, pl.ds(index * vocabulary.block, vocabulary.block)] = limb


@functools.partial(jax.jit, static_argnames=("block", "interpret"))
def limbs_of_rows(logits, inverse, *, block: int, interpret: bool):
    """The limbs of all weights, uint32 [R, V] each, by the functions of the draw's kernels."""
    rows, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % block)), constant_values=-jnp.inf)
    vocabulary = blocks.Vocabulary(size=padded.shape[1], block=block)
    top = jnp.max(logits, axis=1)
    out = jax.ShapeDtypeStruct(padded.shape, jnp.uint32)
    high, low = plgpu.kernel(
        functools.partial(_weigh, vocabulary=vocabulary),
        out_type=(out, out),
        grid=(vocabulary.blocks, rows),
        grid_names=("block", "row"),
        compiler_params=blocks.compiler_params(approx_math=True),
        kernel_name="weights_for_tests",
        interpret=blocks.interpret_params(interpret),
    )(padded, inverse, jnp.where(top == 0, 0.0, top))
    return high[:, :vocab], low[:, :vocab]


def weights_of_rows(logits, inverse, *, block: int, interpret: bool = False) -> np.ndarray:
    """uint64 [R, V]."""
    high, low = limbs_of_rows(
        jnp.asarray(logits), jnp.asarray(inverse), block=block, interpret=interpret
    )
    return (np.asarray(high).astype(np.uint64) << np.uint64(LIMB_BITS)) + np.asarray(low)


def ranked(row: np.ndarray) -> np.ndarray:
    """Ids in descending order, the lowest first on ties."""
    return np.argsort(-(row + np.float32(0)), kind="stable")


def expected_cut(row, weights, inverse, top_k, top_p, log_min_p) -> tuple[int, int]:
    """cut_key and cut_id of the definition, in exact integers."""
    vocab = len(row)
    by_count = 0 < top_k < vocab
    if inverse <= 0 or not (by_count or top_p > 0 or log_min_p > -np.inf):
        return LOWEST, vocab
    order = ranked(row)
    with np.errstate(over="ignore", invalid="ignore"):
        gap = (row - row.max()) * np.float32(inverse)
    likely = int((gap >= np.float32(log_min_p)).sum())
    most = max(min(int(top_k) if by_count else vocab, likely), 1)
    last = most - 1
    if top_p > 0:
        upto = np.cumsum(weights[order[:most]], dtype=np.uint64)
        share = -(-int(upto[-1]) * int(top_p) // 2**32)
        last = int(np.searchsorted(upto, np.uint64(share)))
    last = int(order[last])
    bits = int((row[last] + np.float32(0)).view(np.int32))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF, last


def parameters(rows: list[dict]) -> dict[str, np.ndarray]:
    """Arrays of what each row asks for."""
    filled = [OFF | row for row in rows]
    return {
        name: np.array([row[name] for row in filled]).astype(DTYPES.get(name, np.float32))
        for name in FIELDS
    }


def share(p: float) -> int:
    return min(round(p * 2**32), 2**32 - 1)


def adversarial(vocab: int, block: int, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rows that a cut may get wrong, and what they ask for."""
    rng = np.random.default_rng(seed)

    def normal(width):
        return (width * rng.normal(size=vocab)).astype(np.float32)

    flat, usual, peaked = (normal(width) for width in (0.3, 2.5, 8.0))
    ties = np.round(normal(2.5) * 2) / 2
    two = np.where(rng.random(vocab) < 0.3, 1.0, -1.0)
    equal = np.full(vocab, 3.0)
    one = np.full(vocab, -np.inf)
    one[vocab // 3] = -7.0
    few = np.full(vocab, -np.inf)
    few[[1, block - 1, block, vocab - 1]] = 2.0, 1.0, 1.0, 0.5
    edge = np.full(vocab, -9.0)
    edge[[block - 1, block, vocab - 1, 0]] = 4.0, 4.0, 4.0, 5.0
    zeros = -np.abs(normal(1.0))
    zeros[5:90:3] = -0.0
    zeros[4:90:3] = 0.0
    small = (rng.normal(size=vocab) * 1e-41).astype(np.float32)
    far = np.full(vocab, -40.0)
    far[7::5] = -60.0
    far[11] = 0.0
    usual_set = dict(inverse=1 / 0.6, top_k=20, top_p=share(0.95))
    cases = [
        (usual, usual_set),
        (peaked, usual_set),
        (ties, usual_set),
        (flat, usual_set),
        (usual, dict(top_p=share(0.95))),
        (usual, dict(top_p=share(0.5), inverse=3.0)),
        (peaked, dict(top_p=share(0.95))),
        (flat, dict(top_p=share(0.9))),
        (ties, dict(top_p=share(0.8))),
        (usual, dict(top_p=1)),
        (usual, dict(top_p=2**32 - 1)),
        (peaked, dict(top_p=2**32 - 1)),
        (usual, dict(top_k=1)),
        (usual, dict(top_k=vocab - 1)),
        (usual, dict(top_k=vocab)),
        (ties, dict(top_k=50)),
        (usual, dict(top_k=700, top_p=share(0.9))),
        (usual, dict(top_k=vocab // 2, top_p=share(0.9))),
        (usual, dict(log_min_p=np.log(0.05))),
        (usual, dict(log_min_p=0.0)),
        (ties, dict(log_min_p=0.0, top_k=3)),
        (flat, dict(log_min_p=np.log(0.5))),
        (usual, dict(log_min_p=np.log(0.02), top_k=9, top_p=share(0.7))),
        (usual, dict(log_min_p=np.log(0.3), top_k=200, top_p=share(0.7))),
        (two, dict(top_k=20)),
        (two, dict(top_p=share(0.3))),
        (two, dict(top_k=vocab // 2, top_p=share(0.99))),
        (equal, dict(top_k=33, top_p=share(0.5))),
        (equal, dict(top_p=share(0.25))),
        (equal, dict(top_p=1)),
        (one, dict(top_k=20, top_p=share(0.9))),
        (one, dict(top_k=20)),
        (one, dict(top_p=share(0.9))),
        (few, dict(top_k=3)),
        (few, dict(top_k=6, inverse=0.5)),
        (few, dict(top_p=share(0.95))),
        (edge, dict(top_k=2)),
        (edge, dict(top_k=3)),
        (edge, dict(top_k=4, top_p=share(0.99))),
        (zeros, dict(top_k=20)),
        (zeros, dict(top_p=share(0.01))),
        (small, dict(top_k=20)),
        (small, dict(top_k=20, top_p=share(0.5), inverse=1e38)),
        (small, dict(top_p=share(0.5), inverse=1e38)),
        (far, dict(top_p=2**32 - 1)),
        (far, dict(top_k=5)),
        (usual, dict(inverse=0.0, top_k=20)),
        (usual, dict()),
    ]
    rows = np.stack([np.asarray(row, np.float32) for row, _ in cases])
    return rows, parameters([wanted for _, wanted in cases])
