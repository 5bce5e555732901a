"""Names of drafting methods: a kind of drafter, a method without weights, or a hybrid of both such as `eagle3+suffix`.

Nothing here needs torch: command lines check names before they load anything.
"""

from __future__ import annotations

from typing import NamedTuple

from eyas.drafters.in_target import NAMES as IN_TARGET
from eyas.drafters.kinds import NAMES as KINDS
from eyas.drafters.small_lm import METHOD as SMALL_LM
from eyas.drafters.weightless import ALONE
from eyas.drafters.weightless import NAMES as WEIGHTLESS
from eyas.errors import UsageError

WITHOUT_DRAFTER = (*WEIGHTLESS, *IN_TARGET)
"""Methods that may go without a draft model."""
_LOOKUPS = tuple(name for name in WEIGHTLESS if name not in ALONE)
_OF_FILES = (*KINDS, SMALL_LM)


class Method(NamedTuple):
    """What a method's name asks for."""

    drafter: bool
    """Whether it has weights: those of a draft model, or of a module in the target's own checkpoint."""
    kind: str | None
    """The kind that the draft model must be; None = whatever its files hold."""
    lookup: str | None
    """The method without weights, alone or united with the draft model's."""

    @property
    def alone(self) -> bool:
        """Whether it may go without a draft model."""
        return not self.drafter or self.kind in IN_TARGET


def read_method(text: str | None) -> Method:
    """The method that `text` names: `KIND`, `LOOKUP`, `KIND+LOOKUP` or `+LOOKUP`; None = a draft model of any kind.

    Raises UsageError, which lists what there is.
    """
    if text in WEIGHTLESS:
        return Method(False, None, text)
    kind, plus, lookup = (text or "").partition("+")
    if plus and lookup not in _LOOKUPS:
        raise UsageError(f"unknown method {text!r}: there is no {lookup or 'name'} to add; write one of {_hybrids()}")
    if kind and (kind not in _OF_FILES or (plus and kind == SMALL_LM)):
        if plus:
            raise UsageError(
                f"unknown method {text!r}: {kind} is no kind of draft model; write one of {', '.join(KINDS)} before "
                f"the +, or nothing for any"
            )
        raise UsageError(
            f"unknown method {text!r}: write {', '.join((*_OF_FILES, *WEIGHTLESS))}, {_hybrids()}, or none"
        )
    return Method(True, kind or None, lookup or None)


def _hybrids() -> str:
    return ", ".join(f"eagle3+{name}" for name in _LOOKUPS)
