"""EAGLE-1, also what EAGLE-2 drafts with."""

from eyas.drafters.eagle1.config import Eagle1Config
from eyas.drafters.eagle1.module import Eagle1Network

__all__ = ["Eagle1Config", "Eagle1Network"]
