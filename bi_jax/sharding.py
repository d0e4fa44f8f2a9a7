"""Meshes, the rules by which parameters lie on them, and parameters placed in their shards.

A mesh has the axes ("fsdp", "tp"). An engine runs over "tp"; along "fsdp" stand its replicas, each
an engine of its own. A trainer cuts its parameters over both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bi_jax.models import axes
from bi_jax.models.checkpoint import find_model, load_params
from bi_jax.models.checkpoint.plan import parameter_shapes
from bi_jax.models.config import TransformerConfig
from bi_jax.models.parallel_layout import ParallelLayout
from bi_jax.models.transformer import Transformer

from .row_products import TENSOR_AXIS, layout_for

FSDP_AXIS = "fsdp"
MESH_AXES = (FSDP_AXIS, TENSOR_AXIS)
Rules = Mapping[str, str | None]

# Logical axis to mesh axis; what is not named is on every device.
_CUT = (axes.VOCAB, axes.KV_HEADS, axes.MLP, axes.SEGMENTS)
ENGINE_RULES: Rules = dict.fromkeys(_CUT, TENSOR_AXIS)
TRAINER_RULES: Rules = {**ENGINE_RULES, axes.QUERY_SIZE: TENSOR_AXIS, axes.EMBED: FSDP_AXIS}


def make_mesh(*, tp: int = 1, fsdp: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of fsdp times tp devices; those of one tensor-parallel group are neighbours.

    Args:
      tp: ranks of a tensor-parallel group.
      fsdp: groups.
      devices: at least fsdp * tp; None: all of this platform's.

    Raises:
      ValueError: there are fewer devices.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < fsdp * tp:
        raise ValueError(
            f"a mesh of {fsdp} times {tp} devices needs {fsdp * tp}, and there are {len(devices)}"
        )
    return Mesh(np.array(devices[: fsdp * tp]).reshape(fsdp, tp), MESH_AXES)


def replicas(mesh: Mesh) -> tuple[Mesh, ...]:
    """The tensor-parallel groups of a mesh, each a mesh of its own."""
    return tuple(Mesh(group[None], MESH_AXES) for group in mesh.devices)


def partition_spec(logical: Sequence[str | None], rules: Rules) -> P:
    """Logical axis names of an array -> mesh axes."""
    return P(*(None if name is None else rules.get(name) for name in logical))


def parameter_shardings(
    shapes: Mapping[str, Sequence[int]],
    mesh: Mesh,
    *,
    rules: Rules = TRAINER_RULES,
    laid_out: bool = False,
) -> dict[str, NamedSharding]:
    """How parameters lie on a mesh.

    Args:
      shapes: name -> shape.
      mesh: the devices.
      rules: logical axis -> mesh axis.
      laid_out: the shapes are those of a `ParallelLayout`; else a checkpoint's.

    Returns:
      name -> sharding. An axis that the mesh does not divide is on every device.
    """
    found = {}
    for name, shape in shapes.items():
        spec = partition_spec(axes.parameter_axes(name, laid_out=laid_out), rules)
        pairs = zip(shape, spec, strict=True)
        fits = [axis if axis and size % mesh.shape[axis] == 0 else None for size, axis in pairs]
        found[name] = NamedSharding(mesh, P(*fits))
    return found


def check_layout(model: Transformer, layout: ParallelLayout | None, ops: Any) -> None:
    """Raises ValueError for a model that lies otherwise than an engine wants it."""
    if model.layout is not None and model.layout != layout:
        raise ValueError(
            f"the model's parameters are laid out for {model.layout.degree} devices in "
            f"{model.layout.segments} segments, which is not this engine's layout"
        )
    if layout is not None and ops is not None:
        raise ValueError("ops of your own run on one device, in the default topology only")


def model_placer(
    config: TransformerConfig, backends: Any, degree: int, mesh: Mesh | None = None
) -> Placer | None:
    """Where an engine's parameters lie; None: as in a checkpoint, on the default device.

    Args:
      config: the model.
      backends: of the engine's ops; `matmul` says how segments are padded.
      degree: tensor-parallel degree.
      mesh: `degree` devices along "tp"; None: the first ones.

    Raises:
      ValueError: the degree does not fit the topology, the devices or the mesh.
    """
    layout = layout_for(config, degree=degree, backend=backends.matmul)
    if mesh is not None and mesh.shape.get(TENSOR_AXIS) != degree:
        raise ValueError(
            f"tensor_parallel_size={degree} must be the size of the mesh's axis "
            f"{TENSOR_AXIS!r}, got a mesh of {dict(mesh.shape)}"
        )
    if layout.trivial and mesh is None:
        return None
    if mesh is None and degree > 1:
        if len(jax.devices()) < degree:
            raise ValueError(
                f"tensor_parallel_size={degree} needs {degree} devices, and there are "
                f"{len(jax.devices())}"
            )
        mesh = make_mesh(tp=degree)
    return Placer(layout, mesh)


class Placer:
    """Places parameters that lie as in a checkpoint where a layout wants them.

    Args:
      layout: the layout.
      mesh: its devices, `layout.degree` of them along "tp"; None: the default device.
    """

    def __init__(self, layout: ParallelLayout, mesh: Mesh | None) -> None:
        self.layout = layout
        self.mesh = mesh
        self._shapes = parameter_shapes(layout.config)
        if mesh is not None and mesh.shape.get(TENSOR_AXIS) != mesh.size:
            raise ValueError(
                f"an engine runs over one tensor-parallel group, got a mesh of {dict(mesh.shape)}: "
                "take one of its `replicas`"
            )

    def sharding(self, name: str) -> jax.sharding.Sharding | None:
        """Where a laid-out parameter lies; None: on the default device."""
        if self.mesh is None:
            return None
        return NamedSharding(self.mesh, self._spec(self.layout.sharded_axis(name)))

    def place(self, name: str, array: Any) -> jax.Array:
        """One parameter as checkpoints have it, wherever it lies, to its shards.

        A parameter whose parts are equal pieces of the checkpoint's is sent in pieces; of another
        one each device sees the whole for a moment, one parameter at a time.

        Raises:
          ValueError: the model has no such parameter, or one of another shape.
        """
        expected = self._shapes.get(name)
        if tuple(array.shape) != expected:
            raise ValueError(
                f"expected a weight {name} of shape {expected and list(expected)}, got "
                f"{list(array.shape)}"
            )
        staged = None
        if self.mesh is not None:
            staged = NamedSharding(self.mesh, self._spec(self.layout.plain_axis(name)))
        array = jax.device_put(array, staged)
        return _laid_out(self.layout, _like(name), self.sharding(name))(array)

    def place_state(self, state: nnx.State, *, laid_out: bool = False) -> nnx.State:
        """All variables of a model; tables that are no parameters go to every device.

        Args:
          state: the model's.
          laid_out: whether its parameters already lie in the layout, on the mesh.
        """
        whole = None if self.mesh is None else NamedSharding(self.mesh, P())
        flat = []
        for path, variable in nnx.to_flat_state(state):
            if isinstance(variable, nnx.Param):
                value = variable[...]
                value = value if laid_out else self.place(_name(path), value)
            else:
                value = jax.device_put(variable[...], whole)
            flat.append((path, variable.replace(value)))
        return nnx.from_flat_state(flat)

    def specs(self, state: nnx.State) -> Any:
        """The partition specs of a placed state, as a tree of its structure."""
        flat = [
            (path, self._spec(self.layout.sharded_axis(_name(path))))
            for path, _ in nnx.to_flat_state(state)
        ]
        leaves = jax.tree.leaves(nnx.from_flat_state(flat), is_leaf=lambda x: isinstance(x, P))
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    def cache_sharding(self) -> jax.sharding.Sharding | None:
        """Of pages [P, heads of all ranks, Tp, Dh]."""
        return None if self.mesh is None else NamedSharding(self.mesh, self._spec(1))

    def over_ranks(self, step: Callable[..., Any], state: nnx.State) -> Callable[..., Any]:
        """`step(state, cache, *others) -> (cache, result)` as one program on every rank.

        Parameters and pages are cut as this placer has put them; all else, the result too, is the
        same on every rank.
        """
        if self.mesh is None:
            return step
        pages, specs = self._spec(1), self.specs(state)

        def run(state: nnx.State, cache: Any, *others: Any) -> Any:
            return jax.shard_map(
                step,
                mesh=self.mesh,
                in_specs=(specs, pages, *[P()] * len(others)),
                out_specs=(pages, P()),
                check_vma=False,  # nobody proves to it that gathered arrays are equal
            )(state, cache, *others)

        return run

    def load(self, name: str | Path, config: TransformerConfig, *, dtype: str) -> Any:
        """All parameters of a checkpoint, straight into their shards; as `load_params`."""
        if find_model(name).kind == "orbax":
            params = load_params(name, config, dtype=dtype, sharding=_Lazy(self._staging))
            return {path: self.place(path, params.pop(path)) for path in [*params]}
        shardings = None if self.mesh is None else _Lazy(self.sharding)
        return load_params(name, config, dtype=dtype, sharding=shardings, layout=self.layout)

    def restored(self, state: nnx.State) -> Mapping[str, np.ndarray]:
        """The parameters of a placed state on the host, as checkpoints have them, one at a time."""
        values = {
            _name(path): variable[...]
            for path, variable in nnx.to_flat_state(state)
            if isinstance(variable, nnx.Param)
        }
        return _Lazy(lambda name: self.layout.restore(name, _on_host(values[name])), values)

    def _staging(self, name: str) -> jax.sharding.Sharding:
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, self._spec(self.layout.plain_axis(name)))

    def _spec(self, axis: int | None) -> P:
        return P() if axis is None else P(*[None] * axis, TENSOR_AXIS)


def _on_host(array: jax.Array) -> np.ndarray:
    """A copy that goes when its reader is done; an array asked itself keeps its copy for life."""
    parts = [shard.data for shard in array.addressable_shards]
    twin = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return np.asarray(twin)


class _Lazy(Mapping[str, Any]):
    """name -> make(name), made when it is asked for."""

    def __init__(self, make: Any, names: Any = ()) -> None:
        self._make, self._names = make, names

    def __getitem__(self, name: str) -> Any:
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@functools.lru_cache(maxsize=64)
def _laid_out(layout: ParallelLayout, name: str, sharding: Any) -> Any:
    return jax.jit(lambda array: layout.lay_out(name, array, jnp), out_shardings=sharding)


def _like(name: str) -> str:
    """The same parameter of layer 0, so that all layers share one program."""
    parts = name.split(".")
    return ".".join(["layers", "0", *parts[2:]] if parts[0] == "layers" else parts)


def _name(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))
