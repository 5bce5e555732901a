"""Verification as sampling: the seeded sampler, the walk that applies it along a draft tree, and grammars."""

from eyas.verify.constraint import LegalTree, grammar_of
from eyas.verify.grammar import WHITESPACE, Grammar, compile_grammar, lark_literal, lark_marker
from eyas.verify.logprobs import EmittedLogprobs, prompt_logprobs
from eyas.verify.path import PathState, gumbel
from eyas.verify.sampler import Coupling, Sampler, Warp, check_request
from eyas.verify.walk import IndependentDraws, RejectionWalk, SeededWalk, SyntheticWalk, TypicalWalk, Walk, WalkRule

__all__ = [
    "WHITESPACE",
    "Coupling",
    "EmittedLogprobs",
    "Grammar",
    "IndependentDraws",
    "LegalTree",
    "PathState",
    "RejectionWalk",
    "Sampler",
    "SeededWalk",
    "SyntheticWalk",
    "TypicalWalk",
    "Walk",
    "WalkRule",
    "Warp",
    "check_request",
    "compile_grammar",
    "grammar_of",
    "gumbel",
    "lark_literal",
    "lark_marker",
    "prompt_logprobs",
]
