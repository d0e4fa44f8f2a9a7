"""Memory on each card of a host into which the other cards write: for sums by one kernel."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bi_jax.pallas_kernels.merge.peer_layout import MOST_RANKS, PeerLayout


@dataclass(frozen=True, kw_only=True)
class PeerMemory:
    """The workspaces of a mesh's cards, and what a kernel must know to find them.

    Attributes:
      workspaces: uint32 [ranks * words], a part on each card; kept alive here, written by kernels.
      addresses: uint32 [ranks, 2], on every card: the low and high half of the address of each
        rank's workspace. An operand of each program, since it changes from process to process.
    """

    workspaces: jax.Array
    addresses: jax.Array


def peer_memory(mesh: Mesh, axis: str) -> PeerMemory | None:
    """Workspaces on all cards of a mesh.

    Args:
      mesh: its devices.
      axis: the mesh axis of all of them.

    Returns:
      None where the kernel does not run: one device, not a GPU, cards of other processes, or cards
      that do not reach each other's memory.
    """
    ranks = mesh.shape[axis]
    devices = list(mesh.devices.flat)
    here = all(d.platform == "gpu" and d.process_index == jax.process_index() for d in devices)
    if not here or not 2 <= ranks == mesh.size <= MOST_RANKS or not _reach_one_another(devices):
        return None
    words = PeerLayout(ranks=ranks).size // 4
    cut = NamedSharding(mesh, P(axis))
    make = jax.jit(lambda: jnp.zeros((ranks * words,), jnp.uint32), out_shardings=cut)
    workspaces = jax.block_until_ready(make())
    addresses = np.zeros((ranks, 2), np.uint32)
    for shard in workspaces.addressable_shards:
        rank, address = (shard.index[0].start or 0) // words, shard.data.unsafe_buffer_pointer()
        addresses[rank] = address & 0xFFFFFFFF, address >> 32
    everywhere = NamedSharding(mesh, P())
    return PeerMemory(workspaces=workspaces, addresses=jax.device_put(addresses, everywhere))


def _reach_one_another(devices: Sequence[Any]) -> bool:
    """Whether the driver lets each card write to every other; XLA's client then has allowed it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    numbers = [device.local_hardware_id for device in devices]
    for pair in itertools.permutations(numbers, 2):
        can, cards = ctypes.c_int(0), [ctypes.c_int(0), ctypes.c_int(0)]
        for card, number in zip(cards, pair, strict=True):
            if driver.cuDeviceGet(ctypes.byref(card), number):
                return False
        if driver.cuDeviceCanAccessPeer(ctypes.byref(can), *cards) or not can.value:
            return False
    return True


def peers_table(addresses: jax.Array, axis: str) -> jax.Array:
    """The operand `peers` of sums over ranks, on this rank; under `shard_map`.

    Args:
      addresses: of a `PeerMemory`.
      axis: the mesh axis.

    Returns:
      uint32 [ranks + 1, 2]: the addresses and, last, this rank's number.
    """
    rank = lax.axis_index(axis).astype(jnp.uint32)
    return jnp.concatenate([addresses, jnp.stack([rank, jnp.zeros_like(rank)])[None]])
