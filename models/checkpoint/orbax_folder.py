"""The folder that scripts/convert.py writes: bi_jax.json and the parameters in Orbax's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..config import TransformerConfig
from .config_json import config_from_json, config_to_json
from .digest import weights_digest
from .huggingface import read_json
from .placement import Shardings, host_dtype, overflow_message, sharding_of
from .plan import parameter_shapes

MARKER = "bi_jax.json"
PARAMS = "params"
FORMAT = 1
DIGEST = "weights_2"  # named for the digest's own format


def save_orbax(folder: Path, config: TransformerConfig, params: Mapping[str, jax.Array]) -> None:
    """Writes a checkpoint into an existing folder; the marker last, when all else is there.

    Args:
      folder: an existing folder without a checkpoint.
      config: the model's configuration.
      params: path -> array, as `load_params` gives them.
    """
    with _checkpointer() as checkpointer:
        checkpointer.save((folder / PARAMS).absolute(), dict(params))
    content = {
        "format": FORMAT,
        "config": config_to_json(config),
        DIGEST: weights_digest(params),
    }
    (folder / MARKER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_orbax_config(folder: Path) -> TransformerConfig:
    """The configuration in the marker file; ValueError if it is damaged or of another format."""
    content = read_json(folder / MARKER)
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{folder / MARKER} has format {content.get('format')!r}; expected {FORMAT}."
        )
    try:
        return config_from_json(content["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / MARKER} is damaged: {error}") from None


def load_orbax(
    folder: Path, config: TransformerConfig, *, dtype: str, sharding: Shardings
) -> dict[str, jax.Array]:
    """Restores every parameter straight into its sharding, checks the digest, and rounds.

    Raises:
      ValueError: names or shapes differ from what the configuration asks for, the weights are not
        those that were written, or a weight does not fit into the dtype.
    """
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = parameter_shapes(config)
    with _checkpointer() as checkpointer:
        path = (folder / PARAMS).absolute()
        try:
            stored = checkpointer.metadata(path).item_metadata.tree
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no complete Orbax checkpoint: {_first(error)}") from None
        _check(folder, {name: tuple(entry.shape) for name, entry in stored.items()}, shapes)
        target = {
            name: jax.ShapeDtypeStruct(
                shape, stored[name].dtype, sharding=sharding_of(sharding, name) or default
            )
            for name, shape in shapes.items()
        }
        try:
            params = checkpointer.restore(path, target)
        except Exception as error:  # Orbax raises plain Exception for files that are damaged
            raise ValueError(f"{path} is damaged: {_first(error)}") from None
    _check_digest(folder, params)
    for name in shapes:
        params[name] = params[name].astype(host_dtype(dtype))
        if dtype == "float16" and bool(jnp.isinf(params[name]).any()):
            raise ValueError(overflow_message(name))
    return params


def _first(error: Exception) -> str:
    """The beginning of a message; Orbax adds pages of its own state."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(" See full TensorStore details")[0][:200]


def _check_digest(folder: Path, params: Mapping[str, jax.Array]) -> None:
    """Compares with the digest in the marker; older folders have none of this kind."""
    written = read_json(folder / MARKER).get(DIGEST)
    if written is None:
        return
    found = weights_digest(params)
    if found != written:
        raise ValueError(
            f"{folder} is damaged: its weights have the digest {found[:16]}, and "
            f"{str(written)[:16]} is written in {MARKER}."
        )


def _check(
    folder: Path, stored: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    if stored.keys() != shapes.keys():
        raise ValueError(
            f"{folder} does not hold the parameters its configuration asks for: missing "
            f"{sorted(shapes.keys() - stored.keys())}; left over "
            f"{sorted(stored.keys() - shapes.keys())}."
        )
    for name, shape in shapes.items():
        if stored[name] != shape:
            raise ValueError(
                f"{folder}: parameter {name} has shape {stored[name]}, but its configuration asks "
                f"for {shape}."
            )


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # slow to import, and needed for this format only

    return ocp.StandardCheckpointer()
