"""From what bench_kernels.py timed to a row for each cell: ours, the library's and their ratio."""

import collections
import json
import pathlib

import numpy as np


def bucket(rows: int) -> int:
    """Rows of the batch that carries `rows`: powers of two from 8 to 256, then multiples of 8."""
    return -(-rows // 8) * 8 if rows > 256 else max(8, 1 << (rows - 1).bit_length())


def cells(result, dtype: str = "bfloat16") -> list[dict]:
    """One row a cell: ours (the fastest schedule measured), the peer and the ratio."""
    ours, peer = {}, {}
    for t in result["times"]:
        key = (t["kind"], t["shape"], t["m"])
        if t["schedule"] is None:
            peer[key] = t
        elif key not in ours or t["us"] < ours[key]["us"]:
            ours[key] = t
    bandwidth = result["header"]["copy_bandwidth_tb_s"] * 1e12
    rows = []
    for (kind, shape, m), p in peer.items():
        t = ours.get((kind, shape, bucket(m)))
        if t is None:
            continue
        parts = 2 if kind == "swiglu" else 1
        moved = 2 * (parts * p["n"] * p["k"] + m * p["k"])
        moved += m * p["n"] * (4 if p["out"] == "float32" else 2)
        floor = max(moved / bandwidth, 2 * parts * m * p["n"] * p["k"] / 989e12) * 1e6
        rows.append(
            dict(
                op="matmul" if kind == "matmul" else "swiglu_matmul",
                case=shape,
                rows=m,
                dtype=dtype,
                ours_us=round(t["us"], 2),
                peer="XLA dot (cuBLAS)" if kind == "matmul" else "XLA dot (cuBLAS) + fused silu",
                peer_us=round(p["us"], 2),
                ratio=round(t["us"] / p["us"], 4),
                ceiling_fraction=round(floor / t["us"], 4),
                schedule=t["schedule"],
                **{f"{who}_range_us": _range(one) for who, one in (("ours", t), ("peer", p))},
            )
        )
    return rows


def label(s) -> str:
    tile = f"{'swap ' if s['swap'] else ''}{s['tile_m']}x{s['tile_n']}x{s['tile_k']}"
    shape = f"st{s['stages']} wg{s['warpgroups']}{s['split']} c{s['cluster_m']}{s['cluster_n']}"
    return f"{tile} {shape} {s['raster']}{s['raster_width']}"


def fastest_cells(results) -> list[dict]:
    """Each cell from the run in which ours was fastest; ours and the peer are of one run."""
    best = {}
    for row in (row for result in results for row in cells(result)):
        key = (row["op"], row["case"], row["rows"])
        if key not in best or row["ours_us"] < best[key]["ours_us"]:
            best[key] = row
    return list(best.values())


def summary(rows, bits) -> None:
    by_case = collections.defaultdict(list)
    for r in rows:
        by_case[r["case"]].append(r)
    for case, members in by_case.items():
        text = " ".join(
            f"{r['rows']}:{r['ours_us']:.1f}/{r['ratio']:.2f}/{r['ceiling_fraction']:.2f}"
            for r in members
        )
        print(f"{case} rows:us/ratio/ceiling {text}")
    plain = [r["ratio"] for r in rows if r["op"] == "matmul"]
    if plain:
        mean = float(np.exp(np.mean(np.log(plain))))
        print(f"cells {len(plain)}, geometric mean {mean:.4f}, worst {max(plain):.3f}")
    ours = [b for b in bits if b["kind"].startswith("bits") and b["schedule"]]
    print(
        f"bits: {len(ours)} schedules, {sum(b['differing'] > 0 for b in ours)} differ; controls",
        [(b["kind"], b["differing"]) for b in bits if b["kind"].startswith("control")],
        "errors",
        [f"{b['kind']}:{b['error']:.3e}" for b in bits if b["schedule"] is None],
        f"ours {max((b['error'] for b in ours), default=0):.3e}",
    )


def write_report(path: pathlib.Path, result: dict, rows: list[dict]) -> None:
    """A line for each row and each proof."""
    lines, proofs = (",\n  ".join(map(json.dumps, part)) for part in (rows, result["bits"]))
    head = json.dumps(result["header"])
    path.write_text(f'{{"header": {head},\n"rows": [\n  {lines}],\n"bits": [\n  {proofs}]}}\n')


def _range(timed: dict) -> list[float]:
    """The fastest and the slowest of the calls whose median `us` is."""
    calls = timed.get("calls", [timed["us"]])
    return [round(min(calls), 2), round(max(calls), 2)]
