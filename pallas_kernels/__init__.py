"""Batch-invariant ops and their order of additions."""

from .attention import AttentionTopology, attention, write_pages
from .log_softmax import LogSoftmaxTopology, target_logprobs
from .matmul import MatmulTopology, matmul, swiglu_matmul
from .merge import MergeTopology, ordered_sum, tree_sum
from .ragged import RaggedBatch
from .rms_norm import RmsNormTopology, add_rms_norm, rms_norm
from .rope import RopeTopology, rope, rope_into_pages
from .sampling import SamplingTopology, choose_token, find_cut, top_tokens

__all__ = [
    "AttentionTopology",
    "LogSoftmaxTopology",
    "MatmulTopology",
    "MergeTopology",
    "RaggedBatch",
    "RmsNormTopology",
    "RopeTopology",
    "SamplingTopology",
    "add_rms_norm",
    "attention",
    "choose_token",
    "find_cut",
    "matmul",
    "ordered_sum",
    "rms_norm",
    "rope",
    "rope_into_pages",
    "swiglu_matmul",
    "target_logprobs",
    "top_tokens",
    "tree_sum",
    "write_pages",
]
