"""`eyas doctor`: are a drafter's files interpreted as in training?"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.common.aliases import DRAFTER_HELP
from eyas.cli.common.build import open_session
from eyas.cli.common.display import counting, note, output
from eyas.cli.common.options import DrafterFileOptions, Json, TargetPanel
from eyas.cli.common.verb import FAILURE
from eyas.errors import UsageError
from eyas.files import refuse_used
from eyas.tables import by_position, show_table

if TYPE_CHECKING:
    from eyas.doctor.diagnosis import Diagnosis, Doctor


def doctor(
    target: TargetPanel,
    files: DrafterFileOptions,
    draft_model: Annotated[str, Option(help=f"The drafter: {DRAFTER_HELP}.")],
    num_speculative_tokens: Annotated[
        int, Option("--num-speculative-tokens", "-n", min=1, help="Length of the measured chains.")
    ] = 5,
    max_new_tokens: Annotated[
        int, Option(min=16, help="Maximum tokens per answer; more tokens reveal smaller faults.")
    ] = 192,
    fix: Annotated[
        Path | None, Option(help="Write a corrected copy of a misread drafter into this new folder.")
    ] = None,
    json: Json = False,
) -> int:
    """Check that eyas reads a drafter's files correctly (experimental).

    Other readings of the same files (taps, input order, norms, positions, ...) are tried on the target's answers.
    Exit code 1: the weights were trained for another reading, or fit none.

    Examples:
        eyas doctor MODEL --draft-model DRAFTER
        eyas doctor MODEL --draft-model DRAFTER --fix CORRECTED
    """
    if fix is not None:
        refuse_used(fix)
    target.of(target.model).check()
    files.of(draft_model).check()
    from eyas.doctor.diagnosis import Doctor, report
    from eyas.drafters.checkpoint import open_checkpoint
    from eyas.drafters.loading import local_directory
    from eyas.drafters.small_lm.drafter import holds_language_model

    path = local_directory(draft_model)
    if holds_language_model(path):
        raise UsageError(
            f"{draft_model} is a language model, which reads text, not the target's states: it can't be misread; "
            "`eyas bench` shows how well it drafts"
        )
    session = open_session(target.of(target.model), modules=True)
    loaded = session.target
    checkpoint = open_checkpoint(
        path, weights=files.draft_weights, ignore=files.ignore_config_key, layers=loaded.num_layers
    )
    examiner = Doctor(checkpoint, loaded, session.tokenizer, num_speculative_tokens, max_new_tokens)
    with counting() as progress:
        diagnosis = examiner.diagnose(progress)
    found = report(diagnosis, checkpoint.report.doubts)
    found["fixed"] = None if fix is None else _fixed(examiner, diagnosis, fix)
    if json:
        typer.echo(jsonlib.dumps(found))
    else:
        _print(found)
    return FAILURE if diagnosis.examined.faults else 0


def _fixed(examiner: Doctor, diagnosis: Diagnosis, folder: Path) -> str | None:
    """Where a corrected copy was written, if one would help."""
    if examiner.fix(diagnosis, folder):
        return str(folder)
    note(f"note: nothing is written to {folder}: no change of the drafter's files would help")
    return None


def _print(found: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{found['answer_tokens']} tokens of {found['prompts']} answers, chains of {found['chain']}"
    table = Table("", "read", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title)
    for header in ("accepted by\nposition, %", "gain in overlap,\npoints", "z", ""):
        table.add_column(header, justify="left" if header.startswith("accepted") else "right")
    table.add_row("", "as the files say", _rates(found["as_is"]["teacher_forced"]), "", "", "")
    for row in found["readings"]:
        gain = f"{100 * row['gain']:+.1f} ± {100 * row['error']:.1f}"
        table.add_row(row["aspect"], row["reading"], _rates(row), gain, f"{row['z']:.1f}", _meaning(row, found))
    blind = found["without_the_targets_states"]
    table.add_row("", "the best one, shown other positions' states", _rates(blind), "", "", "")
    console = output()
    show_table(console, table)
    for name, words in (("as_is", "as the files say"), ("best", "with the best reading")):
        forced, decoded = found[name]["teacher_forced"], found[name]["decoded"]
        console.print(
            f"accept length {words}: teacher-forced {forced['accept_length']:.2f}, "
            f"decoded {decoded['accept_length']:.2f} (by position, %: {_rates(decoded)})"
        )
    for doubt in found["doubts"]:
        console.print(f"left open by the files, settled by the result below: {doubt}")
    console.print(found["says"])
    for finding in found["findings"]:
        console.print(
            f"- {finding['aspect']}; trained for: {finding['trained_for']}; repair: {finding['repair']} "
            f"(teacher-forced accept length {finding['accept_length']:.2f} from there on)"
        )
    if found["fixed"]:
        console.print(f"{found['fixed']}: corrected, read back, and measured again: as good as the best reading")


def _meaning(row: dict[str, Any], found: dict[str, Any]) -> str:
    """What a reading's gain means for the verdict; empty if it loses."""
    if not row["wins"]:
        return "within its error" if row["gain"] > 0 else ""
    if found["verdict"] != "misread":
        return "better, yet not good"
    adopted = {(finding["aspect"], finding["trained_for"]) for finding in found["findings"]}
    return "better" if (row["aspect"], row["reading"]) in adopted else "better alone, not with the repairs"


def _rates(figures: dict[str, Any]) -> str:
    return by_position([100 * rate for rate in figures["accepted_by_position"]], "{:.0f}")
