"""The engine: requests in, rounds of speculative decoding, tokens out."""

from eyas.engine.engine import Engine
from eyas.engine.round import RoundOutput, Speculation, run_round
from eyas.types import EngineState, Limits

__all__ = ["Engine", "EngineState", "Limits", "RoundOutput", "Speculation", "run_round"]
