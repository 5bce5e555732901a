"""EAGLE-3 and 3.1."""

from eyas.drafters.eagle3.config import Eagle3Config
from eyas.drafters.eagle3.module import Eagle3Network

__all__ = ["Eagle3Config", "Eagle3Network"]
