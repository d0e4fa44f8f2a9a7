"""Shared memory that the scratch of a launch takes, counted as Mosaic GPU does."""

import math
from collections.abc import Iterable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

CTA_BYTES = 232448  # what one CTA may hold on sm90
ALIGNMENT = 1024
BARRIER_BYTES = 8


def bytes_of(refs: Iterable[Any]) -> int:
    """Bytes of `plgpu.SMEM`, `Barrier` and `ClusterBarrier` scratch; CTA_BYTES are there."""
    total = 0
    for ref in refs:
        aval = ref.get_ref_aval()
        if isinstance(ref, (plgpu.Barrier, plgpu.ClusterBarrier)):
            total += BARRIER_BYTES * math.prod(aval.shape)
        else:
            total += -(-math.prod(aval.shape) * aval.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return total
