"""Teacher-forced figures against the drafter's own drafting, start by start, and against whole distributions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.doctor.measure import BLOCK, Reading, Transcript, measure
from eyas.drafters.checkpoint import open_checkpoint
from eyas.drafters.loading import drafter_of
from eyas.targets import Target
from eyas.train.loss.ttt import chain_rows, unrolled
from eyas.tree import parse_tree
from eyas.verify import Sampler

from ..toy.pair import TOY_DRAFTER

LENGTH = 3


@pytest.fixture(scope="module")
def sound(demo_target: Target) -> Reading:
    return Reading.of(open_checkpoint(Path(TOY_DRAFTER)), demo_target).on(demo_target)


@pytest.fixture(scope="module")
def one(demo_transcript: Transcript) -> Transcript:
    """A transcript of a single answer."""
    return demo_transcript.every(len(demo_transcript.tokens))


def test_acceptance_is_that_of_the_chains_really_drafted(sound: Reading, one: Transcript, demo_target: Target) -> None:
    drafter = drafter_of(sound.network(demo_target), sound.taps)
    drafter.pairs.resize(1)
    row = one.tokens
    states = one.states(sound.taps)
    sampler = Sampler(1, demo_target.vocab_size, demo_target.device)
    begin = int(one.answers[0].nonzero()[0])
    end = int(one.lengths[0])
    reached, accepted = [0] * LENGTH, [0] * LENGTH
    for root in range(begin - 1, end - 1):
        drafter.pairs.truncate(0, 0)
        drafter.observe(range(1), row[:, 1 : root + 1], states[:, :root], [root])
        tree = drafter.draft(range(1), parse_tree(f"chain:{LENGTH}"), sampler.coupling(range(1), False))
        guesses = tree.tokens[0].tolist()
        truth = row[0, root + 1 : end].tolist()
        for position in range(min(LENGTH, len(truth))):
            reached[position] += 1
            accepted[position] += guesses[: position + 1] == truth[: position + 1]
    found = measure(sound, one, demo_target, LENGTH)
    assert found.accepted == pytest.approx([a / r for a, r in zip(accepted, reached, strict=True)])


def test_overlap_is_what_the_likeliest_tokens_share(sound: Reading, one: Transcript, demo_target: Target) -> None:
    network = sound.network(demo_target)
    rows = chain_rows(one.answers, 1)
    ((_, normed),) = unrolled(network, one.tokens, one.states(sound.taps), rows)
    q = torch.zeros(len(rows.answers), demo_target.vocab_size)
    q[:, network.target_ids] = network.logits(normed[rows.answers - 1]).softmax(-1)
    p = demo_target.head(demo_target.trace(one.tokens, one.lengths, ()).final.flatten(0, 1)[rows.answers]).softmax(-1)
    whole = torch.minimum(p, q).sum(1)
    found = measure(sound, one, demo_target, 1).overlap
    assert bool((found <= whole + 1e-5).all())
    assert float((whole - found).mean()) < 0.02


def test_neighbors_are_counted_together_and_answers_apart(
    sound: Reading, demo_transcript: Transcript, demo_target: Target
) -> None:
    part = demo_transcript.every(8)
    blocks = measure(sound, part, demo_target, 1).blocks
    expected = [
        (row, position // BLOCK) for row, count in enumerate(part.answers.sum(1).tolist()) for position in range(count)
    ]
    order = {block: number for number, block in enumerate(dict.fromkeys(expected))}
    same = {found: number for number, found in enumerate(dict.fromkeys(blocks.tolist()))}
    assert [same[found] for found in blocks.tolist()] == [order[block] for block in expected]


def test_elsewhere_shows_every_position_the_states_of_another(demo_transcript: Transcript) -> None:
    part = demo_transcript.every(8)
    own = part.states((16,))
    other = part.with_other_states().states((16,))
    for row, length in enumerate(part.lengths.tolist()):
        same = (own[row, :length] == other[row, :length]).flatten(1).all(1)
        assert not bool(same[1:].any())  # the first token of all chats is the same, and so is its state
