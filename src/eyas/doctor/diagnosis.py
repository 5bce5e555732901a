"""Diagnoses a drafter: decodes with it, searches for the best reading, decodes again, judges, reports, and may repair.

The verdict comes from teacher forcing and the weights. An untrained drafter, or one trained for another target, can't
use the target's states: it drafts equally well with the states of other positions, or it is right less often than if it
always guessed the most common token. Both are measured with the best reading. Whether such a drafter was trained at all
can be seen in its matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eyas.doctor.measure import (
    MIN_GAIN_FROM_TAPS,
    Change,
    Gain,
    Measurement,
    Reading,
    Transcript,
    comparable_length,
    encode_prompts,
    gain,
    measure,
)
from eyas.doctor.search import Adopted, Progress, ReadingSearch, SearchResult, TriedChange, needed_boundaries
from eyas.drafters.block.network import BlockConfig
from eyas.drafters.checkpoint import Checkpoint, open_checkpoint, save_network
from eyas.drafters.config import FusedTapsConfig
from eyas.drafters.formats.tensor_names import SHAREABLE
from eyas.drafters.loading import drafter_of
from eyas.engine import Engine, Speculation
from eyas.errors import ExportError
from eyas.files import refuse_used, writing_folder
from eyas.targets import Target
from eyas.targets.fingerprint import fingerprint
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams, Stats

Verdict = Literal["sound", "misread", "random", "mismatched"]
"""Nothing is wrong; another reading is better; the weights are untrained; they were trained for another target."""
RANDOM_UNEVENNESS = 1.4
"""The highest unevenness of matrices that may be random."""


@dataclass(frozen=True)
class Examination:
    """The verdict on a drafter, with the measurements it is based on."""

    verdict: Verdict
    found: SearchResult
    from_taps: Gain
    """The gain from each position's own states over those of other positions, with the best reading."""
    other_states: Measurement
    """The best reading with the states of other positions."""
    chance: float
    """The share of the most common token among answer tokens."""
    unevenness: float
    """The unevenness of the most uneven matrix; see the function `unevenness`."""
    understands: bool
    """Whether the target's states help it, and it drafts better than chance."""
    other_target: str
    """The recorded fingerprint of its target; empty if it is this target's, or not recorded."""

    @property
    def faults(self) -> bool:
        """Whether anything is wrong with the drafter."""
        return self.verdict != "sound"


def examine(
    reading: Reading,
    target: Target,
    transcript: Transcript,
    length: int,
    other_target: str = "",
    progress: Progress = lambda *_: None,
) -> Examination:
    """Search for the best reading and judge it; the tensors of `reading` are on the target's device."""
    found = ReadingSearch(target, transcript, length, progress).run(reading)
    other_states = measure(found.reading, transcript.with_other_states(), target, length)
    from_taps = gain(found.measured, other_states)
    chance = transcript.most_common_share
    uneven = unevenness(found.reading)
    understands = from_taps.convincing(1, MIN_GAIN_FROM_TAPS) and found.measured.accepted[0] > chance
    verdict = judge(understands, uneven, bool(other_target), bool(found.adopted))
    return Examination(verdict, found, from_taps, other_states, chance, uneven, understands, other_target)


def judge(understands: bool, uneven: float, other_target: bool, adopted: bool) -> Verdict:
    """The verdict on a drafter.

    `understands`: whether the target's states help it; `uneven`: the unevenness of its matrices; `other_target`:
    whether its provenance names another target; `adopted`: whether another reading won.
    """
    if not understands:
        return "random" if uneven <= RANDOM_UNEVENNESS else "mismatched"
    if other_target:
        return "mismatched"
    return "misread" if adopted else "sound"


def unevenness(reading: Reading) -> float:
    """How much the norms of rows or columns vary in the most uneven matrix of the drafter's layers.

    The rows of a random matrix have nearly equal norms: with n columns and fourth moment k (3 for normal, 1.8 for
    uniform entries) the standard deviation of their norms is sqrt((k - 1) / (4 n)) of the mean; the same holds for
    columns. Training makes some rows and columns matter more than others. In units of 1 / sqrt(2 n) the deviation is 1
    for normal entries, 0.6 for uniform ones and 0 for orthogonal rows; in trained drafters it is above 2 in rows or
    columns of nearly every matrix. Embedding and head are left out, because they are often copies of the target's.
    """
    return max(
        (
            max(_spread(weight, 1), _spread(weight, 0))
            for name, weight in reading.tensors.items()
            if weight.ndim == 2 and name not in SHAREABLE
        ),
        default=0.0,
    )


def _spread(weight: Tensor, dim: int) -> float:
    """The standard deviation of the norms along `dim`, in units of its value for independent normal entries."""
    lengths = weight.float().norm(dim=dim)
    return float(lengths.std() / lengths.mean().clamp(min=1e-12)) * sqrt(2 * weight.shape[dim])


def apply_changes(reading: Reading, changes: Sequence[Change]) -> Reading:
    """The reading with all changes and ascending taps. Raises ExportError if no file can express a change."""
    for change in changes:
        if not change.written:
            raise ExportError(f"{change.aspect}: {change.name}: files of {reading.kind.name} drafters can't express it")
        reading = change.apply(reading)
    return _rising(reading)


def write_repaired(
    reading: Reading, provenance: Mapping[str, Any], path: Path, target: Target, check: Callable[[Reading], None]
) -> None:
    """Write the drafter into the new folder `path`, read it back, and call `check` with the result.

    If `check` raises, nothing is left behind. Raises UsageError if `path` exists and isn't empty.
    """
    refuse_used(path)
    config = reading.config
    if not reading.kind.fixed_taps:
        config = config.model_copy(update={"taps": reading.taps})
    network = reading.kind.blank(config).fill(reading.tensors)
    with writing_folder(path) as folder:
        save_network(network, folder, provenance or None)
        check(Reading.of(open_checkpoint(folder, layers=target.num_layers), target))


def _rising(reading: Reading) -> Reading:
    """The same network with ascending taps, as all engines collect them; `fc` and norms are reordered to match."""
    order = sorted(range(len(reading.taps)), key=lambda i: reading.taps[i])
    if order == list(range(len(order))) or not isinstance(reading.config, FusedTapsConfig | BlockConfig):
        return reading
    size = reading.config.target_hidden_size
    changed: dict[str, Tensor | None] = {}
    for name, dim in (("fc.weight", 1), ("input_norm.weight", 0)):
        if name in reading.tensors:
            blocks = torch.split(reading.tensors[name], size, dim)
            changed[name] = torch.cat([blocks[i] for i in order], dim)
    norms = {f"fc_norm.{to}.weight": f"fc_norm.{i}.weight" for to, i in enumerate(order)}
    changed |= {to: reading.tensors[name] for to, name in norms.items() if name in reading.tensors}
    return replace(reading.changed(tensors=changed), taps=tuple(reading.taps[i] for i in order))


_SAME = 0.02
"""Tolerated relative difference in the accept length of a repaired copy: reordered taps change the order of summation,
and so the rounding in half precision."""


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
        """Read the weights. Chains have `length` tokens, or fewer if it guesses fewer; answers have up to `max_tokens`.

        Raises CheckpointError, DrafterMismatchError, or RequestError if no prompt fits the target's context.
        """
        self._file = Reading.of(checkpoint, target)
        self._provenance = checkpoint.provenance
        self._doubts = checkpoint.report.doubts
        self._target = target
        self._tokenizer = tokenizer
        self._length = comparable_length(self._file.config, length)
        self._max_tokens = max_tokens
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

        A sound drafter is copied only if its files can be read in two ways; the copy can't. Raises ExportError if no
        file can express what the weights were trained for, and UsageError if the folder isn't free.
        """
        verdict = diagnosis.examined.verdict
        if verdict != "misread" and not (verdict == "sound" and self._doubts):
            return False

        def check(copy: Reading) -> None:
            found = self._decode(copy.on(self._target)).stats
            wanted = diagnosis.best.stats
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
    stats = Stats()
    answers = []
    for completion in engine.generate([Request(prompt, params, chat=True) for prompt in prompts]):
        stats.merge(completion.stats)
        answers.append(list(completion.token_ids))
    return DecodedAnswers(stats, answers)


def report(diagnosis: Diagnosis, doubts: Sequence[str] = ()) -> dict[str, Any]:
    """The report as a JSON object; `doubts` are the loader's messages about files that can be read in two ways."""
    examined = diagnosis.examined
    found = examined.found
    return {
        "verdict": examined.verdict,
        "says": verdict_line(diagnosis),
        "findings": [_finding(each) for each in findings(diagnosis)],
        "as_is": {"teacher_forced": _figures(found.as_is), "decoded": _decoded(diagnosis.as_is)},
        "best": {"teacher_forced": _figures(found.measured), "decoded": _decoded(diagnosis.best)},
        "without_the_targets_states": _figures(examined.other_states),
        "gain_from_the_targets_states": _gain(examined.from_taps.mean, examined.from_taps.error, examined.from_taps.z),
        "chance": round(examined.chance, 4),
        "unevenness_of_matrices": round(examined.unevenness, 2),
        "readings": [_trial(trial) for trial in found.tried],
        "doubts": list(doubts),
        "prompts": diagnosis.prompts,
        "answer_tokens": len(found.as_is.overlap),
        "chain": diagnosis.length,
    }


def findings(diagnosis: Diagnosis) -> tuple[Adopted, ...]:
    """The changes that repair a misread drafter; empty for other verdicts."""
    return diagnosis.examined.found.adopted if diagnosis.examined.verdict == "misread" else ()


def verdict_line(diagnosis: Diagnosis) -> str:
    """The verdict in one or two sentences."""
    examined = diagnosis.examined
    length = diagnosis.best.stats.accept_length
    if examined.verdict == "sound":
        best = "no other reading suits the weights better"
        return f"SOUND: {best}; {length:.2f} tokens per target pass, with chains of {diagnosis.length}"
    if examined.verdict == "misread":
        count = len(examined.found.adopted)
        was = diagnosis.as_is.stats.accept_length
        return (
            f"MISREAD: {count} {'aspect differs' if count == 1 else 'aspects differ'} from what the weights were "
            f"trained for; {was:.2f} tokens per target pass as the files are read, {length:.2f} when corrected"
        )
    if examined.verdict == "random":
        return (
            "RANDOM WEIGHTS: the target's states don't help it under any reading, and its matrices look random: it was "
            "never trained, or the trained weights were not in the model that was saved"
        )
    if examined.understands:
        return (
            f"MISMATCHED: its provenance names other target weights (fingerprint {examined.other_target}); yet this "
            f"target's states help it, {length:.2f} tokens per target pass: this target may be related to its own, "
            "or the same model in another precision"
        )
    return (
        "MISMATCHED: its matrices were trained, but this target's states don't help it under any reading: it was "
        "trained for another target, or damaged since"
    )


def _finding(adopted: Adopted) -> dict[str, Any]:
    change = adopted.trial.change
    return {
        "aspect": change.aspect,
        "trained_for": change.name,
        "repair": change.repair,
        "in_files": change.written,
        **_trial_gain(adopted.trial),
        "accept_length": round(adopted.measured.accept_length, 3),
    }


def _trial(trial: TriedChange) -> dict[str, Any]:
    return {
        "aspect": trial.change.aspect,
        "reading": trial.change.name,
        "accepted_by_position": [round(rate, 4) for rate in trial.accepted],
        **_trial_gain(trial),
        "wins": trial.wins,
    }


def _trial_gain(trial: TriedChange) -> dict[str, Any]:
    return _gain(trial.gain.mean, trial.gain.error, trial.gain.z)


def _gain(mean: float, error: float, z: float) -> dict[str, Any]:
    return {"gain": round(mean, 5), "error": round(error, 5), "z": round(z, 2)}


def _figures(measured: Measurement) -> dict[str, Any]:
    return {
        "accepted_by_position": [round(rate, 4) for rate in measured.accepted],
        "accept_length": round(measured.accept_length, 3),
        "overlap": round(float(measured.overlap.mean()), 4),
    }


def _decoded(decoded: DecodedAnswers) -> dict[str, Any]:
    return {
        "accepted_by_position": [round(rate, 4) for rate in decoded.stats.accepted_by_position],
        "accept_length": round(decoded.stats.accept_length, 3),
    }
