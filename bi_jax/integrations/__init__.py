"""Adapters to other libraries, each in a module of its own that is imported by name."""
