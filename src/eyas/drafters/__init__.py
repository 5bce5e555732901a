"""Drafters: what proposes tokens."""

from eyas.drafters.base import Drafter

__all__ = ["Drafter"]
