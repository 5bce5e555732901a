"""Diagnoses a drafter: decodes with it, searches for the best reading, decodes again with that, and may repair it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.doctor.examine import Examination, examine
from eyas.doctor.measure import comparable_length
from eyas.doctor.reading import Reading
from eyas.doctor.repair import apply_changes, write_repaired
from eyas.doctor.search import Progress, needed_boundaries
from eyas.doctor.transcript import Transcript, encode_prompts
from eyas.drafters.checkpoint import Checkpoint
from eyas.drafters.loading import drafter_of
from eyas.engine import Engine, Speculation
from eyas.errors import ExportError
from eyas.targets import Target
from eyas.targets.fingerprint import fingerprint
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams, Stats

_SAME = 0.02
"""The relative difference that the accept length of a repaired copy may have: reordered taps change the order of
summation, and so the rounding in half precision."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of examining a drafter and of decoding with it."""

    examined: Examination
    as_is: DecodedAnswers
    """Answers decoded with the files as eyas reads them."""
    best: DecodedAnswers
    """Answers decoded with the best reading; the same as `as_is` unless the drafter is misread."""
    prompts: int
    """The number of prompts that were answered."""
    length: int
    """The number of draft tokens in a chain."""


class Doctor:
    """Diagnoses one drafter with one target, and repairs it."""

    def __init__(self, checkpoint: Checkpoint, target: Target, tokenizer: Any, length: int, max_tokens: int) -> None:
        """Read the weights. Chains have `length` tokens, or as few as the drafter guesses; answers up to `max_tokens`.

        Raises CheckpointError, DrafterMismatchError, or RequestError if no prompt fits the target's context.
        """
        self._file = Reading.of(checkpoint, target)
        self._provenance, self._doubts = checkpoint.provenance, checkpoint.report.doubts
        self._target, self._tokenizer = target, tokenizer
        self._length, self._max_tokens = comparable_length(self._file.config, length), max_tokens
        self._prompts = encode_prompts(tokenizer, target.max_length)

    def diagnose(self, progress: Progress = lambda *_: None) -> Diagnosis:
        """Decode, search for the best reading with teacher forcing, judge, and decode again if another reading won."""
        reading = self._file.on(self._target)
        progress("decoding", 0, None)
        as_is = best = self._decode(reading)
        progress("the target's states", 0, None)
        wanted = needed_boundaries(reading, self._target)
        transcript = Transcript.of(self._target, self._prompts, as_is.answers, wanted)
        examined = examine(reading, self._target, transcript, self._length, self._other_target(), progress)
        if examined.verdict == "misread":
            progress("decoding as repaired", 0, None)
            best = self._decode(examined.found.reading)
        return Diagnosis(examined, as_is, best, len(self._prompts), self._length)

    def fix(self, diagnosis: Diagnosis, path: Path) -> bool:
        """Write a corrected copy into the new folder `path`; return False, writing nothing, if a copy wouldn't help.

        A sound drafter is copied only if its files can be read in two ways, which the copy can't. Raises ExportError if
        no file can express what the weights were trained for, and UsageError if the folder isn't free.
        """
        verdict = diagnosis.examined.verdict
        if verdict != "misread" and not (verdict == "sound" and self._doubts):
            return False

        def check(copy: Reading) -> None:
            found, wanted = self._decode(copy.on(self._target)).stats, diagnosis.best.stats
            if abs(found.accept_length - wanted.accept_length) > _SAME * wanted.accept_length:
                raise ExportError(
                    f"the corrected copy drafts {found.accept_length:.2f} tokens per pass instead of "
                    f"{wanted.accept_length:.2f}: nothing was written; this is a bug in eyas"
                )

        changes = [each.trial.change for each in diagnosis.examined.found.adopted]
        write_repaired(apply_changes(self._file, changes), self._provenance, path, self._target, check)
        return True

    def _decode(self, reading: Reading) -> DecodedAnswers:
        return decode(reading, self._target, self._tokenizer, self._prompts, self._length, self._max_tokens)

    def _other_target(self) -> str:
        """The recorded fingerprint of the drafter's target; empty if it is this target's, or not recorded."""
        recorded = self._provenance.get("target_fingerprint")
        return recorded if isinstance(recorded, str) and recorded != fingerprint(self._target.model) else ""


@dataclass(frozen=True)
class DecodedAnswers:
    """Greedy answers of the target, and the statistics of decoding them with chains."""

    stats: Stats
    answers: list[list[int]]


def decode(
    reading: Reading, target: Target, tokenizer: Any, prompts: Sequence[tuple[int, ...]], length: int, max_tokens: int
) -> DecodedAnswers:
    """Answer all prompts in one batch with chains of `length` tokens; the reading doesn't affect the answers."""
    drafter = drafter_of(reading.network(target), reading.taps)
    engine = Engine(target, tokenizer, Speculation(drafter, parse_tree(f"chain:{length}")), batch_size=len(prompts))
    params = SamplingParams(max_tokens=max_tokens)
    stats, answers = Stats(), []
    for completion in engine.generate([Request(prompt, params, chat=True) for prompt in prompts]):
        stats.merge(completion.stats)
        answers.append(list(completion.token_ids))
    return DecodedAnswers(stats, answers)
