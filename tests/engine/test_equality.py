"""The promise: greedy speculation emits exactly what `transformers` generates, on every architecture."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from eyas.engine import Engine, Speculation
from eyas.tree import parse_tree
from eyas.types import Completion, Request, SamplingParams

from .. import tiny

TOKENS = 12
LENGTHS = (13, 1, 20, 5, 9)  # uneven, a one-token prompt, more than there are slots
RAGGED = "dynamic:4,3,8,0.1"  # rows of different sizes: passes are packed
TREES = ("chain:4", "dynamic:4,3,8")


@cache
def _reference(name: str) -> list[list[int]]:
    """The recorded greedy continuations of `transformers`."""
    model = tiny.target(name).model
    return [tiny.continuation(model, prompt, TOKENS) for prompt in tiny.prompts(*LENGTHS)]


def _run(engine: Engine) -> list[Completion]:
    params = SamplingParams(max_tokens=TOKENS)
    return engine.generate([Request(tuple(p), params) for p in tiny.prompts(*LENGTHS)])


@pytest.mark.every(3)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_reference_wanders(name: str) -> None:
    """A model that repeats itself would hide a wrong acceptance."""
    distinct = [len(set(tokens)) for tokens in _reference(name)]
    assert sum(distinct) >= 4 * len(LENGTHS), distinct
    assert len({tuple(tokens) for tokens in _reference(name)}) == len(LENGTHS)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "shape"), tiny.sample([*tiny.ARCHITECTURES], [("dynamic:4,3,8", 1), ("chain:4", 4), (RAGGED, 4)])
)
def test_equal_with_a_disagreeing_drafter(name: str, shape: tuple[str, int]) -> None:
    tree, batch = shape
    speculation = Speculation(tiny.eagle3_drafter(), parse_tree(tree))
    done = _run(Engine(tiny.target(name), None, speculation, batch_size=batch))
    assert [c.token_ids for c in done] == _reference(name)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "kind"), [("llama", kind) for kind in tiny.KINDS] + tiny.sample(("gemma2", "deepseek3"), [*tiny.KINDS])
)
def test_equal_with_every_kind_of_drafter(name: str, kind: str) -> None:
    speculation = Speculation(tiny.drafter(kind), parse_tree("dynamic:4,3,8"))
    done = _run(Engine(tiny.target(name), None, speculation, batch_size=4))
    assert [c.token_ids for c in done] == _reference(name)


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "tree", "batch"), tiny.sample([*tiny.ARCHITECTURES], (*TREES, RAGGED), (4, 1)))
def test_equal_with_a_drafter_that_is_often_right(name: str, tree: str, batch: int) -> None:
    """Full, partial and no acceptance, on paths that lie anywhere among the cache's columns."""
    reference = _reference(name)
    model = tiny.target(name).model
    sequences = [p + r for p, r in zip(tiny.prompts(*LENGTHS), reference, strict=True)]
    oracle = tiny.OracleDrafter(sequences, (0, 2, tiny.LAYERS))
    done = _run(Engine(tiny.target(name), None, Speculation(oracle, parse_tree(tree)), batch_size=batch))
    assert [c.token_ids for c in done] == reference
    assert all(c.stats.walked > 0 for c in done)
    accepted = sum((Counter(dict(enumerate(c.stats.accepted_histogram))) for c in done), Counter())
    assert sum(count > 0 for count in accepted.values()) >= 3, accepted
    _check_observed(oracle, sequences, model)


def _check_observed(oracle: tiny.OracleDrafter, sequences: list[list[int]], model: torch.nn.Module) -> None:
    """The drafter was shown the states of exactly the committed tokens, those of moved columns included."""
    for slot in range(oracle.slots):
        oracle.truncate(slot, 0)
    observed = [(tokens, taps) for tokens, taps in oracle.seen if len(tokens) > 1]
    assert len(observed) == len(sequences)
    for sequence in sequences:
        tokens, taps = next((t, s) for t, s in observed if t[: len(sequence) - 1] == sequence[1:])
        size = len(sequence) - 1
        assert len(tokens) >= size
        states = tiny.full_forward(model, sequence).hidden_states
        for place, boundary in enumerate((0, 2)):
            torch.testing.assert_close(taps[:size, place], states[boundary][0, :size], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 4])
def test_plain_decoding_equals_too(batch: int) -> None:
    done = _run(Engine(tiny.target(), None, None, batch_size=batch))
    assert [c.token_ids for c in done] == _reference("llama")
