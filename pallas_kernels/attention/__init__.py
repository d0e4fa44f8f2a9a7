"""Ragged, paged, causal attention: one op for prefill, decode and scoring."""

from .api import attention, write_pages
from .topology import AttentionTopology, topology_for

__all__ = ["AttentionTopology", "attention", "topology_for", "write_pages"]
