"""`eyas bench report`: a training run and its measurements as one HTML file."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from eyas.cli.common.aliases import in_options
from eyas.cli.common.display import note
from eyas.cli.common.measuring import check_output
from eyas.errors import DataError
from eyas.plugins import feature

if TYPE_CHECKING:
    from eyas.bench.offline.trees import TrainingRun
    from eyas.bench.report import page


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
    beside: Annotated[
        list[Path],
        Option(
            exists=True, file_okay=False, help="Another run, on more or less data, to compare with; may be repeated."
        ),
    ] = [],  # noqa: B006
) -> None:
    """Write an HTML report of a training run.

    One file that loads nothing: data, store, training, checkpoints, accept length by data, trees, methods, sample
    answers, concurrency, provenance. It contains what is available: run `eyas bench checkpoints RUN` and `eyas bench
    trees` first to include their parts, and write the JSON of `bench methods` and `bench serve` to
    RUN/bench/methods.json and RUN/bench/serve.json.

    Examples:
        eyas bench report RUN --output report.html
        eyas bench report RUN --chats CHATS --store STORE --output report.html
    """
    check_output(output)
    folder = _drafter(run)
    drafter = _read(folder / "config.json")
    from eyas.bench.accuracy.compare import accuracy_section
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.trees import TrainingRun
    from eyas.bench.report import page
    from eyas.data.chats.folder import read_report
    from eyas.files import write_text

    trained = TrainingRun(run)
    checkpoints = _optional(run / "bench" / "checkpoints.json")
    grown = _optional(trees or run / "bench" / "trees.json")
    methods = _optional(run / "bench" / "methods.json")
    served = _optional(run / "bench" / "serve.json")
    sections = [page.accept_length_section(checkpoints, grown, methods)] if checkpoints or grown or methods else []
    sections.append(page.trained_section(trained, drafter))
    if chats:
        sections.append(page.data_section([(each.name, read_report(each)) for each in chats]))
    kept = store or (Path(trained.recipe["store"]) if trained.recipe.get("store") else None)
    if kept is not None:
        sections += _store(kept)
    sections.append(page.training_section(trained))
    if checkpoints is not None:
        sections.append(page.checkpoint_section(trained, checkpoints))
    learned = [(each.name, points) for each in (run, *beside) if (points := _learned(each))]
    if learned:
        sections.append(page.learning_section(learned))
    if grown is not None:
        sections.append(page.tree_section(grown))
    if methods is not None:
        sections.append(page.methods_section(methods))
        if samples := methods.get("samples"):  # missing in reports of earlier versions
            sections.append(page.sample_section(samples))
    if served is not None:
        sections.append(page.concurrency_section(served))
    if sweep is not None:
        sections.append(feature("sweep_section", "--sweep")(_read(sweep)))
    if accuracy is not None:
        sections.append(accuracy_section(_read(accuracy)))
    machine = describe_machine() if checkpoints is None else checkpoints["machine"]
    sections += [page.provenance_section(drafter, machine, trained.recipe), page.GLOSSARY]
    # the recipe has the target's path, a drafter only its name
    target = trained.recipe.get("target") or drafter.get("eyas", {}).get("target") or "TARGET"
    lead = page.headline(checkpoints, grown, methods, target, folder)
    write_text(output, page.render(_title(trained, drafter), lead, sections))
    note(f"wrote {output}")


def _learned(run: Path) -> list[page.Learned]:
    """The checkpoints of a run that were measured on real tasks and record what they were trained on, by step."""
    from eyas.bench.report import page

    measured = _optional(run / "bench" / "checkpoints.json")
    lengths = {} if measured is None else {each["name"]: each["mean"]["accept_length"] for each in measured["ranked"]}
    made = {name: _optional(run / "checkpoints" / name / "config.json") for name in lengths}
    found = [
        page.Learned.of(config["eyas"], lengths[name]) for name, config in made.items() if config and "eyas" in config
    ]
    return sorted(found, key=lambda one: one.step)


def _title(run: TrainingRun, drafter: Any) -> str:
    made = drafter.get("eyas", {})
    kind = made.get("shape", {}).get("kind")
    target = made.get("target") or run.recipe.get("target")
    return f"{kind or 'A'} drafter for {Path(target).name if target else 'a target'}"


def _drafter(run: Path) -> Path:
    """The folder of the picked, the best, or the last drafter. DataError if there is none."""
    for name in ("pick", "best", "drafter"):
        if (run / name / "config.json").is_file():
            return run / name
    raise DataError(f"{run} has no drafter yet: training writes best/ and drafter/")


def _store(folder: Path) -> list[page.Section]:
    """The section on the store; empty if the store is gone."""
    from eyas.bench.report import page
    from eyas.data.store.manifest import MANIFEST, read_manifest
    from eyas.plan.costs import Workload, storage

    if not (folder / MANIFEST).is_file():
        note(f"{folder} no longer exists: the report has no section on the store")
        return []
    manifest = read_manifest(folder)
    splits = manifest.settings.splits.values()
    rows = sum(split.rows for split in splits)
    tokens = sum(split.tokens for split in splits)
    work = Workload(rows, tokens // rows, sum(split.taught for split in splits) / tokens)
    planned = [(in_options(line.name), line.total) for line in storage(manifest.settings.layout, work)]
    actual = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    layout = manifest.settings.layout
    final = f"top:{layout.top}" if layout.final == "top" else layout.final
    return [
        page.store_section(
            manifest.model_dump(mode="json"), planned, actual, f"--states {layout.states} --final {final}"
        )
    ]


def _optional(path: Path) -> Any:
    return _read(path) if path.is_file() else None


def _read(path: Path) -> Any:
    try:
        return jsonlib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"can't read {path}: {error}") from error
