"""A light head without attention."""

from eyas.drafters.mlp.config import MlpConfig
from eyas.drafters.mlp.module import MlpNetwork

__all__ = ["MlpConfig", "MlpNetwork"]
