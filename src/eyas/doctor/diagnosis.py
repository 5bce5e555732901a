"""A drafter at the doctor's: decoded, examined, decoded as repaired, and written so if that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.doctor.examine import Examination, examine
from eyas.doctor.reading import Reading
from eyas.doctor.repair import repaired, write
from eyas.doctor.search import Progress, boundaries
from eyas.doctor.transcript import Transcript, encode_prompts
from eyas.drafters.checkpoint import Checkpoint
from eyas.drafters.decoding import NetworkDrafter
from eyas.engine import Engine, Speculation
from eyas.errors import ExportError
from eyas.targets import Target
from eyas.targets.fingerprint import fingerprint
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams, Stats

_SAME = 0.02
"""By how much of itself the accept length of a repaired copy may differ: in half precision sums are taken in another
order where taps are."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and how the engine drafts with it."""

    examined: Examination
    as_is: Decoded
    best: Decoded
    """With the best reading; the same where that is how the files are read."""
    prompts: int
    length: int


class Doctor:
    """One drafter and one target; chains of `length` tokens, answers of up to `max_tokens`."""

    def __init__(self, checkpoint: Checkpoint, target: Target, tokenizer: Any, length: int, max_tokens: int) -> None:
        """Read the weights. Raises CheckpointError, DrafterMismatchError, RequestError."""
        self._file = Reading.of(checkpoint, target)
        self._provenance, self._doubts = checkpoint.provenance, checkpoint.report.doubts
        self._target, self._tokenizer = target, tokenizer
        self._length, self._max_tokens = length, max_tokens
        self._prompts = encode_prompts(tokenizer, target.max_length)

    def diagnose(self, progress: Progress = lambda *_: None) -> Diagnosis:
        """Decode, teacher-force, search, judge; decode again with another reading if one won."""
        reading = self._file.on(self._target)
        progress("decoding", 0, None)
        as_is = best = self._decode(reading)
        progress("the target's states", 0, None)
        wanted = boundaries(reading, self._target)
        transcript = Transcript.of(self._target, self._prompts, as_is.answers, wanted)
        examined = examine(reading, self._target, transcript, self._length, self._other_target(), progress)
        if examined.verdict == "misread":
            progress("decoding as repaired", 0, None)
            best = self._decode(examined.found.reading)
        return Diagnosis(examined, as_is, best, len(self._prompts), self._length)

    def fix(self, diagnosis: Diagnosis, place: Path) -> bool:
        """Write a corrected copy into the new folder `place`, unless none would help: nothing is wrong, or all is.

        Where the files leave a reading open the copy settles it. Raises ExportError where no file can say what the
        weights were trained for, UsageError.
        """
        verdict = diagnosis.examined.verdict
        if verdict != "misread" and not (verdict == "sound" and self._doubts):
            return False

        def check(copy: Reading) -> None:
            found, wanted = self._decode(copy.on(self._target)).stats, diagnosis.best.stats
            if abs(found.accept_length - wanted.accept_length) > _SAME * wanted.accept_length:
                raise ExportError(
                    f"the corrected copy drafts {found.accept_length:.2f} tokens a pass instead of "
                    f"{wanted.accept_length:.2f}: nothing was written; this is a bug in eyas"
                )

        changes = [each.trial.change for each in diagnosis.examined.found.adopted]
        write(repaired(self._file, changes), self._provenance, place, self._target, check)
        return True

    def _decode(self, reading: Reading) -> Decoded:
        return decode(reading, self._target, self._tokenizer, self._prompts, self._length, self._max_tokens)

    def _other_target(self) -> str:
        """The fingerprint it was trained for, where that isn't this target's."""
        recorded = self._provenance.get("target_fingerprint")
        return recorded if isinstance(recorded, str) and recorded != fingerprint(self._target.model) else ""


# A reading at work: the engine's own rounds over the doctor's prompts. Answers are the target's, whoever drafts.


@dataclass(frozen=True)
class Decoded:
    """Greedy answers with chains."""

    stats: Stats
    answers: list[list[int]]


def decode(
    reading: Reading, target: Target, tokenizer: Any, prompts: Sequence[tuple[int, ...]], length: int, max_tokens: int
) -> Decoded:
    """Answer all prompts together, chains of `length` tokens."""
    drafter = NetworkDrafter(reading.network(target), reading.taps)
    engine = Engine(target, tokenizer, Speculation(drafter, parse_tree(f"chain:{length}")), batch_size=len(prompts))
    params = SamplingParams(max_tokens=max_tokens)
    stats, answers = Stats(), []
    for completion in engine.generate([Request(prompt, params) for prompt in prompts]):
        stats.merge(completion.stats)
        answers.append(list(completion.token_ids))
    target.resize(0)  # what follows needs the memory
    return Decoded(stats, answers)
