"""Shapes of real models, (N, K) each, shared by tests and benchmarks."""

LLAMA_3_1_8B = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
QWEN3_8B = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}
SMOLLM2_135M = {
    "qkv": (960, 576),
    "out": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
}
