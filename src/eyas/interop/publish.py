"""Publishes a drafter on the Hugging Face Hub: its files and model card, in one commit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.assets import SMOLLM2, SMOLLM2_ON_HUB
from eyas.errors import CheckpointError, EndpointError, UsageError
from eyas.interop.inspect.report import DrafterReport, report_drafter

CARD = "README.md"
CERTIFICATE = "eyas_certificate.json"
MEASURED = "eyas_bench.json"
"""The names that the files have on the Hub."""
HUB_ID = r"[\w.-]+/[\w.-]+"
_PLAIN = "none"
"""The method of a report's baseline."""


@dataclass(frozen=True)
class Claims:
    """What is claimed about a drafter, in addition to its files: its target, measured evidence, a license."""

    target: str | None = None
    certificate: Path | None = None
    """What `eyas verify --json` wrote."""
    bench: Path | None = None
    """What `eyas bench -o` wrote."""
    license: str | None = None


@dataclass(frozen=True)
class Publication:
    """The files to push: path in the repository -> a local file, or the bytes themselves."""

    repo: str
    files: Mapping[str, Path | bytes]

    @property
    def sizes(self) -> dict[str, int]:
        """Path in the repository -> bytes."""
        return {
            name: len(each) if isinstance(each, bytes) else each.stat().st_size for name, each in self.files.items()
        }

    @property
    def lacks(self) -> tuple[str, ...]:
        """What readers look for in a card and don't find in this one: fields of `Claims`."""
        signs = {
            "target": "base_model:",
            "license": "license:",
            "certificate": "## Losslessness",
            "bench": "## Accept length",
        }
        return tuple(claim for claim, sign in signs.items() if f"\n{sign}" not in self.card)

    @property
    def card(self) -> str:
        """The text of the model card."""
        card = self.files[CARD]
        return (card if isinstance(card, bytes) else card.read_bytes()).decode()


def publication(folder: Path, repo: str, claims: Claims) -> Publication:
    """Everything to push. The folder's README.md is the model card; if there is none, a card is written.

    Raises UsageError for claims that don't hold or are about another drafter, and CheckpointError for a drafter that
    won't load.
    """
    report = report_drafter(folder)
    if report.problems:
        raise CheckpointError(f"{folder} won't load, so it isn't pushed: {'; '.join(report.problems)}")
    files: dict[str, Path | bytes] = {"config.json": folder / "config.json"}
    files |= {each.name: each for pattern in ("*.safetensors*", "LICENSE*") for each in sorted(folder.glob(pattern))}
    certificate = None if claims.certificate is None else _certificate(claims.certificate, folder)
    bench = None if claims.bench is None else _bench(claims.bench, folder)
    for name, evidence in ((CERTIFICATE, claims.certificate), (MEASURED, claims.bench)):
        files |= {} if evidence is None else {name: evidence}
    own = folder / CARD
    files[CARD] = own if own.is_file() else _card(report, repo, claims, certificate, bench).encode()
    return Publication(repo, files)


def push(what: Publication, *, private: bool, message: str) -> str:
    """Create the repository if there is none and push all files in one commit; returns the commit's URL.

    Raises EndpointError if the Hub refuses or doesn't answer.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    try:
        api.create_repo(what.repo, private=private or None, exist_ok=True)
        operations = [CommitOperationAdd(name, each) for name, each in what.files.items()]
        return str(api.create_commit(what.repo, operations, commit_message=message).commit_url)
    except Exception as error:  # of whichever HTTP library the Hub's client uses
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EndpointError(
            f"{what.repo} was not pushed to {api.endpoint}: {first} (log in with hf auth login, or set HF_TOKEN)"
        ) from error


def _read(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or any(key not in content for key in keys):
        raise UsageError(f"{path} lacks {', '.join(keys)}: give the JSON of a certificate and of a benchmark")
    return content


def _certificate(path: Path, folder: Path) -> dict[str, Any]:
    """The certificate; UsageError if it doesn't certify this drafter."""
    found = _read(path, ("equal", "errors", "cells", "model", "draft_model", "promise"))
    if not found["equal"] or found["errors"]:
        raise UsageError(f"{path} says that speculation changes tokens, or that rows failed: verify it again")
    if Path(found["draft_model"]).resolve() != folder.resolve():
        raise UsageError(f"{path} is about {found['draft_model']}, not {folder}: verify this drafter")
    return found


def _bench(path: Path, folder: Path) -> dict[str, Any]:
    """The measurement; UsageError if it left rows out, or isn't of this drafter alone.

    The card shows all of its lines, so that none is picked for its figures.
    """
    found = _read(path, ("lines", "machine", "settings", "errors"))
    if found["errors"]:
        raise UsageError(f"{path} says that rows failed: measure it again")
    drafters = found["settings"].get("drafters", [])
    if {Path(each).resolve() for each in drafters} != {folder.resolve()}:
        raise UsageError(
            f"{path} is about {' and '.join(drafters) or 'no drafter'}, not {folder}: measure this drafter"
        )
    return found


def _card(
    report: DrafterReport,
    repo: str,
    claims: Claims,
    certificate: Mapping[str, Any] | None,
    bench: Mapping[str, Any] | None,
) -> str:
    from huggingface_hub import ModelCardData

    provenance = report.provenance if isinstance(report.provenance, dict) else {}
    target = claims.target or provenance.get("target")
    target = SMOLLM2_ON_HUB if target == SMOLLM2 else target
    hub_id = isinstance(target, str) and re.fullmatch(HUB_ID, target) and not Path(target).exists()
    data = ModelCardData(
        base_model=target if hub_id else None,
        license=claims.license,
        library_name="eyas",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "eyas", report.kind],
    )
    name = target if hub_id else "TARGET" if target is None else Path(target).name
    lines = [
        "---", data.to_yaml(), "---", "", f"# {repo.partition('/')[2]}", "",
        f"A speculative-decoding drafter of kind {report.kind} for {name}: {report.parameters:,} parameters. Decoded "
        "with eyas, the output is the target's own, token for token.", "",
        f"    eyas serve {name} --draft-model {repo}", "",
    ]  # fmt: skip
    lines += [] if certificate is None else _losslessness(certificate)
    lines += [] if bench is None else _accept_lengths(bench)
    trained = {key: provenance[key] for key in ("rows", "steps", "seconds", "data_hash") if key in provenance}
    if trained:
        lines += ["## Training", "", ", ".join(f"{key} {value}" for key, value in trained.items()), ""]
    return "\n".join(lines)


def _losslessness(certificate: Mapping[str, Any]) -> list[str]:
    rows = [
        (f"{cell['temperature']:g}", cell["tree"], cell["batch_size"], cell["rows"], cell["tokens"], cell["verdict"])
        for cell in certificate["cells"]
    ]
    return [
        "## Losslessness", "",
        f"`eyas verify` compared every token with plain decoding ({CERTIFICATE}).",
        f"Promised in {certificate['promise']}.", "",
        *_table(("T", "tree", "batch", "rows", "tokens", "result"), rows), "",
    ]  # fmt: skip


def _accept_lengths(bench: Mapping[str, Any]) -> list[str]:
    sampling = bench["settings"]["sampling"]
    rows = [
        (
            line["task"], f"{line.get('temperature', sampling['temperature']):g}", line["method"],
            "" if line["accept_length"] is None else f"{line['accept_length']:.2f}",
            f"{line['tokens_per_second']:.1f}", "" if line["speedup"] is None else f"{line['speedup']:.2f}x",
        )
        for line in bench["lines"]
        if line["method"] != _PLAIN
    ]  # fmt: skip
    machine = bench["machine"]
    on = machine.get("gpu") or machine.get("cpu") or "an unnamed machine"
    return [
        "## Accept length (tau) and speed", "", f"Measured by `eyas bench` on {on} ({MEASURED}).", "",
        *_table(("task", "T", "tree", "tau", "tokens/s", "speedup"), rows), "",
    ]  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]
