"""Checks of the sums over devices: order, message sizes, rows, degrees, and the controls."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tp_claims import RANKS_FOR_ORDER, Claim, Inconclusive, NotHere, need_order, run_claim

from bi_jax import collectives, flags
from bi_jax.audit_program import audit_compiled
from bi_jax.sharding import make_mesh
from bi_jax.testing import assert_same_bits, bit_difference, operands

WIDTH = 4096
SEGMENTS = 8
KIB = 1024
# Around the sizes where XLA and NCCL change their algorithm (256 KiB, 2 MiB), and we ours (1 MiB).
MESSAGE_KIB = (
    *(16, 240, 256, 272, 1008, 1024, 1040, 2032, 2048, 2064),
    *(4096, 16_384, 65_536),
)
PSUM_ROWS = (1, 2, 4, 8, 15, 16, 17, 32, 64, 127, 128, 129, 256, 1024)
FORMS: dict[str, dict[str, int]] = {
    "by size": {},
    "one-shot": {"one_shot_bytes": 1 << 40},
    "two-shot": {"one_shot_bytes": 0},
}

Body = Callable[[jax.Array], Any]


class Group:
    """The first `ranks` devices, and programs on arrays [ranks, ...] whose row r is rank r's."""

    def __init__(self, ranks: int, backend: str) -> None:
        self.ranks, self.backend = ranks, backend
        self.mesh = make_mesh(tp=ranks)
        self._options = flags.compiler_options(jax.default_backend())

    def put(self, terms: np.ndarray) -> jax.Array:
        return jax.device_put(terms, NamedSharding(self.mesh, P("tp")))

    def run(self, body: Body, terms: Any, *, audited: bool = True) -> np.ndarray:
        """What rank 0 holds after `body`, all ranks' copies compared with it."""
        mapped = jax.shard_map(
            lambda x: body(x[0])[None],
            mesh=self.mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False,
        )  # fmt: skip
        jitted = jax.jit(mapped, compiler_options=self._options)
        array = terms if isinstance(terms, jax.Array) else self.put(terms)
        traced = jitted.trace(array)
        compiled = traced.lower().compile()
        if audited:
            audit_compiled(traced, compiled)
        out = compiled(array)
        shards = [np.asarray(s.data)[0] for s in out.addressable_shards]
        for rank, shard in enumerate(shards[1:], 1):
            assert_same_bits(shard, shards[0], context=f"rank {rank} against rank 0")
        return shards[0]

    def ordered(self, terms: Any, *, out_dtype: str = "float32", **form: int) -> np.ndarray:
        return self.run(
            lambda x: collectives.ordered_psum(
                x, "tp", out_dtype=out_dtype, backend=self.backend, **form
            ),
            terms,
        )

    def tree(self, parts: np.ndarray, *, out_dtype: str, **form: int) -> np.ndarray:
        return self.run(
            lambda x: collectives.tree_psum(
                x, "tp", out_dtype=out_dtype, backend=self.backend, **form
            ),
            parts,
        )


def checks(degrees: Sequence[int], backend: str, *, largest_kib: int) -> Iterator[Claim]:
    """Every claim on sums, at each degree above 1."""
    sizes = [kib for kib in MESSAGE_KIB if kib <= largest_kib]
    for ranks in degrees:
        if ranks == 1:
            continue
        group = Group(ranks, backend)
        name = f"{ranks} ranks: "
        yield run_claim(
            f"{name}float32 sums in rank order, {sizes[0]} KiB to {sizes[-1]} KiB, both forms",
            functools.partial(_message_sizes, group, sizes),
        )
        yield run_claim(
            f"{name}a row's sum is the same alone and at every position",
            functools.partial(_positions, group),
        )
        yield run_claim(
            f"{name}bit patterns are moved whole, NaN payloads and -0.0 too",
            functools.partial(_moved, group),
        )
        if ranks < RANKS_FOR_ORDER and ranks != degrees[-1]:
            continue  # the controls are for the larger degrees
        yield run_claim(
            f"{name}control: another rank order has other bits",
            functools.partial(_other_order, group),
        )
        yield run_claim(
            f"{name}control: a plain psum follows the number of rows",
            functools.partial(_plain_psum, group),
        )
    yield run_claim(
        f"one tree of {SEGMENTS} partial sums at degrees {', '.join(map(str, degrees))}",
        functools.partial(_one_tree, degrees, backend),
    )


def _ascending(terms: np.ndarray) -> np.ndarray:
    return functools.reduce(np.add, list(terms))


@functools.cache
def _terms(count: int, rows: int) -> np.ndarray:
    """float32 [count, rows, WIDTH] spread over 2^-20..2^20, 16 different rows again and again."""
    few = operands.spread((count, min(rows, 16), WIDTH), seed=count)
    return np.ascontiguousarray(np.resize(np.swapaxes(few, 0, 1), (rows, count, WIDTH))).swapaxes(
        0, 1
    )


def _message_sizes(group: Group, sizes: Sequence[int]) -> str:
    for kib in sizes:
        rows = kib * KIB // (4 * WIDTH)
        terms = np.ascontiguousarray(_terms(group.ranks, rows))
        assert terms[0].nbytes == kib * KIB
        array, expected = group.put(terms), _ascending(terms)
        for form, options in FORMS.items():
            where = f"{kib} KiB, {form}"
            assert_same_bits(group.ordered(array, **options), expected, context=where)
        rounded = np.asarray(jnp.asarray(expected).astype(jnp.bfloat16))
        got = group.ordered(array, out_dtype="bfloat16")
        assert_same_bits(got, rounded, context=f"{kib} KiB, bfloat16")
    return f"{4 * len(sizes)} programs, audited"


def _positions(group: Group) -> str:
    tried = 0
    for rows in (1, 7, 65):  # the last is above 1 MiB, in two-shot form
        terms = np.array(_terms(group.ranks, rows))
        row = operands.spread((group.ranks, WIDTH), seed=99)
        alone = group.ordered(row[:, None])[0]
        for place in {0, 1, rows // 2, rows - 1} & set(range(rows)):
            beside = terms.copy()
            beside[:, place] = row
            beside[:, (place + 1) % rows] = np.nan if rows > 1 else row
            got = group.ordered(beside)[place]
            assert_same_bits(got, alone, context=f"row {place} of {rows}, a NaN beside it")
            tried += 1
    return f"{tried} positions"


def _moved(group: Group) -> str:
    for dtype in ("float32", "bfloat16"):
        values = operands.spread((9, 70), dtype, seed=5)
        for place, kind in enumerate(operands.NEIGHBOURS):
            values[place % 9, place] = operands.poison((), dtype, kind)
        owner = np.arange(9) % group.ranks
        terms = np.stack(
            [
                np.where((owner == r)[:, None], values, np.zeros((), dtype))
                for r in range(group.ranks)
            ]
        )
        got = group.run(lambda x: collectives.exact_psum_of_one(x, "tp"), terms)
        assert_same_bits(got, values, context=dtype)
        parts = np.broadcast_to(values, (group.ranks, *values.shape))
        got = group.run(lambda x: collectives.gather_along(x, "tp", axis=1), parts)
        assert_same_bits(got, np.concatenate(list(parts), axis=1), context=f"gathered {dtype}")
    return ""


def _other_order(group: Group) -> str:
    need_order(group.ranks)
    terms = np.ascontiguousarray(_terms(group.ranks, 16))
    found = bit_difference(group.ordered(terms[::-1].copy()), group.ordered(terms))
    assert found is not None, "the operands are too tame: reversing the ranks changed no bit"
    return f"{found.count} of {found.total} elements"


def _plain_psum(group: Group) -> str:
    """The sum that everybody takes, of one row among more and more rows."""
    need_order(group.ranks)
    row = operands.spread((group.ranks, WIDTH), seed=98)
    first, differ = None, []
    for rows in PSUM_ROWS:
        terms = np.broadcast_to(row[:, None], (group.ranks, rows, WIDTH))
        got = group.run(lambda x: lax.psum(x, "tp"), np.ascontiguousarray(terms), audited=False)
        first = got[0] if first is None else first
        if any(bit_difference(each, first) is not None for each in got):
            differ.append(rows)
    if not differ:
        message = f"this platform's psum had one result for 1 to {PSUM_ROWS[-1]} rows"
        if jax.default_backend() == "cpu":
            raise NotHere(message)
        raise Inconclusive(message)
    return f"other bits than alone among {', '.join(map(str, differ))} rows"


def _one_tree(degrees: Sequence[int], backend: str) -> str:
    digests = {}
    for rows in (3, 64, 1040):
        parts = np.ascontiguousarray(_terms(SEGMENTS, rows))
        seen = {}
        for ranks in degrees:
            mine = parts.reshape(ranks, SEGMENTS // ranks, rows, WIDTH)
            got = Group(ranks, backend).tree(mine, out_dtype="bfloat16")
            seen[ranks] = hashlib.sha256(got.tobytes()).hexdigest()[:16]
        assert len(set(seen.values())) == 1, f"{rows} rows: {seen}"
        digests[rows] = seen[degrees[0]]
    if len(degrees) == 1:
        raise Inconclusive("needs two degrees, there is one device")
    return ", ".join(f"{rows} rows {digest}" for rows, digest in digests.items())
