"""The two doors: a model's configuration, and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np

from ..config import TransformerConfig
from ..parallel_layout import ParallelLayout
from .gguf_model import open_gguf_tensors, read_gguf_config
from .huggingface import open_hf_tensors, read_hf_config
from .orbax_folder import load_orbax, read_orbax_config
from .placement import Shardings, cast, host_dtype, place, sharding_of
from .plan import Parameter, parameter_plan
from .source import ModelSource, find_model
from .tensors import TensorSource, check_exact_use

READ_CONFIG = {
    "huggingface": read_hf_config,
    "gguf": read_gguf_config,
    "orbax": read_orbax_config,
}


def read_config(name: str | Path) -> TransformerConfig:
    """The configuration of a model; no weight is read.

    `dtype` and `param_dtype` are the checkpoint's own (float32 for GGUF).

    Args:
      name: a path or a hub id.

    Raises:
      ValueError: there is no such model, or its description is damaged.
      NotImplementedError: its architecture or another feature is not supported; it is named.
    """
    source = find_model(name, weights=False)
    return READ_CONFIG[source.kind](source.path)


def load_params(
    name: str | Path,
    config: TransformerConfig,
    *,
    dtype: str,
    sharding: Shardings = None,
    layout: ParallelLayout | None = None,
    progress: Callable[[tuple[Parameter, ...]], Iterable[Parameter]] = iter,
) -> dict[str, jax.Array]:
    """Reads all parameters of a model, one after the other.

    Every tensor of the checkpoint is used exactly once, or nothing is read and the error names what
    is missing and what is left over. At most one parameter is on the host beside those placed.

    Args:
      name: a path or a hub id.
      config: what `read_config` gave for it.
      dtype: "float32", "bfloat16" or "float16"; weights are rounded to it once, ties to even.
      sharding: None (the default device), one sharding for all, or path -> sharding.
      layout: lays the parameters out over ranks, on the host; `sharding` is then of their shapes
        in it. None: as in the checkpoint. Not for Orbax.
      progress: wraps what is iterated over, as `tqdm` does; Orbax does not report any.

    Returns:
      path -> array, in the order of the forward pass.

    Raises:
      ValueError: files are missing or truncated, or tensors do not fit the configuration.
      NotImplementedError: the weights are pickles or quantised in a way that is not read.
    """
    wanted = host_dtype(dtype)
    source = find_model(name, weights=True)
    if source.kind == "orbax":
        if layout is not None:
            raise ValueError("an Orbax checkpoint is loaded as it is and laid out afterwards")
        return load_orbax(source.path, config, dtype=dtype, sharding=sharding)
    plan = parameter_plan(config)
    tensors = _open_tensors(source, config)
    check_exact_use(tensors, plan, config)
    params = {}
    for parameter in progress(plan):
        array = _build(parameter, tensors, wanted)
        if layout is not None:
            array = layout.lay_out(parameter.path, array)
        params[parameter.path] = place(array, sharding_of(sharding, parameter.path))
    return params


def _open_tensors(source: ModelSource, config: TransformerConfig) -> TensorSource:
    if source.kind == "gguf":
        return open_gguf_tensors(source.path, config)
    return open_hf_tensors(source.path)


def _build(parameter: Parameter, tensors: TensorSource, dtype: np.dtype) -> np.ndarray:
    parts = [cast(tensors.read(name), dtype, parameter.path) for name, _ in parameter.sources]
    array = parameter.build(parts)
    assert array.shape == parameter.shape
    return array
