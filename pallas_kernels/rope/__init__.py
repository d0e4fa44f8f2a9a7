"""Per-head QK-norm and the rotary position embedding."""

from .api import rope
from .topology import RopeTopology, topology_for

__all__ = ["RopeTopology", "rope", "topology_for"]
