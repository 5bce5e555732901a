"""The engine: rounds, sequences, conversations."""

from eyas.engine.conversation import Conversation
from eyas.engine.engine import Engine
from eyas.engine.load import load
from eyas.engine.round import Outcome, Speculation, run_round

__all__ = ["Conversation", "Engine", "Outcome", "Speculation", "load", "run_round"]
