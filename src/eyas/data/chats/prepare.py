"""Makes a chat folder from sources: check, deduplicate, blend, render for the target, split, report.

There are two passes. The first reads every source once, drops bad rows and exact duplicates, and writes the other chats
to a spool file; memory keeps only each chat's offset and rank. The second draws chats in blend order, drops
near-duplicates of chats drawn before, tokenizes, and writes the splits. Both hold one chat in memory at a time. The
folder appears under its name when it is complete.

Sources are blended in fixed proportions, chat by chat. The same seed draws the same chats, whatever the order of the
rows.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TypeVar

import eyas
from eyas.data.chats.config import PrepareConfig, settings_of
from eyas.data.chats.duplicates import Duplicates, Evaluations, NearDuplicates, question_key
from eyas.data.chats.folder import (
    DEFINITIONS,
    REPORT,
    SPLITS,
    SourceTally,
    SplitTally,
    read_report,
    split_file,
    write_report,
)
from eyas.data.chats.sources import chats_of_source, files_of
from eyas.data.tokens.tokenize import ChatTokenizer
from eyas.errors import DataError, RowError, UsageError
from eyas.files import writing_folder
from eyas.hub import find_files
from eyas.text.chats import Chat, before_first_question, chat_line, greets, held_out

EMPTY_ANSWER = "empty answer"
EMPTY_QUESTION = "empty question"
NO_QUESTION = "no question"
UNANSWERED = "the last turn is not the assistant's"
TOO_LONG = "too long"
FEW_TOKENS = "too few answer tokens"
FOREIGN = "tokens of another target"

Progress = Callable[[str, int, int | None], None]
"""Called with the stage's name, the number of rows or chats done, and their total (None if unknown)."""
T = TypeVar("T")


class CandidateChats:
    """Spool offsets of one source's chats, iterated in the order in which the blend draws them; 16 bytes per chat."""

    def __init__(self) -> None:
        self._ranks = array("Q")
        self._offsets = array("Q")

    def add(self, order: int, offset: int) -> None:
        """Add a chat whose line begins at byte `offset`; the blend draws the lowest `order` first."""
        self._ranks.append(order)
        self._offsets.append(offset)

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[int]:
        for i in sorted(range(len(self._ranks)), key=self._ranks.__getitem__):
            yield self._offsets[i]


def gather(
    config: PrepareConfig,
    spool: IO[bytes],
    evaluations: Evaluations,
    tallies: Sequence[SourceTally],
    progress: Progress,
) -> list[CandidateChats]:
    """First pass: write every usable chat to the spool and return the candidates of each source."""
    duplicates = Duplicates()
    ids: set[str] = set()
    found = []
    for source, tally in zip(config.sources, tallies, strict=True):
        candidates = CandidateChats()
        for where, chat in chats_of_source(source):
            tally.rows += 1
            progress(f"rows of {source.name}", tally.rows, None)
            try:
                if isinstance(chat, RowError):
                    raise chat
                check_chat(chat, config.drop_unanswered)
                evaluations.check(chat)
                duplicates.check(chat)
            except RowError as error:
                tally.drop(where, error)
                continue
            line = chat_line(chat)
            if chat.id in ids:  # another row has this id and different content
                chat = chat.model_copy(update={"id": f"{chat.id}:{hashlib.sha256(line.encode()).hexdigest()[:8]}"})
                line = chat_line(chat)
            ids.add(chat.id)
            candidates.add(rank(config.seed, chat.id), spool.tell())
            spool.write(json.dumps(where).encode() + b"\t" + line.encode())
        tally.candidates = len(candidates)
        found.append(candidates)
    return found


def check_chat(chat: Chat, drop_unanswered: bool) -> None:
    """Raise RowError for a chat without a question, with an empty message, or, if dropped, without a final answer."""
    if not any(message.role == "user" for message in chat.messages):
        raise RowError(NO_QUESTION, "the chat has no user message")
    for number, message in enumerate(chat.messages, start=1):
        if (message.content or "").strip() or message.tool_calls:
            continue
        if message.role == "assistant":
            raise RowError(EMPTY_ANSWER, f"turn {number}")
        if message.role == "user":
            raise RowError(EMPTY_QUESTION, f"turn {number}")
    if drop_unanswered and chat.messages[-1].role != "assistant":
        raise RowError(UNANSWERED, f"the last message has the role {chat.messages[-1].role}")


def read_spooled(spool: IO[bytes], offset: int) -> tuple[str, Chat]:
    """Where the chat at byte `offset` of the spool came from (`file:line`), and the chat."""
    spool.seek(offset)
    where, line = spool.readline().split(b"\t", 1)
    return json.loads(where), Chat.model_validate_json(line)


def drawn(
    spool: IO[bytes],
    candidates: CandidateChats,
    fitter: ChatFitter | None,
    near_duplicates: NearDuplicates | None,
    tally: SourceTally,
) -> Iterator[Chat]:
    """Second pass over one source: its chats in blend order, rendered for the target if there is one."""
    for offset in candidates:
        tally.tried += 1
        where, chat = read_spooled(spool, offset)
        try:
            rendered, cut = (chat, False) if fitter is None else fitter.fit(chat)
            if near_duplicates is not None:
                near_duplicates.check(chat, offset)
        except RowError as error:
            tally.drop(where, error)
            continue
        tally.cut += cut
        tally.greetings += greets(chat.messages) and not greets(rendered.messages)
        yield rendered


def rank(seed: int, chat_id: str) -> int:
    """64-bit sort key of a chat in its source's shuffled order; independent of the order of the rows."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{chat_id}".encode()).digest()[:8], "big")


def interleave(
    sources: Sequence[Iterator[T]], weights: Sequence[float], total: int | None, strict: bool
) -> Iterator[tuple[int, T]]:
    """Interleave sources by weight and yield (source index, item); each source stays within one item of its share.

    Ends after `total` items, or when all sources are exhausted. If `strict`, an exhausted source's share is not given
    to the others: its turns are skipped, and without a `total` the blend ends there.
    """
    # turn k = 0, 1, ... of a source is due at (k + 1/2) / weight
    due = [(0.5 / weight, i, 0) for i, weight in enumerate(weights)]
    heapq.heapify(due)
    exhausted: set[int] = set()
    turns = 0
    while due and len(exhausted) < len(sources) and (total is None or turns < total):
        _, source, taken = heapq.heappop(due)
        item = None if source in exhausted else next(sources[source], None)
        if item is None:
            exhausted.add(source)
            if strict and total is None:
                return
        else:
            yield source, item
        if item is not None or strict:
            turns += 1
            heapq.heappush(due, ((taken + 1.5) / weights[source], source, taken + 1))


class ChatFitter:
    """Renders chats with the target's template, marks their answers and enforces a maximum length."""

    def __init__(self, model: str, max_length: int | None, cut: bool, min_answer_tokens: int) -> None:
        """Load the tokenizer of `model`. `cut`: shorten chats beyond `max_length` tokens instead of dropping them."""
        from eyas.targets import load_tokenizer

        self._tokenizer = tokenizer = load_tokenizer(model)
        stops = _generation_stops(model)
        self._chats = ChatTokenizer(tokenizer, stops)
        self._max_length = max_length
        self._cut = cut
        self._min_answer_tokens = min_answer_tokens
        decisive = (tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template), str(stops))
        self.identity = hashlib.sha256("\0".join(decisive).encode()).hexdigest()[:16]
        """Hash of the tokenizer, the chat template and the end tokens: all that decides how chats are rendered."""
        self.end_mark = self._chats.end_mark

    def fit(self, chat: Chat) -> tuple[Chat, bool]:
        """Return the chat with its tokens and answer spans, and whether turns were cut.

        A chat without answers is returned unchanged. Raises RowError if the chat is too long, has too few answer
        tokens, or carries tokens of another target.
        """
        first = before_first_question(chat.messages)
        if not any(message.role == "assistant" for message in chat.messages[first:]):
            return chat, False
        if chat.tokens is not None:
            self._check_own(chat)
        exact = self._chats.exact(chat)
        fitted = exact if self._fits(exact) else self._shortened(exact)
        count = sum(stop - start for start, stop in fitted.answers or ())
        if count < self._min_answer_tokens:
            raise RowError(FEW_TOKENS, f"{count} answer tokens, fewer than {self._min_answer_tokens}")
        return fitted, fitted is not exact

    def _check_own(self, chat: Chat) -> None:
        """Raise RowError if the tokens that a chat carries don't decode to a text that contains its last answer."""
        said = next(message.content or "" for message in reversed(chat.messages) if message.role == "assistant")
        known = max(chat.tokens or (0,)) < len(self._tokenizer)
        if not known or said.strip() not in self._tokenizer.decode(chat.tokens):
            raise RowError(FOREIGN, "its tokens don't decode to its last answer: remove `tokens` and `answers` from it")

    def _fits(self, chat: Chat) -> bool:
        return self._max_length is None or len(chat.tokens or ()) <= self._max_length

    def _shortened(self, chat: Chat) -> Chat:
        """The longest prefix of the chat that fits and ends with an answer; RowError if there is none.

        Every prefix is rendered again, because a template may treat the last turn of a chat differently.
        """
        if self._cut:
            bare = chat.model_copy(update={"tokens": None, "answers": None})
            first = before_first_question(chat.messages)
            roles = [message.role for message in chat.messages]
            lengths = [i + 1 for i in range(first, len(roles)) if roles[i] == "assistant"]
            for length in reversed(lengths):
                shorter = self._chats.exact(bare.model_copy(update={"messages": chat.messages[:length]}))
                if self._fits(shorter):
                    return shorter
        raise RowError(TOO_LONG, f"{len(chat.tokens or ())} tokens, more than {self._max_length}")


def _generation_stops(model: str) -> list[int]:
    """The end token ids in the target's generation config; empty if it has none."""
    from transformers import GenerationConfig

    try:
        stops: Any = GenerationConfig.from_pretrained(find_files(model).base.source).eos_token_id
    except OSError:
        return []
    return [stops] if isinstance(stops, int) else list(stops or ())


def prepare(config: PrepareConfig, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Make the chat folder and return its report; a folder already made with the same settings is left as it is.

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
    evaluations = Evaluations(config.exclude)
    threshold = config.near_threshold
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
        share = config.held_out_share_of(most)
        out = {name: files.enter_context(split_file(folder, name).open("w", encoding="utf-8")) for name in SPLITS}
        chats = [drawn(spool, of_source, fitter, near, tally) for of_source, tally in zip(found, tallies, strict=True)]
        for done, (source, chat) in enumerate(interleave(chats, weights, config.samples, strict=weighted), start=1):
            side = SPLITS[held_out(question_key(chat), share)]
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
    """Warnings for the report, most serious first: fewer chats than requested, odd chats, skipped checks."""
    notes = []
    total = sum(tally.chats for tally in tallies)
    if config.samples is not None and total < config.samples:
        notes.append(f"only {total} of the {config.samples} requested chats could be drawn")
    for tally, share in zip(tallies, shares or (), strict=False):
        wanted = round((config.samples or 0) * share)
        if tally.chats < wanted - 1:
            notes.append(f"{tally.name} gave {tally.chats} chats; its share of {config.samples} is {wanted}")
    for source in config.sources:
        for split, files in files_of(source).left_out.items() if source.path is not None else ():
            what = f"of the split {split}" if split else "outside of any split"
            notes.append(
                f"{source.name}: only the split {source.split} was read; left out: {len(files)} files {what}, such as "
                f"{files[0]}"
            )
    capped = [tally for tally in tallies if tally.not_needed] if shares is not None and config.samples is None else []
    if capped:
        short = next((tally.name for tally in tallies if not tally.not_needed), tallies[0].name)
        left = ", ".join(f"{tally.not_needed} of {tally.candidates} of {tally.name}" for tally in capped)
        notes.append(
            f"the weights end the blend where {short} runs out, which leaves out chats ({left}): to use all of them, "
            "remove weight=, or set the number of chats with `samples=`"
        )
    greeting = sum(side.greetings for side in sides.values())
    if greeting:
        notes.append(
            f"{greeting} of {total} chats begin with the assistant: because nothing was asked before, that first "
            "answer is context and isn't trained on"
        )
    left_out = sum(tally.greetings for tally in tallies)
    if left_out:
        notes.append(
            f"{left_out} of {total} chats began with the assistant, which the target's chat template refuses: that "
            "first answer was left out"
        )
    for name, side in sides.items():
        if not side.chats:
            notes.append(f"{name} is empty: add chats or change the held-out share (`held_out_share=`)")
    if config.near_duplicates == "auto" and config.near_threshold is None:
        notes.append("near-duplicates were not searched for: that needs datasketch (pip install 'eyas[data]')")
    if fitter is not None and fitter.end_mark is None:
        notes.append("the target's template puts no end token after answers: training won't teach where to stop")
    return notes
