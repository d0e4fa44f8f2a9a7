"""Log-probabilities of given tokens and the log-sum-exp of a row."""

from .api import target_logprobs
from .topology import LogSoftmaxTopology, topology_for

__all__ = ["LogSoftmaxTopology", "target_logprobs", "topology_for"]
