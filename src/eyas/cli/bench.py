"""`eyas bench`: methods against plain decoding, interleaved."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from eyas.cli.build import open_target, sampling_params
from eyas.cli.display import note, output, row_bar
from eyas.cli.guard import FAILURE
from eyas.cli.options import (
    BatchSize,
    Coupled,
    DrafterFileOptions,
    Limit,
    SamplingOptions,
    TargetOptions,
    Trees,
)

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.target import Target


def bench(
    target: TargetOptions,
    files: DrafterFileOptions,
    sampling: SamplingOptions,
    prompt_file: Annotated[list[Path], Option(exists=True, dir_okay=False, help="JSON Lines; may be repeated.")],
    draft_model: Annotated[list[str], Option(help="A drafter; may be repeated.")] = [],  # noqa: B006
    tree: Trees = [],  # noqa: B006  # typer copies defaults
    coupled: Coupled = None,
    repeats: Annotated[int, Option(min=1, help="Runs of every prompt with every method; the median counts.")] = 3,
    warmup: Annotated[int, Option(min=0, help="Uncounted runs of a file's first prompt with every method.")] = 1,
    batch_size: BatchSize = 1,
    limit: Limit = None,
    json: Annotated[Path | None, Option("--json", dir_okay=False, help="Write everything to this file.")] = None,
) -> int:
    """Measure plain decoding, and every drafter with every tree, on every prompt file."""
