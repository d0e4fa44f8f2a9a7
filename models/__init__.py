"""Flax NNX decoders that run on the batch-invariant ops."""
