"""A trace and a checkpoint carry the identity under which they were made."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import bi_jax
from bi_jax.identity import Identity
from bi_jax.identity_file import NAME, read_identity, write_identity

IDENTITY = Identity(
    config="tiny",
    ops=(("matmul", "reference"),),
    weights="abc",
    kernels="def",
    chip="cpu",
    platform="cpu",
    versions=(("jax", "0"),),
    flags=(),
    audited=True,
)


def test_a_trace_has_its_identity_beside_it(tmp_path):
    engine: Any = SimpleNamespace(identity=IDENTITY)
    with bi_jax.trace(tmp_path / "run", engine) as folder:
        (jnp.ones((8, 8)) @ jnp.ones((8, 8))).block_until_ready()
    assert read_identity(folder) == IDENTITY
    assert list(folder.rglob("*.xplane.pb"))


def test_an_identity_file_is_whole_or_refused(tmp_path):
    path = write_identity(tmp_path, IDENTITY)
    assert path.name == NAME and [p.name for p in tmp_path.iterdir()] == [NAME]
    other = dataclasses.replace(IDENTITY, weights="xyz")
    write_identity(tmp_path, other)
    assert read_identity(tmp_path) == other
    for damage in ({"weights": "123"}, {"chip": None}, {"more": 1}):
        content = {**other.to_dict(), **damage}
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"identity\.json is damaged"):
            read_identity(tmp_path)
    path.write_text("[")
    with pytest.raises(ValueError, match=r"identity\.json is damaged"):
        read_identity(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"identity\.json is not there"):
        read_identity(tmp_path)
