"""The clipped policy-gradient loss with its slope, as one op."""

from .api import PolicyTerms, policy_loss

__all__ = ["PolicyTerms", "policy_loss"]
