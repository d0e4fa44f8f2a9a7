"""Per-head QK-norm and the rotary position embedding."""

from .api import rope, rope_into_pages
from .topology import RopeTopology, topology_for

__all__ = ["RopeTopology", "rope", "rope_into_pages", "topology_for"]
