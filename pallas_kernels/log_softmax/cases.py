"""Vocabularies of real models, shared by tests and benchmarks."""

VOCABULARIES = {
    "llama-2": 32000,
    "smollm2": 49152,
    "llama-3": 128256,
    "qwen3": 151936,
    "largest": 262144,
}
SMALL_VOCABULARY = 6250  # four blocks, the last one short; not a multiple of the lanes
