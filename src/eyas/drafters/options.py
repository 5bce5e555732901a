"""What a drafter is made from: options that are checked before anything is loaded. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from eyas.drafters.methods import WITHOUT_DRAFTER, read_method
from eyas.drafters.window.window import read_window
from eyas.errors import CheckpointError, UsageError
from eyas.hub import find_drafter


@dataclass(frozen=True)
class DrafterOptions:
    """Where a drafter is, what it must be, and how it is run."""

    source: str | Path | None = None
    """Its directory, GGUF file or Hub id, or that of a small language model; None for methods that need none."""
    method: str | None = None
    """What drafts, as `read_method` reads it; None = whatever the files hold."""
    weights: str | None = None
    """The weight file in its directory; a pickle is read only if named here."""
    ignore_config_keys: tuple[str, ...] = ()
    window: str | int | None = None
    """The pairs that it attends to besides its sinks, `auto`, `off`, or None for what its config says."""
    quantize: str | None = None
    """Whether its linears have weights in 8 bits: `int8`, `off`, or None, which is `int8` where that is faster."""

    def of(self, source: str | Path | None, method: str | None = None) -> DrafterOptions:
        """The same for another drafter; one without files of its own has none to read otherwise."""
        return DrafterOptions(method=method) if source is None else replace(self, source=source, method=method)

    def check(self) -> None:
        """Refuse what is wrong before anything is loaded. Raises UsageError, MissingModelError and CheckpointError."""
        check_source(self.method, self.source)
        read_window(self.window)
        check_quantize(self.quantize)
        if not read_method(self.method).drafter:
            name = self.method
            if self.window is not None:
                raise UsageError(f"--draft-window is for drafters that are networks, and {name} is none: leave it out")
            if self.quantize is not None:
                raise UsageError(f"--draft-quantize is for drafters with weights, and {name} has none: leave it out")
        if self.source is not None:
            found = Path(find_drafter(self.source))
            if self.weights is not None and found.is_dir() and not (found / self.weights).is_file():
                raise CheckpointError(f"--draft-weights {self.weights}: {self.source} holds no such file")


def check_quantize(quantize: str | None) -> None:
    """Refuse what is no quantisation of a drafter. Raises UsageError."""
    if quantize not in (None, "int8", "off"):
        raise UsageError(f"unknown quantization {quantize!r} of a drafter: write int8 or off, or leave it out")


def check_source(method: str | None, source: str | Path | None) -> None:
    """Refuse a method that doesn't exist, or needs a drafter that isn't given, or the reverse. Raises UsageError."""
    parsed = read_method(method)
    if source is None and not parsed.alone:
        raise UsageError(
            f"{'drafting' if method is None else f'method {method}'} needs a drafter: give one with --draft-model, or "
            f"a --method that needs none: {', '.join(WITHOUT_DRAFTER)}"
        )
    if source is not None and not parsed.drafter:
        raise UsageError(f"--method {method} needs no drafter: leave out {source}, or the method")
