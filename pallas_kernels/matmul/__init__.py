"""Matrix products with one order of additions."""

from .api import matmul, swiglu_matmul
from .topology import MatmulTopology

__all__ = ["MatmulTopology", "matmul", "swiglu_matmul"]
