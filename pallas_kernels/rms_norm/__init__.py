"""RMS norm with the residual add fused in."""

from .api import add_rms_norm, fits_peer_norm, peer_add_rms_norm, rms_norm
from .topology import RmsNormTopology, topology_for

__all__ = [
    "RmsNormTopology",
    "add_rms_norm",
    "fits_peer_norm",
    "peer_add_rms_norm",
    "rms_norm",
    "topology_for",
]
