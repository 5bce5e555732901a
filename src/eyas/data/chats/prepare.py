"""From sources to a chat folder: check, deduplicate, blend, render for the target, split, report.

Two passes. The first reads every source once and keeps the good chats in one file on disk, of each its place there and
its rank in memory. The second draws them in the order of the blend, tokenizes only those, and writes the splits. Both
hold one chat at a time. The folder appears whole, under its name, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import eyas
from eyas.data.chats.candidates import ChatFitter, Progress, fitted, gather, take_turns
from eyas.data.chats.config import PrepareConfig, settings_of
from eyas.data.chats.duplicates import question_key
from eyas.data.chats.folder import REPORT, SPLITS, read_report, split_file, write_report
from eyas.data.chats.tally import DEFINITIONS, SourceTally, SplitTally
from eyas.errors import DataError, UsageError
from eyas.files import writing_folder
from eyas.text.chats import chat_line, held_out


def prepare(config: PrepareConfig, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Make the folder and return its report; a folder made with the same settings from the same data is left as it is.

    Raises UsageError if the output holds something else, DataError if no chat can be used or the disk is full, and
    ModelError if the target's template or tokenizer can't mark answers.
    """
    fitter = None
    if config.model is not None:
        fitter = ChatFitter(config.model, config.max_length, config.too_long == "cut", config.min_answer_tokens)
    settings = settings_of(config, None if fitter is None else fitter.identity)
    there = _existing(config.output, settings)
    if there is not None:
        return there
    try:
        with writing_folder(config.output) as folder:
            report = _write(config, fitter, folder, progress) | {"settings": settings}
            write_report(folder, report)
    except OSError as error:
        raise DataError(f"can't write {config.output}: {error.strerror or error}") from error
    return report


def _existing(output: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The report of a folder that is already what was asked for; UsageError if something else is in the way."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / REPORT).is_file():
        raise UsageError(f"{output} exists and is no chat folder: name another output or remove it")
    report = read_report(output)
    before = report.get("settings", {})
    other = [key for key in {**settings, **before} if settings.get(key) != before.get(key)]
    if other:
        raise UsageError(
            f"{output} was made with other settings or data ({', '.join(other)}): name another output or remove it"
        )
    return report


def _write(config: PrepareConfig, fitter: ChatFitter | None, folder: Path, progress: Progress) -> dict[str, Any]:
    """Both passes; returns the report's figures."""
    tallies = [SourceTally(source.name) for source in config.sources]
    sides = {name: SplitTally() for name in SPLITS}
    weighted = any(source.weight is not None for source in config.sources)
    spool = folder / "spool.jsonl"
    with spool.open("wb+") as store, ExitStack() as files:
        found = gather(config, store, tallies, progress)
        if not any(map(len, found)):
            raise DataError(_nothing(tallies))
        asked = [source.weight or 1.0 for source in config.sources]
        weights = asked if weighted else [float(len(candidates) or 1) for candidates in found]
        most = min(config.samples or sum(map(len, found)), sum(map(len, found)))
        out = {name: files.enter_context(split_file(folder, name).open("w", encoding="utf-8")) for name in SPLITS}
        drawn = [fitted(store, places, fitter, tally) for places, tally in zip(found, tallies, strict=True)]
        for done, (source, chat) in enumerate(take_turns(drawn, weights, config.samples, strict=weighted), start=1):
            side = SPLITS[held_out(question_key(chat), config.held_out_share)]
            out[side].write(chat_line(chat))
            sides[side].add(chat)
            tallies[source].chats += 1
            progress("chats", done, most)
    spool.unlink()
    total = sum(tally.chats for tally in tallies)
    if not total:
        raise DataError(_nothing(tallies))
    shares = [weight / sum(weights) for weight in weights]
    return {
        "made_by": f"eyas {eyas.__version__} data prepare",
        "sources": [t.as_dict(s if weighted else None, total) for t, s in zip(tallies, shares, strict=True)],
        "splits": {name: tally.as_dict() for name, tally in sides.items()},
        "notes": _notes(config, fitter, tallies, sides, shares if weighted else None),
        "definitions": list(DEFINITIONS),
    }


def _nothing(tallies: Sequence[SourceTally]) -> str:
    """Why no chat is left."""
    lines = [line for tally in tallies for line in tally.reasons()]
    return "no chat can be used: " + ("; ".join(lines) or "the sources are empty")


def _notes(
    config: PrepareConfig,
    fitter: ChatFitter | None,
    tallies: Sequence[SourceTally],
    sides: Mapping[str, SplitTally],
    shares: Sequence[float] | None,
) -> list[str]:
    """What to know before this is trained on."""
    notes = []
    for name, side in sides.items():
        if not side.chats:
            notes.append(f"no chat is in {name}: add chats or change the held-out share ({config.held_out_share:g})")
    if config.samples is not None:
        for tally, share in zip(tallies, shares or (), strict=False):
            wanted = round(config.samples * share)
            if tally.chats < wanted - 1:
                notes.append(f"{tally.name} has {tally.chats} chats, its share of {config.samples} is {wanted}")
        total = sum(tally.chats for tally in tallies)
        if shares is None and total < config.samples:
            notes.append(f"there are {total} chats, {config.samples} were asked for")
    if fitter is not None and fitter.end_mark is None:
        notes.append("the target's template ends answers with no token of their own: nothing teaches where to stop")
    return notes
