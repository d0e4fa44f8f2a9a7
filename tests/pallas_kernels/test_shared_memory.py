"""What attention picks fits a CTA's shared memory; the products' tables: test_matmul_hopper.py."""

import dataclasses
import itertools

import jax.numpy as jnp

from bi_jax.pallas_kernels.attention import hopper_problem
from bi_jax.pallas_kernels.attention.schedule import Schedule, schedule_for
from bi_jax.pallas_kernels.shared_memory import CTA_BYTES, bytes_of

BATCHES = ((1, 1), (4, 4), (16, 16), (256, 256), (512, 4), (4096, 1), (32768, 1))


def asked(schedule: Schedule, group: int, head_dim: int, kv_heads: int, split: bool) -> int:
    problem = hopper_problem.Problem(
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=16,  # most barriers' arrivals
        dtype=jnp.dtype(jnp.bfloat16),
        out_dtype=jnp.dtype(jnp.float32 if split else jnp.bfloat16),
        scale=1.0,
        window=None,
        kv_block=128,
        kv_split=2048 if split else None,
        interpret=None,
    )
    return bytes_of(hopper_problem.scratch_types(problem, schedule).values())


def test_whatever_attention_picks_fits():
    found = set()
    heads = itertools.product((64, 128), range(1, 9), (1, 8, 32))
    for (head_dim, group, kv_heads), (tokens, requests) in itertools.product(heads, BATCHES):
        schedule = schedule_for(
            tokens=tokens, requests=requests, kv_heads=kv_heads, group=group, head_dim=head_dim
        )
        found.add((asked(schedule, group, head_dim, kv_heads, False), schedule))
        # As `attention_hopper_op` does for ranges of keys.
        ranges = dataclasses.replace(schedule, stages=2, columns=1)
        found.add((asked(ranges, group, head_dim, kv_heads, True), ranges))
    assert len(found) > 15
    assert [pair for pair in found if pair[0] > CTA_BYTES] == []
    # Control: the check sees one stage more.
    most = max(found, key=lambda pair: pair[0])[1]
    deeper = dataclasses.replace(most, stages=most.stages + 1)
    assert asked(deeper, 8, 128, 8, False) > CTA_BYTES
