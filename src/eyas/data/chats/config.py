"""Settings of `eyas data prepare`, and the record of everything else its result depends on."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from eyas.config import StrictModel
from eyas.data.chats.sources import STDLIB, ChatSource, files_of
from eyas.files import file_hash

_MIN_HELD_OUT = 0.02
_MAX_HELD_OUT = 0.1
_MEASURED_CHATS = 32
"""Bounds of the default held-out share, and the number of held-out chats it aims at, which is what a run measures."""
NEAR_SIMILARITY = 0.8
"""Default minimum Jaccard similarity of near-duplicates."""


class PrepareConfig(StrictModel):
    """Which sources are blended, which chats are dropped, and which target they are rendered for."""

    sources: tuple[ChatSource, ...] = Field(min_length=1)
    output: Path
    model: str | None = None
    samples: int | None = Field(default=None, ge=1)
    seed: int = 0
    held_out_share: float | None = Field(default=None, ge=0, lt=1)
    """Share of the questions held out for validation; None: 2%, or for few chats enough to get about 32, up to 10%."""
    exclude: tuple[Path, ...] = ()
    drop_unanswered: bool = False
    max_length: int | None = Field(default=None, ge=2)
    too_long: Literal["drop", "cut"] = "drop"
    min_answer_tokens: int = Field(default=0, ge=0)
    near_duplicates: Literal["auto"] | Annotated[float, Field(ge=0.1, le=1)] | None = "auto"
    """Minimum Jaccard similarity of near-duplicates. auto: 0.8 if datasketch is installed; None: keep them all."""

    @model_validator(mode="after")
    def _fits_together(self) -> PrepareConfig:
        names = [source.name for source in self.sources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two sources are named {twice}: rename one with ,name=...")
        if self.model is None and (self.max_length is not None or self.min_answer_tokens):
            raise ValueError("lengths are counted in the target's tokens: give `model=`")
        if self.max_length is None and self.too_long == "cut":
            raise ValueError("too_long: cut needs a maximum length: give `max_length=`")
        return self

    def held_out_share_of(self, chats: int) -> float:
        """The held-out share for `chats` chats; larger for few, because choices based on a handful depend on chance."""
        if self.held_out_share is not None:
            return self.held_out_share
        return min(_MAX_HELD_OUT, max(_MIN_HELD_OUT, _MEASURED_CHATS / chats))

    @property
    def near_threshold(self) -> float | None:
        """The near-duplicate threshold with `auto` resolved; None if near-duplicates are not searched for."""
        if self.near_duplicates == "auto":
            return NEAR_SIMILARITY if find_spec("datasketch") else None
        return self.near_duplicates


def settings_of(config: PrepareConfig, rendering: str | None) -> dict[str, Any]:
    """Everything that decides the contents of the folder, for the report; equal settings make equal folders.

    These are the options, hashes of local files, and `rendering`: the hash of how the target renders chats, or None.
    """
    made = config.model_dump(mode="json", exclude={"output"}, by_alias=True)
    made["near_duplicates"] = config.near_threshold
    made["data"] = {source.name: _data_of(source) for source in config.sources}
    made["excluded"] = [file_hash(file) for file in config.exclude]
    made["rendering"] = rendering
    return made


def _data_of(source: ChatSource) -> str:
    if source.location == STDLIB:
        return f"Python {platform.python_version()}"
    return source.location if source.path is None else file_hash(*files_of(source).read)
