"""Makes a chat folder from sources: check, deduplicate, blend, render for the target, split, report.

There are two passes. The first reads every source once, drops bad rows and exact duplicates, and writes the other chats
to a spool file; memory keeps only each chat's offset and rank. The second draws chats in blend order, drops
near-duplicates of chats drawn before, tokenizes, and writes the splits. Both hold one chat in memory at a time. The
folder appears under its name when it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import eyas
from eyas.data.chats.candidates import ChatFitter, Progress, drawn, gather, read_spooled, take_turns
from eyas.data.chats.config import PrepareConfig, settings_of
from eyas.data.chats.duplicates import Evaluations, NearDuplicates, question_key
from eyas.data.chats.folder import REPORT, SPLITS, read_report, split_file, write_report
from eyas.data.chats.tally import DEFINITIONS, SourceTally, SplitTally
from eyas.errors import DataError, UsageError
from eyas.files import writing_folder
from eyas.text.chats import chat_line, held_out


def prepare(config: PrepareConfig, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Make the chat folder and return its report. If one made with the same settings exists, only return its report.

    Raises UsageError if the output holds something else or datasketch is needed but missing, DataError if no chat can
    be used or the disk is full, and ModelError if answers can't be marked with the target's template or tokenizer.
    """
    fitter = None
    if config.model is not None:
        fitter = ChatFitter(config.model, config.max_length, config.too_long == "cut", config.min_answer_tokens)
    settings = settings_of(config, None if fitter is None else fitter.identity)
    before = _existing(config.output, settings)
    if before is not None:
        return before
    try:
        with writing_folder(config.output) as folder:
            report = _write(config, fitter, folder, progress) | {"settings": settings}
            write_report(folder, report)
    except OSError as error:
        raise DataError(f"can't write {config.output}: {error.strerror or error}") from error
    return report


def _existing(output: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The report of an existing folder made with these settings; None if there is none, UsageError for another one."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / REPORT).is_file():
        raise UsageError(f"{output} exists and is not a chat folder: choose another output, or remove it")
    report = read_report(output)
    before = report.get("settings", {})
    other = [key for key in {**settings, **before} if settings.get(key) != before.get(key)]
    if other:
        raise UsageError(
            f"{output} was made with other settings or data ({', '.join(other)}): choose another output, or remove it"
        )
    return report


def _write(config: PrepareConfig, fitter: ChatFitter | None, folder: Path, progress: Progress) -> dict[str, Any]:
    """Run both passes, write the splits into `folder`, and return the report without its settings."""
    tallies = [SourceTally(source.name) for source in config.sources]
    sides = {name: SplitTally() for name in SPLITS}
    evaluations, threshold = Evaluations(config.exclude), config.near_threshold
    weighted = any(source.weight is not None for source in config.sources)
    spool_file = folder / "spool.jsonl"
    with spool_file.open("wb+") as spool, ExitStack() as files:
        near = None
        if threshold is not None:
            near = NearDuplicates(threshold, lambda at: read_spooled(spool, at)[1], evaluations.questions)
        found = gather(config, spool, evaluations, tallies, progress)
        if not any(map(len, found)):
            raise DataError(_nothing(tallies))
        weights = [source.weight or 1.0 for source in config.sources]
        if not weighted:
            weights = [float(len(candidates) or 1) for candidates in found]
        most = min(config.samples or sum(map(len, found)), sum(map(len, found)))
        out = {name: files.enter_context(split_file(folder, name).open("w", encoding="utf-8")) for name in SPLITS}
        chats = [drawn(spool, of_source, fitter, near, tally) for of_source, tally in zip(found, tallies, strict=True)]
        for done, (source, chat) in enumerate(take_turns(chats, weights, config.samples, strict=weighted), start=1):
            side = SPLITS[held_out(question_key(chat), config.held_out_share)]
            out[side].write(chat_line(chat))
            sides[side].add(chat)
            tallies[source].chats += 1
            progress("chats", done, most)
    spool_file.unlink()
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
    """The error message for a blend without chats: what was dropped from each source, and why."""
    lines = [line for tally in tallies for line in tally.reasons()]
    return "no chat can be used: " + ("; ".join(lines) or "the sources are empty")


def _notes(
    config: PrepareConfig,
    fitter: ChatFitter | None,
    tallies: Sequence[SourceTally],
    sides: Mapping[str, SplitTally],
    shares: Sequence[float] | None,
) -> list[str]:
    """Warnings for the report, the gravest first: fewer chats than asked for, odd chats, checks that were skipped."""
    notes = []
    total = sum(tally.chats for tally in tallies)
    if config.samples is not None and total < config.samples:
        notes.append(f"only {total} of the {config.samples} requested chats could be drawn")
    for tally, share in zip(tallies, shares or (), strict=False):
        wanted = round((config.samples or 0) * share)
        if tally.chats < wanted - 1:
            notes.append(f"{tally.name} gave {tally.chats} chats; its share of {config.samples} is {wanted}")
    capped = [tally for tally in tallies if tally.not_needed] if shares is not None and config.samples is None else []
    if capped:
        short = next((tally.name for tally in tallies if not tally.not_needed), tallies[0].name)
        left = ", ".join(f"{tally.not_needed} of {tally.candidates} of {tally.name}" for tally in capped)
        notes.append(
            f"the weights end the blend where {short} runs out, which leaves out chats ({left}): for all of them leave "
            "out weight=, or say how many with --samples"
        )
    begun = sum(side.begun_by_assistant for side in sides.values())
    if begun:
        notes.append(
            f"{begun} of {total} chats begin with the assistant: nothing was asked before that first answer, and many "
            "templates refuse such chats; take out first turns that only greet"
        )
    for name, side in sides.items():
        if not side.chats:
            notes.append(f"{name} is empty: add chats or change the held-out share ({config.held_out_share:g})")
    if config.near_duplicates == "auto" and config.near_threshold is None:
        notes.append("near-duplicates were not searched for: that needs datasketch (pip install 'eyas[data]')")
    if fitter is not None and fitter.end_mark is None:
        notes.append("the target's template puts no end token after answers: training won't teach where to stop")
    return notes
