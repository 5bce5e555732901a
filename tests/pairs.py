"""A tiny target with a chat template and a tiny EAGLE-3 drafter, saved as directories, as users have them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from eyas.drafters.checkpoint import save_network
from eyas.train.lm.lm import train_tokenizer

from . import tiny

_TEXT = "def add(a, b):\n    return a + b\n\nNatalia sold 48/2 = <<48/2=24>>24 clips in May.\n" * 3


class Pair(NamedTuple):
    """The paths of a target and a drafter."""

    model: Path
    drafter: Path


@cache
def tokenizer() -> Any:
    """A byte-level tokenizer with a chat template."""
    return train_tokenizer([_TEXT], vocab_size=400, context=256)


def save_target(path: Path, name: str = "llama", **changes: Any) -> Path:
    """Save a random model with the tokenizer's vocabulary."""
    tiny.build_model(name, vocab_size=len(tokenizer()), **changes).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def save_drafter(path: Path, **settings: Any) -> Path:
    """Save a random drafter for such a target."""
    vocab = len(tokenizer())
    save_network(
        tiny.eagle3_module(**{"vocab_size": vocab, "draft_vocab_size": 120, "taps": [1, 2, 4], **settings}), path
    )
    return path


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write a JSON Lines file; a row that is a string is written as is."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
