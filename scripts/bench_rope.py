"""Races the Hopper QK-norm and rotation, keys and values stored into pages, against stock XLA.

    python scripts/bench_rope.py [--rows 1,8,64] [--cases qwen3_8b,llama_8b] [--json FILE]

Device times from the profiler: several launches in one jitted program, each with operands of its
own, all into the same pages; medians. The peer is what a user of stock JAX would write: norm and
rotation in jnp, then a scatter of the keys and one of the values. ceiling_fraction is the bytes
read and written once, at the speed of a copy measured in the same run, over the time; below some
hundred rows everything stays in the L2 cache and the fraction means little.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from device_timing import copy_bandwidth, device_times, header, race_row

from bi_jax.kv_cache import LayerPages
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.pallas_kernels.rope import rope_into_pages
from bi_jax.stock_ops import stock_ops

EPS = 1e-6
LAUNCHES = 6
PAGE = 64
ROWS = (1, 8, 64, 256, 1024, 8192)
# (KV heads, group, head size, QK-norm)
CASES = {
    "qwen3_8b": (8, 4, 128, True),
    "llama_8b": (8, 4, 128, False),
    "smollm2_135m": (3, 3, 64, False),
}


def ours(qkv, cos, sin, pages, batch, **scales):
    q, *stored = rope_into_pages(qkv, cos, sin, *pages, batch, backend="hopper", eps=EPS, **scales)
    return q, LayerPages(*stored)


def xla(qkv, cos, sin, pages, batch, **scales):
    return stock_ops().rope(qkv, cos, sin, pages, batch, eps=EPS, **scales)


def one_request(tokens: int) -> RaggedBatch:
    """A prompt of so many tokens, in pages of descending number."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    pages = -(-tokens // PAGE)
    return RaggedBatch(
        positions=index,
        request=jnp.zeros_like(index),
        query_start=jnp.asarray([0, tokens], jnp.int32),
        page_table=jnp.arange(pages, dtype=jnp.int32)[None, ::-1],
        num_tokens=jnp.asarray(tokens, jnp.int32),
    )


def program(op, case: str, tokens: int):
    """(what is yet to be compiled, arguments)."""
    kv_heads, group, width, normed = CASES[case]
    shape = (tokens, kv_heads, group + 2, width)
    keys = jax.random.split(jax.random.key(tokens), LAUNCHES + 1)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:]]
    tables = tuple(jax.random.uniform(keys[0], (2, tokens, width // 2)))
    scales = dict.fromkeys(
        ("q_scale", "k_scale"), jnp.ones(width, jnp.bfloat16) if normed else None
    )
    pages = (-(-tokens // PAGE) + 1, kv_heads, PAGE, width)

    def run(arrays, tables, batch, scales):
        stored, found = LayerPages(*(jnp.empty(pages, jnp.bfloat16) for _ in range(2))), []
        for qkv in arrays:
            q, stored = op(qkv, *tables, stored, batch, **scales)
            found.append(q)
        return found, stored

    args = (arrays, tables, one_request(tokens), scales)
    return jax.jit(run).lower(*args), args


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    sizes = [int(r) for r in options.rows.split(",")]
    cells = [(case, rows) for case in options.cases.split(",") for rows in sizes]
    programs = [program(op, *cell) for cell in cells for op in (ours, xla)]
    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(lambda p: p[0].compile(), programs))
    runs = [(c, args, LAUNCHES) for c, (_, args) in zip(compiled, programs, strict=True)]
    for run, args, _ in runs:
        jax.block_until_ready(run(*args))
    copy = copy_bandwidth()
    times = device_times(runs)
    found = []
    for (case, rows), us, peer in zip(cells, times[::2], times[1::2], strict=True):
        kv_heads, group, width, _ = CASES[case]
        moved = rows * (2 * kv_heads * (group + 2) * width * 2 + width * 4)
        names = dict(op="rope_into_pages", case=case, peer="XLA's norm, rotation and scatters")
        found.append(race_row(**names, rows=rows, us=us, peer_us=peer, moved=moved, copy=copy))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(header=header(copy, sys.argv), rows=found), file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
