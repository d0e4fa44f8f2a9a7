"""Batch-invariant operations, each with a fixed order of additions."""
