"""`eyas export`: a drafter in the form another engine reads."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from eyas.cli.common.build import hide_progress_bars
from eyas.cli.common.display import note
from eyas.cli.common.options import DrafterFileOptions, Json
from eyas.cli.drafter.served_target import served_target
from eyas.errors import UsageError
from eyas.hub import find_target

if TYPE_CHECKING:
    pass


Consumer = Literal["safeailab", "sglang", "vllm", "speculators", "atom", "tensorrt-llm", "openvino", "gguf"]
"""The names of the consumers in `eyas.interop.export.consumers`."""


def export(
    drafter: Annotated[str, Argument(help="A drafter directory, GGUF file or Hub id.", metavar="DRAFTER")],
    to: Annotated[Consumer, Option(help="The engine that will read it; gguf is for llama.cpp.")],
    output: Annotated[Path, Option("--output", "-o", help="The folder to write.")],
    files: DrafterFileOptions,
    model: Annotated[
        str | None, Option(help="The target it drafts for: checked, and copied from if the engine needs it.")
    ] = None,
    taps: Annotated[
        str | None, Option(help="Boundaries the drafter reads, such as 2,16,29, if its files leave that open.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Option(help="Dtype of the weights, if that rounds nothing.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a drafter in another engine's format.

    The export is read back and must give the same logits; the command that serves it there is printed.

    Examples:
        eyas export DRAFTER --to vllm --output DIR --model MODEL
        eyas export DRAFTER --to gguf --output DIR --model MODEL
    """
    boundaries = None if taps is None else _boundaries(taps)
    files.of(drafter).check()
    if model is not None:
        find_target(model)
    hide_progress_bars()
    from eyas.drafters.loading import local_directory
    from eyas.interop.export.export import export as write
    from eyas.targets.loading import resolve_dtype

    path = local_directory(drafter)
    wanted = None if dtype is None else resolve_dtype(dtype)
    done = write(
        path,
        to,
        output,
        None if model is None else served_target(model, path, wanted, files),
        taps=boundaries,
        dtype=wanted,
        weights=files.draft_weights,
        ignore=files.ignore_config_key,
    )
    if json:
        found: dict[str, Any] = {"path": str(done.path), "consumer": done.consumer.name, "command": done.command}
        found |= {"changes": list(done.changes), "bytes": dict(done.sizes), "logit_difference": done.difference}
        typer.echo(jsonlib.dumps(found))
        return
    for change in done.changes:
        note(f"note: {change}")
    note(f"weights in the file: {', '.join(f'{part} {size / 1e6:,.1f} MB' for part, size in done.sizes.items())}")
    note(f"{done.path} reads back as the same drafter (largest difference in a logit: {done.difference:.2g})")
    typer.echo(done.command)


def _boundaries(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--taps {text!r}: write boundaries with commas between them, such as 2,16,29") from None
