"""Drafters: the networks that propose tokens, their files, and how they decode."""

from eyas.drafters.base import Drafter, observe_rows

__all__ = ["Drafter", "observe_rows"]
