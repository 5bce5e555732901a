"""Drafters: the networks that propose tokens, their files, and how they decode."""

from eyas.drafters.base import Drafter

__all__ = ["Drafter"]
