"""From a model folder, file or hub id to a configuration and parameters."""

from .digest import weights_digest
from .load import load_params, read_config
from .orbax_folder import save_orbax
from .plan import parameter_shapes
from .source import ModelSource, find_demo_model, find_model

__all__ = [
    "ModelSource",
    "find_demo_model",
    "find_model",
    "load_params",
    "parameter_shapes",
    "read_config",
    "save_orbax",
    "weights_digest",
]
