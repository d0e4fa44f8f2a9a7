"""Flax NNX decoders that run on the batch-invariant ops."""

from .checkpoint import find_demo_model, load_params, read_config, save_orbax, weights_digest
from .config import TransformerConfig
from .ops import TransformerOps
from .transformer import Transformer, build_transformer, parameter_names, random_params

__all__ = [
    "Transformer",
    "TransformerConfig",
    "TransformerOps",
    "build_transformer",
    "find_demo_model",
    "load_params",
    "parameter_names",
    "random_params",
    "read_config",
    "save_orbax",
    "weights_digest",
]
