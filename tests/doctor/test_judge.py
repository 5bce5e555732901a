"""The rule by which one reading beats another, on numbers worked out by hand."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from eyas.doctor.diagnosis import judge
from eyas.doctor.measure import MIN_GAIN, Gain, Measurement, gain, needed_z


def measured(overlap: list[float], right: list[float], blocks: list[int]) -> Measurement:
    return Measurement((0.5,), torch.tensor(right), torch.tensor(overlap), torch.tensor(blocks))


def test_gain_and_its_error_come_from_blocks() -> None:
    blocks = [0, 0, 1, 3]  # no answer filled block 2
    base = measured([0.0] * 4, [0.0] * 4, blocks)
    other = measured([0.4, 0.2, 0.1, 0.5], [1.0, 0.0, 0.0, 0.0], blocks)
    found = gain(other, base)
    # sums 0.6, 0.1, 0.5 of 2, 1, 1 tokens; gain 0.3; residuals 0, -0.2, 0.2
    assert found.mean == pytest.approx(0.3)
    assert found.error == pytest.approx(sqrt(3 / 2 * 0.08) / 4)
    assert found.z == pytest.approx(found.mean / found.error)
    assert found.greedy == pytest.approx(0.25)


def test_the_same_reading_gains_nothing() -> None:
    base = measured([0.3, 0.4], [1.0, 0.0], [0, 1])
    assert gain(base, base).z == 0
    assert not gain(base, base).convincing(1)


def test_more_readings_need_more_evidence() -> None:
    assert needed_z(1) == pytest.approx(3.09, abs=0.01)
    assert needed_z(18) == pytest.approx(3.87, abs=0.01)


@pytest.mark.parametrize(
    ("mean", "error", "greedy", "wins"),
    [
        (0.1, 0.01, 0.05, True),
        (0.1, 0.01, 0.0, True),
        (0.1, 0.01, -0.001, False),  # flatter, not better
        (0.1, 0.03, 0.05, False),  # 3.3 errors, 3.9 are needed
        (MIN_GAIN / 2, 1e-6, 0.05, False),  # certain, and of no use
        (-0.1, 0.01, 0.05, False),
    ],
)
def test_what_wins(mean: float, error: float, greedy: float, wins: bool) -> None:
    assert Gain(mean, error, greedy).convincing(18) is wins


@pytest.mark.parametrize(
    ("understands", "uneven", "other_target", "adopted", "verdict"),
    [
        (True, 5.0, False, False, "sound"),
        (True, 5.0, False, True, "misread"),
        (True, 1.0, False, False, "sound"),  # hardly trained, but for this target
        (True, 5.0, True, False, "mismatched"),
        (False, 5.0, False, True, "mismatched"),  # what wins among readings of nothing is no repair
        (False, 0.7, False, True, "random"),
    ],
)
def test_verdicts(understands: bool, uneven: float, other_target: bool, adopted: bool, verdict: str) -> None:
    assert judge(understands, uneven, other_target, adopted) == verdict
