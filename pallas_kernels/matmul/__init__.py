"""Matrix products with one order of additions."""

from .api import matmul, swiglu_matmul
from .segmented import segmented_matmul
from .topology import MatmulTopology

__all__ = ["MatmulTopology", "matmul", "segmented_matmul", "swiglu_matmul"]
