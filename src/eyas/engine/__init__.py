"""The engine: rounds, sequences, conversations."""

from eyas.engine.engine import Conversation, Engine
from eyas.engine.load import load
from eyas.engine.round import RoundOutput, Speculation, run_round
from eyas.types import EngineState, Limits

__all__ = ["Conversation", "Engine", "EngineState", "Limits", "RoundOutput", "Speculation", "load", "run_round"]
