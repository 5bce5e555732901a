"""A side of a serving benchmark: which server is asked, and what is added to every request for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import UsageError

_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class Side:
    """An OpenAI-compatible server under a name. Two sides may be one server, asked in two ways."""

    name: str
    url: str
    """Up to and including `/v1`."""
    model: str = ""
    """The model's name in requests; empty for the first one that the server lists."""
    speculate: bool | None = None
    """Sent as `{"eyas": {"speculate": ...}}` unless None: only eyas servers know it."""

    @property
    def root(self) -> str:
        """The server's address without `/v1`, where `/health` and `/metrics` are."""
        return self.url.removesuffix("/v1")

    @property
    def extra(self) -> dict[str, Any]:
        """What is added to every request's body."""
        return {} if self.speculate is None else {"eyas": {"speculate": self.speculate}}

    def settings(self) -> dict[str, Any]:
        """What is kept in JSON."""
        return {"url": self.url, "model": self.model, "speculate": self.speculate}


def parse_side(text: str, default_name: str = "") -> Side:
    """`NAME=URL[,speculate=true|false][,model=NAME]`; without `NAME=` the default name is taken, if there is one."""
    address, *settings = text.split(",")
    name, given, url = address.partition("=")
    if not given or name.startswith(("http://", "https://")):
        name, url = default_name, address
    if not name or not url.startswith(("http://", "https://")):
        raise UsageError(
            f"{text!r} is no server: write http://HOST:PORT/v1 (with --side NAME=http://...), perhaps with "
            ",speculate=false or ,model=NAME"
        )
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "model" and value:
            values[key] = value
        elif key == "speculate" and value in _FLAGS:
            values[key] = _FLAGS[value]
        else:
            raise UsageError(f"{text!r}: {setting!r} is neither speculate=true|false nor model=NAME")
    url = url.rstrip("/")
    return Side(name, url if url.endswith("/v1") else f"{url}/v1", **values)


def check_names(names: Sequence[str], baseline: str) -> None:
    """Refuse sides that can't be told apart, and a baseline that is none of them."""
    if len(set(names)) < len(names):
        raise UsageError(f"two sides have the same name: {', '.join(names)}")
    if baseline not in names:
        raise UsageError(f"--baseline {baseline!r} is none of the sides: {', '.join(names)}")
