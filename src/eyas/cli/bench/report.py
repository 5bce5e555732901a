"""`eyas bench report`: a training run and its measurements as one HTML file."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from eyas.cli.common.display import note
from eyas.cli.common.measuring import check_output
from eyas.errors import DataError

if TYPE_CHECKING:
    from eyas.bench.offline.checkpoints import TrainingRun
    from eyas.bench.report.page import Section


def report(
    run: Annotated[
        Path, Argument(metavar="RUN", exists=True, file_okay=False, help="A folder that `eyas train` wrote.")
    ],
    output: Annotated[Path, Option("--output", "-o", dir_okay=False, help="The HTML file to write.")],
    chats: Annotated[
        list[Path], Option(exists=True, file_okay=False, help="A chat folder to report on; may be repeated.")
    ] = [],  # noqa: B006  # typer copies defaults
    store: Annotated[
        Path | None, Option(exists=True, file_okay=False, help="The store (default: the recipe's).")
    ] = None,
    trees: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="JSON of `eyas bench trees` (default: RUN/bench/trees.json)."),
    ] = None,
    sweep: Annotated[Path | None, Option(exists=True, dir_okay=False, help="results.json of a sweep.")] = None,
    accuracy: Annotated[Path | None, Option(exists=True, dir_okay=False, help="JSON of `eyas bench accuracy`.")] = None,
) -> None:
    """Write an HTML report of a training run.

    One file that loads nothing: data, store, training, checkpoints, trees, provenance. It holds what is there: run
    `eyas bench checkpoints RUN` and `eyas bench trees` first to have their parts in it.
    """
    check_output(output)
    drafter = _drafter(run)
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.checkpoints import TrainingRun
    from eyas.bench.report.page import render
    from eyas.bench.report.sections import (
        WORDS,
        checkpoint_section,
        data_section,
        provenance_section,
        trained_section,
        training_section,
        tree_section,
    )
    from eyas.data.chats.folder import read_report
    from eyas.files import write_text
    from eyas.sweep.report import sweep_section

    trained = TrainingRun(run)
    checkpoints = _optional(run / "bench" / "checkpoints.json")
    grown = _optional(trees or run / "bench" / "trees.json")
    sections = [trained_section(trained, drafter)]
    if chats:
        sections.append(data_section([(folder.name, read_report(folder)) for folder in chats]))
    kept = store or (Path(trained.recipe["store"]) if trained.recipe.get("store") else None)
    if kept is not None:
        sections += _store(kept)
    sections.append(training_section(trained))
    if checkpoints is not None:
        sections.append(checkpoint_section(trained, checkpoints))
    if grown is not None:
        sections.append(tree_section(grown))
    if sweep is not None:
        sections.append(sweep_section(_read(sweep)))
    if accuracy is not None:
        from eyas.bench.accuracy.report import accuracy_section

        sections.append(accuracy_section(_read(accuracy)))
    machine = describe_machine() if checkpoints is None else checkpoints["machine"]
    sections += [provenance_section(drafter, machine, trained.recipe), WORDS]
    write_text(output, render(_title(trained, drafter), _lead(checkpoints, grown), sections))
    note(f"wrote {output}")


def _title(run: TrainingRun, drafter: Any) -> str:
    made = drafter.get("eyas", {})
    kind = made.get("shape", {}).get("kind")
    target = made.get("target") or run.recipe.get("target")
    return f"{kind or 'A'} drafter for {Path(target).name if target else 'a target'}"


def _lead(checkpoints: Any, trees: Any) -> list[str]:
    """The sentences that sum the report up."""
    from eyas.bench.offline.candidates import Candidate, doubt

    lines = []
    if checkpoints is not None:
        best = checkpoints["ranked"][0]
        doubted = doubt(Candidate.from_dict(best))
        role = "is the checkpoint to serve" if doubted is None else "is the best checkpoint, but not one to serve yet"
        lines.append(
            f"{best['name']} {role}: {best['mean']['accept_length']:.2f} tokens a pass and "
            f"{best['mean']['speedup']:.2f} times the speed of plain decoding, mean over {', '.join(best['tasks'])}."
        )
    if trees is not None:
        best = trees["ranked"][0]
        lines.append(
            f"With its best draft tree, {best['name']}: {best['mean']['accept_length']:.2f} tokens a pass, "
            f"{best['mean']['tokens_per_second']:.0f} tokens/s, {best['mean']['speedup']:.2f} times plain decoding."
        )
    return lines or ["Nothing was measured on real tasks yet."]


def _drafter(run: Path) -> Any:
    """The config.json of the picked, the best, or the last drafter. DataError if there is none."""
    for name in ("pick", "best", "drafter"):
        path = run / name / "config.json"
        if path.is_file():
            return _read(path)
    raise DataError(f"{run} holds no drafter yet: training writes best/ and drafter/")


def _store(folder: Path) -> list[Section]:
    """The section on the store; empty if the store is gone."""
    from eyas.bench.report.sections import store_section
    from eyas.data.plan import Workload, storage
    from eyas.data.store.manifest import MANIFEST, read_manifest

    if not (folder / MANIFEST).is_file():
        note(f"{folder} no longer exists: the report has no section on the store")
        return []
    manifest = read_manifest(folder)
    splits = manifest.settings.splits.values()
    rows, tokens = sum(split.rows for split in splits), sum(split.tokens for split in splits)
    work = Workload(rows, tokens // rows, sum(split.taught for split in splits) / tokens)
    planned = [(line.name, line.total) for line in storage(manifest.settings.layout, work)]
    actual = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    layout = manifest.settings.layout
    final = f"top:{layout.top}" if layout.final == "top" else layout.final
    return [
        store_section(manifest.model_dump(mode="json"), planned, actual, f"--states {layout.states} --final {final}")
    ]


def _optional(path: Path) -> Any:
    return _read(path) if path.is_file() else None


def _read(path: Path) -> Any:
    try:
        return jsonlib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"can't read {path}: {error}") from error
