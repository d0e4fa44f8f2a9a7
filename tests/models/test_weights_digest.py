"""The digest follows names, dtypes, shapes and bytes, and nothing else."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from bi_jax.models.checkpoint import digest, weights_digest

PARAMS = {
    "a.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b.scale": np.array([1.0, -0.0, np.nan], ml_dtypes.bfloat16),
    "c.none": np.zeros((0, 3), np.float32),
}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces of 20 bytes, so that a few numbers make several; of another digest, therefore."""
    monkeypatch.setattr(digest, "PIECE_BYTES", 20)
    return 20


def by_the_docstring(params: dict[str, np.ndarray], piece: int) -> str:
    expected = hashlib.sha256(b"bi_jax weights 2\0")
    for name in sorted(params):
        array = params[name]
        expected.update(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode())
        data = array.tobytes()
        for start in range(0, len(data), piece):
            expected.update(hashlib.sha256(data[start : start + piece]).digest())
    return expected.hexdigest()


def test_it_is_the_hash_that_the_docstring_describes() -> None:
    assert weights_digest(PARAMS) == by_the_docstring(PARAMS, 8 << 20)


def test_a_large_parameter_is_hashed_in_pieces() -> None:
    large = {"w": np.random.default_rng(0).integers(0, 255, (3, 7 << 20), np.uint8)}
    assert weights_digest(large) == by_the_docstring(large, 8 << 20)


def test_the_number_of_threads_changes_nothing(small_pieces: int) -> None:
    rng = np.random.default_rng(0)
    params = {f"p{i}": rng.standard_normal((i, 9)).astype(np.float32) for i in range(40)}
    expected = by_the_docstring(params, small_pieces)
    assert {weights_digest(params, threads=n) for n in (1, 2, 7)} == {expected}


def test_pieces_of_a_device_array_are_those_of_the_host(
    small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; the CPU's arrays are seen in place otherwise."""
    monkeypatch.setattr(digest, "_fetched_in_pieces", lambda array: array.size > 0)
    arrays = {name: jax.device_put(value) for name, value in PARAMS.items()}
    assert weights_digest(arrays) == by_the_docstring(PARAMS, small_pieces)


def test_few_large_arrays_are_on_the_host_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that makes its arrays when asked is not asked for all of them ahead."""
    monkeypatch.setattr(digest, "AHEAD", 2)
    go_on, asked = threading.Event(), []

    class Made(dict):
        def __getitem__(self, name: str) -> np.ndarray:
            asked.append(name)
            return np.full(4, ord(name), np.float32)

    def wait(array: np.ndarray, start: int, count: int) -> np.ndarray:
        assert go_on.wait(30)
        return array[start : start + count]

    monkeypatch.setattr(digest, "_host_piece", wait)
    found: list[str] = []
    names: Any = Made.fromkeys("abcdefgh")
    thread = threading.Thread(target=lambda: found.append(weights_digest(names, threads=1)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and len(asked) <= 3
    go_on.set()
    thread.join(30)
    assert len(asked) == 8 and len(found) == 1


def test_order_layout_and_devices_change_nothing() -> None:
    expected = weights_digest(PARAMS)
    assert weights_digest(dict(reversed(PARAMS.items()))) == expected
    fortran = {k: np.asfortranarray(v) for k, v in PARAMS.items()}
    assert weights_digest(fortran) == expected
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))
    sharded = {**PARAMS, "a.weight": jax.device_put(PARAMS["a.weight"], rows)}
    assert weights_digest(sharded) == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"a.bias": PARAMS["a.weight"]},
        {"a.weight": PARAMS["a.weight"].reshape(6, 4)},
        {"a.weight": PARAMS["a.weight"].view(np.int32)},
        {"a.weight": np.nextafter(PARAMS["a.weight"], np.float32(np.inf))},
        {"b.scale": np.array([1.0, 0.0, np.nan], ml_dtypes.bfloat16)},
    ],
)
def test_anything_else_changes_it(changed: dict[str, np.ndarray]) -> None:
    params = {k: v for k, v in PARAMS.items() if k != "a.weight" or "a.bias" not in changed}
    assert weights_digest({**params, **changed}) != weights_digest(PARAMS)
