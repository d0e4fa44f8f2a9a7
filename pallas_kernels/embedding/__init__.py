"""Rows of the token table, and the table's gradient."""

from .api import embedding

__all__ = ["embedding"]
