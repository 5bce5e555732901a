"""Drafters without weights: one file each, named after its method, with a `make` that builds it for a target."""

from __future__ import annotations

from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol

from eyas.drafters.kinds import KINDS
from eyas.plugins import Registry

if TYPE_CHECKING:
    from eyas.drafters.base import Drafter
    from eyas.targets import Target


class MakeMethod(Protocol):
    """What an entry point `eyas.methods` names: a function, or a class, that makes a method's drafter for a target.

    The drafter is usually a `LookupDrafter` (`eyas.drafters.history`). It keeps every sequence's tokens by slot, and
    its `propose(slot, depth, fanout)` returns a `Proposal`: what may follow, as a chain or a tree, with
    log-probabilities of acceptance. Such a method can be combined with a draft model (`eagle3+NAME`). Any other
    `Drafter` (`eyas.drafters.base`) works by itself only, as `lookahead` does.

    What a drafter proposes never changes the output, only how fast it comes: each token is verified by the target. A
    drafter must be deterministic given its sequences, and must not serve one owner with another owner's text
    (`SlotPairs.begin`).
    """

    def __call__(self, target: Target, /) -> Drafter:
        """The drafter for this target: `target.device` is where trees are made, `target.vocab_size` how many tokens
        there are."""


def _wrong(_: str, found: Any) -> str | None:
    return None if callable(found) else f"it is a {type(found).__name__}, not a function that makes a drafter"


METHODS: Registry[MakeMethod] = Registry(
    "eyas.methods",
    {module.name: f"{__name__}.{module.name}:make" for module in iter_modules(__path__)},
    _wrong,
    reserved=("auto", "none", "prediction", "draft_model", "small-lm", *KINDS.own),
)
"""All methods that need no files. Other packages' methods are entry points `eyas.methods`."""
NOT_COMBINABLE = frozenset({"lookahead"})
"""Methods of eyas's own that can't be combined with a draft model: their trees fill the target's pass."""
