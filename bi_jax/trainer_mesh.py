"""A trainer's rows over all devices of a mesh, its parameters stored in shards.

Every device computes whole rows with whole weights, in the program of one device: weights are
gathered, which copies, and nothing is added across devices on the way forward. Gradients are
summed over a device's rows, which are a subtree of the global batch's tree; the subtrees are then
merged upwards by the same additions as on one device. So neither the shape of the mesh nor the
number of its devices is part of the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .gradient_sum import GradientSum, accumulate
from .sharding import TRAINER_RULES, parameter_shardings

Rows = Any
RowFunction = Callable[[nnx.State, nnx.State, Rows], Any]


@dataclass(frozen=True, kw_only=True)
class RowMesh:
    """The devices over which rows go.

    Attributes:
      mesh: of any shape; rows are cut over all its axes, the first axis slowest.
    """

    mesh: Mesh

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.mesh.axis_names)

    def padded(self, count: int) -> int:
        """Rows with padding: each device has the same number of them, a power of two."""
        share = -(-count // self.mesh.size)
        return self.mesh.size * (1 << (share - 1).bit_length())

    def specs(self, params: nnx.State) -> Any:
        """How parameters lie, as a tree of their structure: `sharding.TRAINER_RULES`."""
        flat = nnx.to_flat_state(params)
        shapes = {".".join(map(str, path)): v[...].shape for path, v in flat}
        rules = {name: axis for name, axis in TRAINER_RULES.items() if axis in self.axes}
        places = parameter_shardings(shapes, self.mesh, rules=rules)
        tree = nnx.from_flat_state(
            [(path, v.replace(places[".".join(map(str, path))].spec)) for path, v in flat]
        )
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, P))
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def map_rows(self, fn: RowFunction, params: nnx.State, rest: nnx.State, rows: Rows) -> Any:
        """fn(params, rest, rows) for each device's rows; arrays [padded rows, ...] in and out."""
        specs = self.specs(params)

        def body(params: nnx.State, rest: nnx.State, rows: Rows) -> Any:
            return fn(_gathered(params, specs), rest, rows)

        return self._mapped(body, specs, P(self.axes))(params, rest, rows)

    def sum_rows(self, fn: RowFunction, params: nnx.State, rest: nnx.State, rows: Rows) -> Any:
        """The sum over all rows of gradients: fn gives the subtree of a device's rows.

        Args:
          fn: (params, rest, rows) -> gradients of params' structure.
          params, rest: of the model; params as `specs` has them, or moved there.
          rows: arrays [padded rows, ...].

        Returns:
          Gradients that lie like params.
        """
        specs = self.specs(params)

        def body(params: nnx.State, rest: nnx.State, rows: Rows) -> Any:
            gradients = fn(_gathered(params, specs), rest, rows)
            return jax.tree.map(self._summed, gradients, specs)

        return self._mapped(body, specs, specs)(params, rest, rows)

    def _mapped(self, body: Any, specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(specs, P(), P(self.axes)),
            out_specs=out_specs,
            check_vma=False,  # nobody proves to it that gathered arrays are equal
        )

    def _summed(self, leaf: jax.Array, spec: P) -> jax.Array:
        """The devices' subtrees of one gradient merged; this device's part of the sum.

        Each device is sent all terms of its share of the elements, merges them, and the sums are
        gathered: the additions of an element are those of the tree, wherever they are made.
        """
        devices = self.mesh.size
        share = -(-leaf.size // devices)
        flat = jnp.pad(leaf.reshape(-1), (0, share * devices - leaf.size))
        terms = lax.all_to_all(
            flat.reshape(devices, share), self.axes, split_axis=0, concat_axis=0, tiled=True
        )
        total: GradientSum | None = None
        for device in range(devices):
            total = accumulate(total, terms[device], sequences=1)
        assert total is not None
        whole = lax.all_gather(total.result(), self.axes, tiled=True)
        return self._own_part(whole[: leaf.size].reshape(leaf.shape), spec)

    def _own_part(self, whole: jax.Array, spec: P) -> jax.Array:
        for dim, axis in enumerate(spec):
            if axis is not None:
                size = whole.shape[dim] // self.mesh.shape[axis]
                start = lax.axis_index(axis) * size
                whole = lax.dynamic_slice_in_dim(whole, start, size, dim)
        return whole


def pad_rows(array: jax.Array, count: int, value: int = 0) -> jax.Array:
    """[B, ...] filled up to `count` rows."""
    extra = [(0, count - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, extra, constant_values=value)


def _gathered(params: nnx.State, specs: Any) -> nnx.State:
    """Every parameter whole."""

    def whole(leaf: jax.Array, spec: P) -> jax.Array:
        for dim, axis in enumerate(spec):
            if axis is not None:
                leaf = lax.all_gather(leaf, axis, axis=dim, tiled=True)
        return leaf

    return jax.tree.map(whole, params, specs)
