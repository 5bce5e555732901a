"""Every reading of every drafter kind can be measured, differs from the others, and is another computation."""

from __future__ import annotations

import pytest
import torch

from eyas.doctor.diagnosis import RANDOM_UNEVENNESS, unevenness
from eyas.doctor.measure import Change, Reading, Transcript, measure
from eyas.doctor.search import estimated, needed_boundaries, other_readings
from eyas.drafters.kinds import KINDS
from eyas.targets import Target

from .. import tiny

EXPECTED = {
    "eagle3": {
        "taps", "tap order", "norm_before_residual", "norm_output", "rope", "embedding", "head", "rotary layout",
        "input order", "input norms", "norm weights",
    },
    "mla": {
        "taps", "tap order", "norm_before_residual", "norm_output", "rope", "embedding", "head", "rotary layout",
        "input order", "input norms", "norm weights",
    },
    "eagle1": {"taps", "rope", "embedding", "head", "rotary layout", "input order", "norm weights"},
    "mlp": {"taps", "embedding", "head", "input order"},
    "medusa": {"taps", "head"},
    "dflash": {
        "taps", "tap order", "rope", "embedding", "head", "mask token", "anchor", "block size", "norm weights",
    },
    "dspark": {
        "taps", "tap order", "rope", "embedding", "head", "mask token", "anchor", "block size", "norm weights",
    },
    "mtp": {"taps", "rope", "embedding", "head", "rotary layout", "input order", "norm weights"},
}  # fmt: skip


def reading(kind: str, **settings: object) -> Reading:
    network = tiny.network(kind, **settings)
    taps = network.config.taps or network.config.default_taps(tiny.LAYERS)
    return Reading(KINDS[kind], network.config, network.state_dict(), taps)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def transcript(read: Reading, target: Target) -> Transcript:
    prompts = tiny.prompts(5, 9, 7)
    answers = [
        tiny.continuation(target.model, prompt, count) for prompt, count in zip(prompts, (20, 1, 17), strict=True)
    ]
    return Transcript.of(target, prompts, answers, needed_boundaries(read, target))


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", EXPECTED)
def test_all_of_them_are_tried(kind: str, target: Target) -> None:
    read = reading(kind)
    transcribed = transcript(read, target)
    base = measure(read, transcribed, target, 4)
    changes = other_readings(read, target)
    assert {change.aspect for change in changes} == EXPECTED[kind]
    assert len({(change.aspect, change.name) for change in changes}) == len(changes)
    for change in changes:
        found = measure(change.apply(read), transcribed, target, 4)
        assert not torch.equal(found.overlap, base.overlap), change
        again = change.apply(change.apply(read))  # applying it twice is a reading too
        assert again.tensors.keys() == change.apply(read).tensors.keys()


def test_what_is_settled_is_left_alone(target: Target) -> None:
    assert not any(change.aspect == "taps" for change in other_readings(reading("eagle3"), target, {"taps"}))


def test_a_map_is_read_otherwise_where_that_names_tokens(target: Target) -> None:
    def maps(d2t: list[int]) -> list[Change]:
        read = reading("eagle3", draft_vocab_size=len(d2t))
        made = read.changed(tensors={"d2t": torch.tensor(d2t)})
        return [change for change in other_readings(made, target) if change.aspect == "d2t"]

    (as_ids,) = maps([1, 2, 4, 93])  # ids as offsets name 1, 3, 6, 96
    changed = as_ids.apply(reading("eagle3", draft_vocab_size=4))
    assert (changed.tensors["d2t"] + torch.arange(4)).tolist() == [1, 2, 4, 93]
    assert changed.tensors["t2d"].nonzero().squeeze(1).tolist() == [1, 2, 4, 93]
    (as_offsets,) = maps([0, 0, 0, 0])
    assert as_offsets.name.startswith("offsets")


def test_many_taps_are_not_tried_in_every_order(target: Target) -> None:
    read = reading("eagle3", taps=[0, 1, 2, 3], num_aux_hidden_states=4)
    orders = [change for change in other_readings(read, target) if change.aspect == "tap order"]
    assert len(orders) == 4


def test_drawn_matrices_are_recognized(target: Target) -> None:  # noqa: ARG001
    read = reading("eagle3", hidden_size=64, target_hidden_size=64)
    assert unevenness(read) < RANDOM_UNEVENNESS
    name = "fc.weight"
    scales = torch.linspace(0.5, 1.5, 64).unsqueeze(1)
    assert unevenness(read.changed(tensors={name: read.tensors[name] * scales})) > 2


def test_a_rate_that_is_estimated_from_a_part_is_a_rate() -> None:
    """It was the difference alone: `eyas doctor` showed -4 % where a part was better than the whole."""
    assert estimated([0.5, 0.1, 0.9], [0.5, 0.2, 0.5], [0.25, 0.06, 0.7]) == (0.25, 0.0, 1.0)
