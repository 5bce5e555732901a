"""Output with drafters from the target's own files compared with plain decoding."""

from __future__ import annotations

from typing import Any

from eyas.drafters.decoding import NetworkDrafter
from eyas.engine import Engine, Speculation
from eyas.targets import Target
from eyas.tree import parse_tree
from eyas.types import Limits, Request, SamplingParams

from ... import tiny


def equal_to_plain(target: Target, drafter: NetworkDrafter, temperature: float, tree: str) -> list[Any]:
    """Assert twice that output equals plain decoding's, the second time with cached prefixes.

    Returns the accepted-token histogram of each answer, both times.
    """
    batch = 1 if tree.startswith("chain") else 4
    requests = [
        Request(prompt, SamplingParams(max_tokens=9, temperature=temperature, seed=seed))
        for seed, prompt in enumerate(tiny.prompts(1, 11, 5, 20, 6)[: batch + 2])
    ]
    plain = [done.token_ids for done in Engine(target, batch_size=batch).generate(requests)]
    speculation = Speculation(drafter, parse_tree(tree))
    engine = Engine(target, None, speculation, limits=Limits(max_running=batch, prefix_tokens=256))
    accepted = []
    for _ in range(2):
        done = engine.generate(requests)
        assert [one.token_ids for one in done] == plain
        engine.check_invariants()
        accepted.append([one.stats.accepted_histogram for one in done])
        assert sum(one.stats.drafted_depth for one in done) > 0
    return accepted
