"""EAGLE-3 and 3.1."""

from eyas.drafters.eagle3.checkpoint import load_module, save_module
from eyas.drafters.eagle3.config import Eagle3Config
from eyas.drafters.eagle3.drafter import Eagle3Drafter
from eyas.drafters.eagle3.module import Eagle3Module

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Module", "load_module", "save_module"]
