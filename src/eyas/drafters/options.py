"""What a drafter is made from, and the names of drafting methods: checked before anything is loaded, without torch.

A method is a kind of drafter, a method without weights, or a hybrid of both such as `eagle3+suffix`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from eyas.drafters.in_target import NAMES as IN_TARGET
from eyas.drafters.kinds import KINDS
from eyas.drafters.small_lm import METHOD as SMALL_LM
from eyas.drafters.small_lm import OTHER_NAME as SMALL_LM_TOO
from eyas.drafters.weightless import METHODS, NOT_COMBINABLE
from eyas.drafters.window.window import read_window
from eyas.errors import CheckpointError, UsageError
from eyas.hub import find_drafter

AUTO = "auto"
"""The source of a drafter that is looked for (`eyas.drafters.automatic`); a folder of this name is `./auto`."""
PREDICTION = "prediction"
"""Suffix decoding of requests with a prediction or a grammar, and of no others (`eyas.drafters.prediction`)."""


def methods_without_drafter() -> tuple[str, ...]:
    """The names of all methods that don't require a draft model."""
    return (*METHODS, *IN_TARGET)


def needs_no_drafter(method: str | None) -> bool:
    """Whether a method of this name doesn't require a draft model."""
    return method in IN_TARGET or method in METHODS


def _lookups() -> tuple[str, ...]:
    """The methods that can be combined with a draft model; of other packages' methods, that is known once made."""
    return (*(name for name in METHODS if name not in NOT_COMBINABLE), PREDICTION)


def _of_files() -> tuple[str, ...]:
    return (*KINDS, SMALL_LM, SMALL_LM_TOO)


class Method(NamedTuple):
    """The parts of a method's name."""

    drafter: bool
    """Whether it has weights: a draft model's, or a module's in the target's own checkpoint."""
    kind: str | None
    """The required kind of the draft model; None = whatever its files hold."""
    lookup: str | None
    """The method without weights, used alone or combined with the draft model."""

    @property
    def alone(self) -> bool:
        """Whether it works without a draft model."""
        return not self.drafter or self.kind in IN_TARGET


def read_method(text: str | None) -> Method:
    """The method that `text` names: `KIND`, `LOOKUP`, `KIND+LOOKUP` or `+LOOKUP`; None = a draft model of any kind.

    Raises UsageError that lists the valid names.
    """
    if text == PREDICTION or text in METHODS:
        if text not in (PREDICTION, *METHODS.own) and text in KINDS:
            raise UsageError(
                f"other packages bring both a drafter kind and a method without weights that are called {text}: "
                "uninstall one of them"
            )
        return Method(False, None, text)
    kind, plus, lookup = (text or "").partition("+")
    kind = SMALL_LM if kind == SMALL_LM_TOO else kind
    if plus and (lookup in NOT_COMBINABLE or not (lookup == PREDICTION or lookup in METHODS)):
        raise UsageError(f"unknown method {text!r}: there is no {lookup or 'name'} to add; write one of {_hybrids()}")
    if kind and kind != SMALL_LM and kind not in KINDS:
        if plus:
            raise UsageError(
                f"unknown method {text!r}: {kind} is no kind of draft model; write one of {', '.join(_of_files())} "
                f"before the +, or nothing for any kind"
            )
        raise UsageError(f"unknown method {text!r}: write {', '.join((*_of_files(), *METHODS))}, {_hybrids()}, or none")
    return Method(True, kind or None, lookup or None)


def method_of(text: str | None, drafter: str) -> str | None:
    """The method that `text` names for a drafter that is called `drafter`: `pick+suffix` is `+suffix` for `pick`."""
    name, plus, lookup = (text or "").partition("+")
    return text if name != drafter else f"{plus}{lookup}" or None


def _hybrids() -> str:
    return ", ".join(f"eagle3+{name}" for name in _lookups())


@dataclass(frozen=True)
class DrafterOptions:
    """Where a drafter is, which method it must implement, and how it is run."""

    source: str | Path | None = None
    """The directory, GGUF file or Hub id of a drafter or small language model, `auto` to look for one, or None for
    methods that need none."""
    method: str | None = None
    """The drafting method, as `read_method` reads it; None = whatever the files hold."""
    weights: str | None = None
    """The weight file in its directory; a pickle is only read if named here."""
    ignore_config_keys: tuple[str, ...] = ()
    window: str | int | None = None
    """How many pairs it attends to in addition to its sinks, `auto`, `off`, or None for the value in its config."""
    quantize: str | None = None
    """Quantization of its linear layers: `int8`, `int4`, `off`, or None = `int4` where that is faster."""

    def __post_init__(self) -> None:
        if self.source is not None:  # its folder's name stands for it, as in `pick+suffix`
            object.__setattr__(self, "method", method_of(self.method, Path(self.source).name))

    def of(self, source: str | Path | None, method: str | None = None) -> DrafterOptions:
        """The same options for another drafter; without a source only the method applies."""
        return DrafterOptions(method=method) if source is None else replace(self, source=source, method=method)

    def check(self) -> None:
        """Check the options before anything is loaded. Raises UsageError, MissingModelError and CheckpointError."""
        check_source(self.method, self.source)
        read_window(self.window)
        check_quantize(self.quantize)
        if not read_method(self.method).drafter:
            name = self.method
            if self.window is not None:
                raise UsageError(f"`draft_window=` is for drafters that are networks, and {name} is none: leave it out")
            if self.quantize is not None:
                raise UsageError(f"`draft_quantize=` is for drafters with weights, and {name} has none: leave it out")
        if self.source == AUTO:
            self._check_auto()
        elif self.source is not None:
            found = Path(find_drafter(self.source))
            if self.weights is not None and found.is_dir() and not (found / self.weights).is_file():
                raise CheckpointError(f"`draft_weights={self.weights}`: {self.source} holds no such file")

    def _check_auto(self) -> None:
        """Refuse options that say more about a drafter than that it is looked for. Raises UsageError."""
        if read_method(self.method).kind is not None:
            raise UsageError(f"`draft_model={AUTO}` takes what it finds: leave out `method={self.method}`, or {AUTO}")
        if self.weights is not None or self.ignore_config_keys:
            raise UsageError(f"`draft_model={AUTO}` takes drafters as they are: leave out how one is read")


def check_quantize(quantize: str | None) -> None:
    """Refuse an unknown quantization of a drafter. Raises UsageError."""
    if quantize not in (None, "int8", "int4", "off"):
        raise UsageError(f"unknown quantization {quantize!r} of a drafter: write int8, int4 or off, or leave it out")


def check_source(method: str | None, source: str | Path | None) -> None:
    """Refuse an unknown method, one that lacks its drafter, or a drafter that it doesn't use. Raises UsageError."""
    parsed = read_method(method if source is None else method_of(method, Path(source).name))
    if source is None and not parsed.alone:
        raise UsageError(
            f"{'drafting' if method is None else f'method {method}'} needs a drafter: give one with `draft_model=`, or "
            f"a `method=` that needs none: {', '.join(methods_without_drafter())}"
        )
    if source is not None and not parsed.drafter:
        raise UsageError(f"`method={method}` needs no drafter: leave out {source}, or the method")
