"""Faults of a block drafter that cost acceptance without an error, planted in one that was trained a little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from eyas.data.features import FeatureBatch
from eyas.doctor.diagnosis import examine
from eyas.doctor.measure import Reading, Transcript, comparable_length
from eyas.doctor.search import needed_boundaries
from eyas.drafters.kinds import KINDS
from eyas.engine import Engine
from eyas.targets import Target
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftLoss
from eyas.types import Request, SamplingParams

from .. import tiny

LENGTH = 3


class Case(NamedTuple):
    """A drafter, its target, and what the target answers."""

    read: Reading
    target: Target
    transcript: Transcript


@pytest.fixture(scope="module")
def case() -> Case:
    """A drafter after some steps of training on the very answers that it is examined with."""
    target = tiny.target()
    network = tiny.network("dflash", scale=1.0)
    read = Reading(KINDS["dflash"], network.config, network.state_dict(), (1, 2, 4))
    prompts = tiny.prompts(*range(4, 28))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    done = Engine(target, batch_size=24).generate([Request(tuple(prompt), params) for prompt in prompts])
    needed = needed_boundaries(read, target) | {0, 3, 5}
    transcript = Transcript.of(target, prompts, [one.token_ids for one in done], needed)
    final = target.trace(transcript.tokens, transcript.lengths, ()).final
    made_without_grad = (transcript.tokens, transcript.answers, transcript.states(read.taps), final)
    batch = FeatureBatch(*(tensor.clone() for tensor in made_without_grad))
    network.train()
    trained = [p for name, p in network.named_parameters() if "embed" not in name]
    for parameter in trained:
        parameter.requires_grad_(True)
    loss = DraftLoss(network, target.head, tiny.VOCAB, LossConfig(unroll=4, anchors=12))
    optimizer = torch.optim.Adam(trained, 5e-3)
    for step in range(60):
        optimizer.zero_grad()
        made = loss(batch, key=(step,))
        (made.loss / made.weight).backward()
        optimizer.step()
    tensors = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    return Case(replace(read, tensors=tensors), target, transcript)


FAULTS: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, str]]] = {
    "layer outputs taken for boundaries": ({}, (0, 1, 3), {"taps": "[1, 2, 4]"}),
    "another mask token": ({"mask_token_id": 40}, (1, 2, 4), {"mask token": "1: "}),
    "the anchor predicts": ({"sample_from_anchor": True}, (1, 2, 4), {"anchor": "a slot predicts its own token"}),
    "none": ({}, (1, 2, 4), {}),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found_and_no_other(name: str, case: Case) -> None:
    values, taps, expected = FAULTS[name]
    length = comparable_length(case.read.config, 5)
    assert length == LENGTH
    found = examine(case.read.changed(values, taps=taps), case.target, case.transcript, length)
    named = {each.trial.change.aspect: each.trial.change.name for each in found.found.adopted}
    assert found.verdict == ("misread" if expected else "sound")
    assert named.keys() == expected.keys()
    assert all(named[aspect].startswith(start) for aspect, start in expected.items())
    if expected:
        assert found.found.as_is.accept_length < found.found.measured.accept_length
