"""EAGLE-3 with DeepSeek's multi-head latent attention."""

from eyas.drafters.mla.config import MlaConfig
from eyas.drafters.mla.module import MlaNetwork

__all__ = ["MlaConfig", "MlaNetwork"]
