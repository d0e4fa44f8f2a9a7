"""Batch-invariant ops and their order of additions."""

from .attention import AttentionTopology, attention, write_pages
from .log_softmax import LogSoftmaxTopology, target_logprobs
from .matmul import MatmulTopology, matmul, swiglu_matmul
from .ragged import RaggedBatch
from .rms_norm import RmsNormTopology, add_rms_norm, rms_norm
from .rope import RopeTopology, rope
from .sampling import SamplingTopology, choose_token, find_cut, top_tokens

__all__ = [
    "AttentionTopology",
    "LogSoftmaxTopology",
    "MatmulTopology",
    "RaggedBatch",
    "RmsNormTopology",
    "RopeTopology",
    "SamplingTopology",
    "add_rms_norm",
    "attention",
    "choose_token",
    "find_cut",
    "matmul",
    "rms_norm",
    "rope",
    "swiglu_matmul",
    "target_logprobs",
    "top_tokens",
    "write_pages",
]
