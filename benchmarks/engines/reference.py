"""The reference that engines are compared with: eyas's answers and, round by round, the accepted tokens of its chains.

Prompts are the demo's, and chats about this Python's standard library, spread over all its modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import eyas
from benchmarks.engines.counts import Counts, Round, full_chains
from eyas.assets import PROMPTS
from eyas.bench.offline.certificate import scores_after
from eyas.data.chats.stdlib import chats_of, library_modules
from eyas.drafters import decoding
from eyas.drafters.decoding import best_children
from eyas.engine import run_round
from eyas.engine.round import Slots
from eyas.targets.native.levels import NativeLevels
from eyas.text.chats import Message
from eyas.text.template import encode_chat
from eyas.verify import Sampler


@dataclass(frozen=True)
class Reference:
    """One prompt's greedy answer in float32."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    """Including the EOS token."""
    rounds: Mapping[int, tuple[Round, ...]]
    """By K, from the answer's second token on."""
    leads: Mapping[int, float]
    """By K, the smallest margin of a draft token over the runner-up in the drafter's logits."""
    ended: bool
    """Whether it ended by its EOS token, not its limit."""


def references(
    model: str, drafter: str, prompts: Sequence[tuple[int, ...]], tokens: int, chains: Sequence[int]
) -> list[Reference]:
    """Decode all prompts plainly, then with every chain. RuntimeError if answers differ: there is no reference then."""
    params = eyas.SamplingParams(max_tokens=tokens)
    plain = eyas.load(model, dtype=torch.float32)
    answers = [tuple(done.token_ids) for done in plain.generate([eyas.Request(prompt, params) for prompt in prompts])]
    rounds: list[dict[int, tuple[Round, ...]]] = [{} for _ in prompts]
    leads: list[dict[int, float]] = [{} for _ in prompts]
    for chain in chains:
        engine = eyas.load(model, drafter, tree=f"chain:{chain}", dtype=torch.float32, draft_quantize="off")
        for prompt, answer, found, least in zip(prompts, answers, rounds, leads, strict=True):
            with _recorded_leads() as recorded:
                found[chain] = _rounds(engine, prompt, answer, tokens, chain)
            least[chain] = min(recorded, default=math.inf)
    ended = [answer[-1] in plain.eos_ids for answer in answers]
    return [Reference(*each) for each in zip(prompts, answers, rounds, leads, ended, strict=True)]


@contextmanager
def _recorded_leads() -> Iterator[list[float]]:
    """The leads of all draft tokens that a single row drafts within the `with` block."""
    found: list[float] = []

    def recorded(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        best, second = logits[0, 0].float().topk(2).values
        found.append(float(best - second))
        return best_children(logits, *rest)

    # a native search ranks all levels in one call, where no lead can be seen
    one_by_one = patch.object(NativeLevels, "can_search", False)
    with one_by_one, patch.object(decoding, "best_children", recorded):
        yield found


def _rounds(
    engine: eyas.Engine, prompt: tuple[int, ...], answer: tuple[int, ...], tokens: int, chain: int
) -> tuple[Round, ...]:
    """The rounds after the first token, which comes from prefill."""
    request = eyas.Request(prompt, eyas.SamplingParams(max_tokens=tokens), trace=True)
    emitted = list[int]()
    rounds = list[Round]()
    stats = None
    for chunk in engine.stream([request]):
        if chunk.completion is not None:
            stats = chunk.completion.stats
        if chunk.draft is not None:
            accepted = len(chunk.draft.path)
            end = None
            stopped = chunk.completion is not None and chunk.completion.finish_reason == "stop"
            if stopped and len(chunk.token_ids) <= accepted:
                end = len(chunk.token_ids) - 1
            rounds.append(Round(accepted, tokens - len(emitted), end))
        emitted.extend(chunk.token_ids)
    if tuple(emitted) != answer or stats is None:
        raise RuntimeError(f"eyas's own answers differ with and without chain:{chain}: {emitted} and {list(answer)}")
    if full_chains(rounds, chain) != Counts.of(stats, chain):
        raise RuntimeError("the rounds' counts differ from the engine's")
    return tuple(rounds)


class Chains:
    """Number of draft tokens of a chain that are accepted at any position of an answer."""

    def __init__(self, model: str, drafter: str, chain: int) -> None:
        self._engine = eyas.load(model, drafter, tree=f"chain:{chain}", dtype=torch.float32, draft_quantize="off")
        self._chain = chain

    def accepted(self, reference: Reference, position: int) -> int:
        """Draft tokens accepted after the first `position` tokens of the answer, before it is cut."""
        at = 1
        for each in reference.rounds[self._chain]:
            if at == position:
                return each.accepted
            at += each.accepted + 1
        return self._accepted((*reference.prompt, *reference.answer[:position]))

    def _accepted(self, tokens: Sequence[int]) -> int:
        """Accepted draft tokens of a separate round, after prefilling all but the last of `tokens`."""
        target = self._engine.target
        speculation = self._engine.speculation
        rows = range(1)
        assert speculation is not None
        cache = target.allocate(1)
        speculation.drafter.pairs.resize(1)
        for piece in target.prefill(cache, rows, [tokens], speculation.drafter.taps):
            speculation.drafter.observe(rows, piece.next_tokens, piece.taps, piece.counts)
        sampler = Sampler(1, target.vocab_size, target.device)
        sampler.admit(0, eyas.SamplingParams(), tokens, self._engine.eos_ids)
        roots = torch.tensor(tokens[-1:], device=target.device)
        return run_round(Slots(target, cache, sampler), speculation, rows, roots).accepted[0]


class Gaps:
    """Margin by which the target prefers our token where an engine's answer differs, in logits."""

    def __init__(self, model: str) -> None:
        self._engine = eyas.load(model, dtype=torch.float32)

    def gap(self, reference: Reference, position: int, other: int) -> float:
        """Our token's logit minus the engine's token's, after the first `position` tokens of the answer."""
        scores = scores_after(
            self._engine.target,
            eyas.SamplingParams(),
            reference.prompt,
            reference.answer[:position],
            self._engine.eos_ids,
        )
        return float(scores.values[reference.answer[position]] - scores.values[other])


LONGEST = 300
"""Most tokens of a chat's prompt: longer ones take time and show nothing more."""


def make_prompts(tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    """`count` distinct prompts as token ids, always the same under one version of Python."""
    demo = [encode_chat(tokenizer, [Message(role="user", content=text)]) for _, text in PROMPTS]
    chats = [chat for module in library_modules() for chat in chats_of(module)]
    wanted = count - len(demo)
    found = list[tuple[int, ...]]()
    for number in range(max(wanted, 0)):
        candidates = chats[number * len(chats) // wanted : (number + 1) * len(chats) // wanted]
        encoded = (encode_chat(tokenizer, chat.messages[:1]) for chat in candidates)
        found.append(next(ids for ids in encoded if len(ids) <= LONGEST))
    return [*demo, *found][:count]
