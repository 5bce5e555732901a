"""Predicted answers: copied where they come true, counted, and without influence on any token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.drafters.base import Drafter
from eyas.drafters.hybrid import HybridDrafter
from eyas.drafters.options import DrafterOptions
from eyas.drafters.prediction import PredictionDrafter
from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.engine import Engine, Speculation
from eyas.options import EngineOptions
from eyas.session import Session
from eyas.tree import parse_tree
from eyas.types import NO_OWNER, Request, SamplingParams

from .. import tiny

CPU = torch.device("cpu")


def drafter(name: str) -> Drafter:
    if "+" in name:
        lookup = PredictionDrafter(CPU) if name.endswith("prediction") else SuffixDrafter(CPU)
        return HybridDrafter(tiny.drafter("eagle3"), lookup, CPU)
    return PredictionDrafter(CPU) if name == "prediction" else SuffixDrafter(CPU)


@pytest.mark.every(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["suffix", "eagle3+suffix", "prediction", "eagle3+prediction"])
def test_a_true_prediction_is_accepted_and_any_other_changes_nothing(name: str, temperature: float) -> None:
    target = tiny.quick_target()
    asked = Request((5, 6, 7, 8), SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True))
    (plain,) = Engine(target, None).generate([asked])
    answer = tuple(plain.token_ids)
    changed = (*answer[:15], 3, *answer[16:])
    noise = tuple((7 * at + 3) % 50 for at in range(40))
    engine = Engine(target, None, Speculation(drafter(name), parse_tree("dynamic:16,4,16")), batch_size=4)
    done = engine.generate([replace(asked, prediction=tokens) for tokens in ((), answer, changed, noise)])
    assert [one.token_ids for one in done] == [plain.token_ids] * 4
    none, true, edited, wrong = (one.stats for one in done)
    assert (none.predicted_accepted, none.predicted_rejected) == (0, 0)
    assert true.predicted_accepted > 30
    assert edited.predicted_accepted > 20
    assert edited.predicted_rejected > 0
    assert wrong.predicted_accepted < 10
    assert true.target_passes < none.target_passes


def test_a_server_without_a_drafter_copies_predictions_and_decodes_the_rest_plainly() -> None:
    target = tiny.quick_target()
    asked = Request((5, 6, 7, 8), SamplingParams(max_tokens=40, ignore_eos=True))
    (plain,) = Engine(target, None).generate([asked])
    session = Session(target)
    tree = EngineOptions("chain:8", batch_size=2)
    engine = session.engine(session.drafter(DrafterOptions(None, "prediction")), tree)
    predicted = replace(asked, prediction=tuple(plain.token_ids))
    assert [engine._core.runner.observes(one, 1) for one in (asked, predicted)] == [False, True]
    none, true = engine.generate([asked, predicted])
    assert none.token_ids == true.token_ids == plain.token_ids
    assert none.stats.target_passes == plain.stats.target_passes
    assert none.stats.walked == 0
    assert true.stats.target_passes < 8


def test_what_recurs_in_a_request_is_copied_too() -> None:
    made = PredictionDrafter(CPU)
    made.pairs.resize(1)
    made.pairs.begin(0, [4, 5, 6, 7, 4, 5], NO_OWNER)
    made.observe(range(1), torch.tensor([[5, 6, 7, 4, 5]]), torch.zeros(1, 5, 0, 1), [5])
    found = made.propose(0, 2, 1)
    assert (found.tokens, found.predicted) == ([6, 7], False)
