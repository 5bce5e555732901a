"""Drafters: what proposes tokens."""

from eyas.drafters.base import Drafter, observe_rows

__all__ = ["Drafter", "observe_rows"]
