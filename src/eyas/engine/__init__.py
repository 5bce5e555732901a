"""The engine: rounds, sequences, conversations."""

from eyas.engine.conversation import Conversation
from eyas.engine.engine import Engine
from eyas.engine.limits import Limits
from eyas.engine.load import load
from eyas.engine.round import Outcome, Speculation, run_round
from eyas.engine.state import EngineState

__all__ = ["Conversation", "Engine", "EngineState", "Limits", "Outcome", "Speculation", "load", "run_round"]
