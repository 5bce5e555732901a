"""How features are stored, as the command line says it: for `data capture` and `plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, get_args

from typer import Option

from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.data.store.encoding import StateEncoding
    from eyas.data.store.layout import FinalKind

Taps = Annotated[str, Option(help="Boundaries such as 2,16,29; auto: by the target's architecture.")]
States = Annotated[str, Option(help="How states are stored: fp8, bf16 or float32.")]
Final = Annotated[
    str, Option(help="Final states to store: answers, all, or top:K (the teacher's K best tokens in their place).")
]


def parse_taps(text: str) -> tuple[int, ...] | None:
    """`auto` (None) or boundaries with commas between them."""
    if text == "auto":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--taps {text}: write auto, or boundaries such as 2,16,29") from None


def parse_states(text: str) -> StateEncoding:
    """The encoding's name."""
    from eyas.data.store.encoding import StateEncoding

    for known in get_args(StateEncoding):
        if text == known:
            encoding: StateEncoding = known
            return encoding
    raise UsageError(f"--states {text}: write {', '.join(get_args(StateEncoding))}")


def parse_final(text: str) -> tuple[FinalKind, int | None]:
    """`answers`, `all`, or `top:K` with its K."""
    kind, _, count = text.partition(":")
    if kind == "top" and count.isdecimal() and int(count) > 0:
        return "top", int(count)
    if text == "answers" or text == "all":
        return ("all" if text == "all" else "answers"), None
    raise UsageError(f"--final {text}: write answers, all, or top:K such as top:64")
