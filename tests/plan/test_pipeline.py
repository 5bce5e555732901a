"""The estimate of a pipeline's steps, and how a budget sizes them."""

from __future__ import annotations

import pytest

from eyas.plan.costs import ModelSize, Workload
from eyas.plan.devices import Machine
from eyas.plan.pipeline import (
    LOADING_SECONDS,
    MEASURED,
    MEASURED_SHARE,
    MIN_CHATS,
    Measuring,
    Outlook,
    Validating,
    chats_within,
    distinct_tokens,
    seconds_of_steps,
)

SIZE = ModelSize(30, 576, 49152, 576, 192, 1536, 106_000_000, 134_000_000, 30, 0)
MACHINE = Machine("a laptop", 0.1, 20.0)


def seconds(chats: int, repeats: int = 3) -> dict[str, float]:
    work = Workload(chats, 400, epochs=5)
    return seconds_of_steps(SIZE, work, 3, MACHINE, Measuring(12, 128, repeats), Validating(16, 128))


def test_data_decides_the_long_steps_and_repeats_the_measured_ones() -> None:
    few = seconds(100)
    many = seconds(1000)
    for name in ("data regenerate", "data capture"):
        assert many[name] - LOADING_SECONDS == pytest.approx(10 * (few[name] - LOADING_SECONDS))
    assert few["bench methods"] == many["bench methods"]
    assert seconds(100, 6)["bench methods"] - LOADING_SECONDS == pytest.approx(
        2 * (few["bench methods"] - LOADING_SECONDS)
    )


def test_a_budget_gets_as_many_chats_as_fit() -> None:
    chats = chats_within(600, seconds)
    assert chats > MIN_CHATS
    found = seconds(chats)
    spent = sum(found[name] for name in ("data prepare", "data regenerate", "data capture", "train", "bench report"))
    assert spent == pytest.approx(600 * 60 * (1 - MEASURED_SHARE), rel=0.1)
    assert chats_within(1, seconds) == MIN_CHATS


def test_training_of_a_fixed_number_of_steps_takes_no_chats_from_the_budget() -> None:
    def fixed(chats: int) -> dict[str, float]:
        return seconds(chats) | {"train": 3600.0}

    chats = chats_within(600, fixed)
    assert sum(took for name, took in fixed(chats).items() if name not in MEASURED) == pytest.approx(
        600 * 60 * (1 - MEASURED_SHARE), rel=0.01
    )


def test_what_steps_took_corrects_what_is_left() -> None:
    outlook = Outlook({"data regenerate": 600.0, "data capture": 100.0, "bench methods": 900.0})
    assert outlook.left(["data capture", "bench methods"]) == 1000.0
    outlook.took["data regenerate"] = 1200.0
    assert outlook.left(["data capture", "bench methods"]) == 2000.0
    budget = Outlook(outlook.seconds, 10.0, outlook.took)
    assert budget.left(["bench methods"]) == pytest.approx(600 * MEASURED_SHARE / 2)
    assert Outlook(outlook.seconds, 1.0, outlook.took).left(["bench methods"]) == 60  # what the step is given


def test_a_draft_vocabulary_holds_what_occurs() -> None:
    assert distinct_tokens(2500, 49152) == 750  # a run of 2,479 answer tokens had 634
    assert distinct_tokens(10**9, 49152) == 32_000
    assert distinct_tokens(10**9, 400) == 400
