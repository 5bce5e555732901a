"""Verification is sampling: the seeded sampler, and the walk that applies it along a draft tree."""

from eyas.verify.admission import check_request
from eyas.verify.constraint import grammar_of
from eyas.verify.coupling import Coupling
from eyas.verify.grammar import WHITESPACE, Grammar, compile_grammar, mark, quoted
from eyas.verify.legal import LegalTree
from eyas.verify.logprobs import Scores
from eyas.verify.noise import gumbel
from eyas.verify.path import PathState
from eyas.verify.sampler import Sampler
from eyas.verify.typical import TypicalWalk
from eyas.verify.walk import SeededWalk, Walk, WalkRule

__all__ = [
    "WHITESPACE",
    "Coupling",
    "Grammar",
    "LegalTree",
    "PathState",
    "Sampler",
    "Scores",
    "SeededWalk",
    "TypicalWalk",
    "Walk",
    "WalkRule",
    "check_request",
    "compile_grammar",
    "grammar_of",
    "gumbel",
    "mark",
    "quoted",
]
