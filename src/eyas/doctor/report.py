"""The report on a diagnosis: a JSON object with figures, and a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.doctor.diagnosis import DecodedAnswers, Diagnosis
from eyas.doctor.measure import Measurement
from eyas.doctor.search import Adopted, TriedChange


def report(diagnosis: Diagnosis, doubts: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON object; `doubts` are the loader's messages about files that can be read in two ways."""
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
            f"target's states help it, {length:.2f} tokens per target pass: the target may be a relative of its own, "
            "or the same one in another precision"
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
