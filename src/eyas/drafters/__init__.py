"""Drafters: what proposes tokens."""

from eyas.drafters.base import Drafter, tell

__all__ = ["Drafter", "tell"]
