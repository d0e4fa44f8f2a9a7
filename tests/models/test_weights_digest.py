"""The digest follows names, dtypes, shapes and bytes, and nothing else."""

from __future__ import annotations

import hashlib

import jax
import ml_dtypes
import numpy as np
import pytest

from bi_jax.models.checkpoint import weights_digest

PARAMS = {
    "a.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b.scale": np.array([1.0, -0.0, np.nan], ml_dtypes.bfloat16),
}


def test_it_is_the_hash_that_the_docstring_describes() -> None:
    expected = hashlib.sha256()
    for name in ("a.weight", "b.scale"):
        array = PARAMS[name]
        expected.update(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode())
        expected.update(array.tobytes())
    assert weights_digest(PARAMS) == expected.hexdigest()


def test_order_layout_and_devices_change_nothing() -> None:
    digest = weights_digest(PARAMS)
    assert weights_digest(dict(reversed(PARAMS.items()))) == digest
    fortran = {k: np.asfortranarray(v) for k, v in PARAMS.items()}
    assert weights_digest(fortran) == digest
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))
    sharded = {**PARAMS, "a.weight": jax.device_put(PARAMS["a.weight"], rows)}
    assert weights_digest(sharded) == digest


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
