"""Comparison of arrays as bytes, with a report that says where and by how much they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class BitDifference:
    """How two arrays of one shape and dtype differ.

    Attributes:
      count: elements whose bits differ.
      total: elements.
      first: coordinate of the first difference in row-major order.
      actual, expected: the two values there.
      actual_bits, expected_bits: their bit patterns.
      ulps: units in the last place between them; None where one is NaN or they are no floats.
      largest_ulps: the largest such distance among all differing elements, None if there is none.
      largest_at: its coordinate.
    """

    count: int
    total: int
    first: tuple[int, ...]
    actual: Any
    expected: Any
    actual_bits: str
    expected_bits: str
    ulps: int | None
    largest_ulps: int | None
    largest_at: tuple[int, ...] | None

    def __str__(self) -> str:
        share = 100.0 * self.count / self.total
        text = (
            f"{self.count} of {self.total} elements differ ({share:.3g} %); first at "
            f"{list(self.first)}: actual {self.actual!s} ({self.actual_bits}), expected "
            f"{self.expected!s} ({self.expected_bits})"
        )
        if self.ulps is not None:
            text += f", {self.ulps} ULP apart"
        if self.largest_ulps is not None and self.largest_at is not None:
            text += f"; largest distance {self.largest_ulps} ULP at {list(self.largest_at)}"
        return text


def bit_difference(actual: Any, expected: Any) -> BitDifference | None:
    """Compares two arrays byte by byte.

    Args:
      actual: an array of any dtype, JAX or NumPy, on any devices.
      expected: an array of the same shape and dtype.

    Returns:
      None where all bits agree. -0.0 and 0.0 differ, NaNs agree only with the same payload.

    Raises:
      ValueError: shapes or dtypes differ, so there is no element to compare with.
    """
    a, e = _host(actual), _host(expected)
    if a.dtype != e.dtype:
        raise ValueError(f"dtypes differ: actual {a.dtype}, expected {e.dtype}")
    if a.shape != e.shape:
        raise ValueError(f"shapes differ: actual {list(a.shape)}, expected {list(e.shape)}")
    if a.size == 0 or a.tobytes() == e.tobytes():
        return None
    a_bytes = np.ascontiguousarray(a).view(np.uint8).reshape(*_flat_shape(a), -1)
    e_bytes = np.ascontiguousarray(e).view(np.uint8).reshape(*_flat_shape(e), -1)
    places = np.flatnonzero((a_bytes != e_bytes).any(axis=-1))
    first = int(places[0])
    a_flat, e_flat = a.reshape(-1), e.reshape(-1)
    ulps = largest = at = None
    if jnp.issubdtype(a.dtype, jnp.floating):
        distance = _ulp_distance(a_flat[places], e_flat[places])
        ulps = None if distance[0] < 0 else int(distance[0])
        if distance.max() >= 0:
            largest = int(distance.max())
            at = _coordinate(places[int(distance.argmax())], a.shape)
    return BitDifference(
        count=len(places),
        total=a.size,
        first=_coordinate(first, a.shape),
        actual=_show(a_flat[first]),
        expected=_show(e_flat[first]),
        actual_bits=_bits(a_flat[first]),
        expected_bits=_bits(e_flat[first]),
        ulps=ulps,
        largest_ulps=largest,
        largest_at=at,
    )


def assert_same_bits(actual: Any, expected: Any, *, context: str = "") -> None:
    """Raises unless two arrays, or pytrees of arrays, agree in every bit.

    Args:
      actual: an array or a pytree of arrays.
      expected: the same structure, shapes and dtypes.
      context: put in front of the report.

    Raises:
      AssertionError: they differ; says how many elements, the first difference by coordinate, both
        values, both bit patterns, and the distance in units in the last place.
    """
    a_leaves, a_tree = jax.tree_util.tree_flatten_with_path(actual)
    e_leaves, e_tree = jax.tree_util.tree_flatten_with_path(expected)
    start = f"{context}: " if context else ""
    if a_tree != e_tree:
        raise AssertionError(f"{start}structures differ: actual {a_tree}, expected {e_tree}")
    for (path, a), (_, e) in zip(a_leaves, e_leaves, strict=True):
        name = jax.tree_util.keystr(path)
        where = f"{start}at {name}: " if name else start
        try:
            difference = bit_difference(a, e)
        except ValueError as error:
            raise AssertionError(f"{where}{error}") from None
        if difference is not None:
            kind = f"{_host(a).dtype}{list(np.shape(_host(a)))}"
            raise AssertionError(f"{where}bits differ, {kind}: {difference}")


def _host(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def _flat_shape(array: np.ndarray) -> tuple[int, ...]:
    return (array.size,)


def _coordinate(place: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(place), shape))


def _bits(value: Any) -> str:
    # Most significant byte first, as one writes a number.
    return "0x" + np.asarray(value).reshape(1).view(np.uint8)[::-1].tobytes().hex()


def _show(value: Any) -> Any:
    """A NumPy scalar as Python prints it, with every digit that tells it from its neighbours."""
    if value.dtype.kind == "f" or jnp.issubdtype(value.dtype, jnp.floating):
        wide = value if value.dtype == np.float64 else np.float32(value)
        return str(wide)
    return value.item() if hasattr(value, "item") else value


def _ulp_distance(a: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Steps between neighbouring floats of the dtype; -1 where either is NaN."""
    width = a.dtype.itemsize * 8
    signed = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}[width]

    def place(values: np.ndarray) -> np.ndarray:
        # Python integers: the distance between two float64 does not fit an int64.
        bits = values.view(signed).astype(object if width == 64 else np.int64)
        lowest = -(1 << (width - 1))
        return np.where(bits < 0, lowest - bits, bits)

    nan = np.isnan(a.astype(np.float64)) | np.isnan(e.astype(np.float64))
    return np.where(nan, -1, np.abs(place(a) - place(e)))
