"""`eyas push`: a drafter to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from re import fullmatch
from typing import Annotated

import typer
from typer import Argument, Option

from eyas.cli.common.display import note
from eyas.errors import UsageError

_MISSING = {
    "target": "no base model: give --model OWNER/NAME",
    "license": "no license: give --license NAME",
    "certificate": "no certificate: give --certificate FILE, from eyas verify --json",
    "bench": "no figures: give --bench FILE, from eyas bench -o",
}
"""What a card may lack -> how to add it."""


def push(
    drafter: Annotated[Path, Argument(help="A drafter's folder.", metavar="DRAFTER", exists=True, file_okay=False)],
    repo: Annotated[str, Argument(help="The repository on the Hub: OWNER/NAME.", metavar="REPO")],
    model: Annotated[
        str | None, Option(help="The target's Hub id for the card (default: what the drafter was trained for).")
    ] = None,
    certificate: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="Output of eyas verify --json: pushed, and in the card.")
    ] = None,
    bench: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="The output of eyas bench -o: pushed, and tau per task in the card."),
    ] = None,
    license_: Annotated[str | None, Option("--license", help="Its license for the card, such as apache-2.0.")] = None,
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    message: Annotated[str, Option(help="The commit message.")] = "Drafter, pushed by eyas",
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be pushed; nothing is sent.")] = False,
) -> None:
    """Push a drafter to the Hugging Face Hub, with a model card.

    The card says how to use it, what eyas verify found (losslessness), and tau per task by eyas bench. A README.md in
    the folder is used as the card instead.

    Examples:
        eyas push RUN/pick OWNER/NAME --license apache-2.0 --dry-run
        eyas push RUN/pick OWNER/NAME --certificate certificate.json --bench bench.json
    """
    if not fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"{repo} isn't a repository's id: write OWNER/NAME")
    if not (drafter / "config.json").is_file():
        raise UsageError(f"{drafter} has no config.json: give a drafter's folder, such as RUN/pick")
    from eyas.interop.publish import CARD, Claims, publication
    from eyas.interop.publish import push as send

    what = publication(drafter, repo, Claims(model, certificate, bench, license_))
    if (drafter / CARD).is_file() and (model or license_):
        raise UsageError(f"{drafter / CARD} is the card, so --model and --license would be ignored: leave them out")
    for name, size in what.sizes.items():
        note(f"{size:>14,} bytes  {name}")
    if not (drafter / CARD).is_file():
        for missing in what.lacks:
            note(f"the card has {_MISSING[missing]}")
    if dry_run:
        typer.echo(what.card)
        note(f"nothing was sent: without --dry-run this goes to {repo}")
        return
    typer.echo(send(what, private=private, message=message))
