"""Checks that a row's bits do not depend on its batch: on size, place or neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import operands
from .bits import BitDifference, bit_difference
from .reorder import CannotReorder, NothingToReorder, reordered

DEFAULT_SIZES = (1, 2, 3, 5, 7, 8, 9, 16, 17, 33)

Axes = int | Sequence[int | None]


class Inconclusive(Exception):
    """A check ended without a difference, but could not have seen one on this fixture.

    Not an AssertionError, so that no `pytest.raises(AssertionError)` takes it for a finding.
    """


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """One way to put rows into a batch.

    Attributes:
      name: for the report.
      rows: int [S], which row of the fixture stands at each place.
      poison: what neighbours hold instead of their rows, one of `operands.NEIGHBOURS`, or None.
      probes: places whose outputs are compared.
    """

    name: str
    rows: np.ndarray
    poison: str | None
    probes: np.ndarray


def assert_batch_invariant(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    batch_axis: Axes = 0,
    out_axis: Axes = 0,
    sizes: Sequence[int] = DEFAULT_SIZES,
    neighbours: Sequence[str] = operands.NEIGHBOURS,
    control: Callable[..., Any] | str | None = "reordered",
) -> None:
    """Raises unless each row of `fn`'s result has the same bits in every batch that is tried.

    The rows of `args` are computed once together. Then they are computed again in batches of other
    sizes, at other places, in other orders, and beside neighbours that hold NaN, infinities and
    other poison, and every row is compared with its first bits.

    Args:
      fn: jitted or not, on one device or on a mesh.
      args: its arguments, pytrees of arrays; what is cut from a placed array is placed like it.
      batch_axis: the batch axis of all arguments, or one entry an argument, None for an argument
        that has no batch (weights).
      out_axis: the batch axis of all results, or one entry a result of a tuple.
      sizes: batch sizes to try beside that of `args`. A size beyond it repeats rows.
      neighbours: kinds of poison, see `operands.NEIGHBOURS`; only float arguments are poisoned.
        Empty for a function whose rows are meant to meet (a norm over the batch would fail anyway).
      control: a function like `fn` that adds in another order, which must be seen to differ on
        `args`; "reordered" makes one from `fn` itself; None does without.

    Raises:
      AssertionError: a row's bits changed; names the batch, the row and the first difference.
      Inconclusive: nothing changed, but nothing could have: one batch only, equal rows, results
        that are not finite, or a control that gave the same bits.
      ValueError: the arguments do not share one batch size, or have no rows.
    """
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ValueError(f"args must be a sequence of arguments, got a {type(args).__name__}")
    in_axes = _per_argument(batch_axis, len(args))
    count = _batch_size(args, in_axes)
    first = _flat(fn(*args))
    axes = _per_result(out_axis, fn, args, len(first))
    _check_result(first, axes, count)
    tried = 0
    for arrangement in arrangements(count, sizes, neighbours, _has_float(args, in_axes)):
        tried += 1
        got = _flat(fn(*_arranged(args, in_axes, arrangement)))
        _compare(got, first, axes, arrangement, count)
    if tried == 0:
        raise Inconclusive("only the given batch was run: name other sizes or add rows")
    _check_power(first, axes, count)
    _check_control(fn, args, first, control)


def arrangements(
    count: int, sizes: Sequence[int], neighbours: Sequence[str], can_poison: bool
) -> Iterator[Arrangement]:
    """Every batch that is tried for a fixture of `count` rows."""
    everywhere = np.arange(count)
    for size in dict.fromkeys(sizes):
        if size < 1:
            raise ValueError(f"sizes holds {size}; a batch has at least one row")
        # Two windows, so that a row comes to stand at more than one place of that size.
        for start in dict.fromkeys((0, max(count - size, 0), count // 2)):
            rows = (start + np.arange(size)) % count
            yield Arrangement(
                name=f"{size} rows from row {start} on",
                rows=rows,
                poison=None,
                probes=np.arange(size),
            )
    if count > 1:
        for name, rows in (
            ("all rows reversed", everywhere[::-1]),
            ("all rows rotated by one", np.roll(everywhere, 1)),
            ("all rows shuffled", np.random.default_rng(0).permutation(count)),
        ):
            yield Arrangement(name=name, rows=rows, poison=None, probes=everywhere)
        for index, kind in enumerate(neighbours if can_poison else ()):
            probe = (0, count // 2, count - 1)[index % 3]
            yield Arrangement(
                name=f"row {probe} among rows of {kind}",
                rows=everywhere,
                poison=kind,
                probes=np.array([probe]),
            )


def _arranged(args: Sequence[Any], axes: Sequence[int | None], how: Arrangement) -> list[Any]:
    def arrange(leaf: Any, axis: int) -> Any:
        if _is_key(leaf):  # its words are one more axis, behind the others
            words = arrange(jax.random.key_data(leaf), axis % np.ndim(leaf))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        host = np.take(np.asarray(leaf), how.rows, axis=axis)
        if how.poison is not None and jnp.issubdtype(host.dtype, jnp.floating):
            bad = operands.poison(host.shape, host.dtype, how.poison)
            place: list[Any] = [slice(None)] * host.ndim
            place[axis] = how.probes
            bad[tuple(place)] = host[tuple(place)]
            host = bad
        if isinstance(leaf, jax.Array) and leaf.committed:
            return jax.device_put(host, leaf.sharding)
        return jnp.asarray(host) if isinstance(leaf, jax.Array) else host

    return [
        arg if axis is None else jax.tree.map(lambda leaf, axis=axis: arrange(leaf, axis), arg)
        for arg, axis in zip(args, axes, strict=True)
    ]


def _compare(
    got: list[Any], first: list[Any], axes: list[int], how: Arrangement, count: int
) -> None:
    for index, (now, before, axis) in enumerate(zip(got, first, axes, strict=True)):
        now, before = np.asarray(now), np.asarray(before)
        if now.shape[axis] != len(how.rows):
            raise AssertionError(
                f"result {index} of {how.name} must have {len(how.rows)} rows on axis {axis}, got "
                f"shape {list(now.shape)}"
            )
        now = np.moveaxis(now, axis, 0)[how.probes]
        before = np.moveaxis(before, axis, 0)[how.rows[how.probes]]
        difference = bit_difference(now, before)
        if difference is not None:
            raise AssertionError(_report(difference, how, index, count, now.dtype))


def _report(difference: BitDifference, how: Arrangement, index: int, count: int, dtype: Any) -> str:
    place = int(how.probes[difference.first[0]])
    return (
        f"not batch-invariant: result {index} ({dtype}) changes with the batch.\n"
        f"  batch: {how.name}, compared with the {count} rows given\n"
        f"  row: {int(how.rows[place])}, which stands at place {place} of that batch\n"
        f"  {difference}\n"
        f"  (coordinates: rows compared first, then the result's other axes)"
    )


def _check_power(first: list[Any], axes: list[int], count: int) -> None:
    """Equal rows or rows of NaN would hide a mix-up of rows."""
    arrays = [np.moveaxis(np.asarray(a), axis, 0) for a, axis in zip(first, axes, strict=True)]
    floats = [a.astype(np.float64) for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)]
    if floats and not any(np.isfinite(a).any() for a in floats):
        raise Inconclusive("no value of the result is finite, so no difference could show")
    if count > 1 and all(len({row.tobytes() for row in a}) == 1 for a in arrays):
        raise Inconclusive("all rows of the result are equal, so a mix-up of rows could not show")


def _check_control(
    fn: Callable[..., Any], args: Sequence[Any], first: list[Any], control: Any
) -> None:
    if control is None:
        return
    if control == "reordered":
        try:
            other = _flat(reordered(fn)(*args))
        except NothingToReorder:
            return
        except CannotReorder as error:
            raise Inconclusive(str(error)) from None
    elif callable(control):
        other = _flat(control(*args))
    else:
        raise ValueError(f"control={control!r} must be a function, 'reordered' or None")
    if len(other) != len(first):
        raise ValueError(f"the control must give {len(first)} results, got {len(other)}")
    if all(bit_difference(a, b) is None for a, b in zip(other, first, strict=True)):
        raise Inconclusive(
            "adding in another order gives the same bits on these operands, so a change of order "
            "could not show: use operands that are spread and cancel (testing.operands.spread)"
        )


def _flat(result: Any) -> list[Any]:
    leaves = jax.tree.leaves(result)
    if not leaves:
        raise ValueError("the function returned no array")
    return leaves


def _per_argument(axis: Axes, count: int) -> list[int | None]:
    if isinstance(axis, int):
        return [axis] * count
    if len(axis) != count:
        raise ValueError(f"batch_axis has {len(axis)} entries for {count} arguments")
    return list(axis)


def _per_result(axis: Axes, fn: Callable[..., Any], args: Sequence[Any], count: int) -> list[int]:
    if isinstance(axis, int):
        return [axis] * count
    results = fn(*args)
    if not isinstance(results, tuple | list) or len(results) != len(axis):
        raise ValueError(f"out_axis has {len(axis)} entries, but not as many results came")
    axes = []
    for place, result in zip(axis, results, strict=True):
        if place is None:
            raise ValueError("out_axis must name the batch axis of every result")
        axes += [place] * len(jax.tree.leaves(result))
    return axes


def _batch_size(args: Sequence[Any], axes: Sequence[int | None]) -> int:
    found = set()
    for place, (arg, axis) in enumerate(zip(args, axes, strict=True)):
        if axis is None:
            continue
        for leaf in jax.tree.leaves(arg):
            shape = np.shape(leaf)
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"argument {place} has shape {list(shape)}, and so no batch axis {axis}; None "
                    "in batch_axis says that it has none"
                )
            found.add(shape[axis])
    if len(found) != 1:
        raise ValueError(f"the batched arguments must share one batch size, got {sorted(found)}")
    if 0 in found:
        raise ValueError("the batched arguments must have at least one row, got 0")
    return found.pop()


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _has_float(args: Sequence[Any], axes: Sequence[int | None]) -> bool:
    return any(
        not _is_key(leaf) and jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating)
        for arg, axis in zip(args, axes, strict=True)
        if axis is not None
        for leaf in jax.tree.leaves(arg)
    )


def _check_result(first: list[Any], axes: list[int], count: int) -> None:
    for index, (leaf, axis) in enumerate(zip(first, axes, strict=True)):
        if np.ndim(leaf) <= axis or np.shape(leaf)[axis] != count:
            raise ValueError(
                f"result {index} must have {count} rows on axis {axis}, got shape "
                f"{list(np.shape(leaf))}; say which axis with out_axis"
            )
