"""Batch-invariant language-model inference and scoring in JAX."""
