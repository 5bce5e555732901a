"""The engine: requests in, tokens out. Running sequences always fill the first slots, so every pass works on views.

A finished sequence's slot is taken over by the last one; waiting requests are admitted between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from eyas.drafters import Drafter
from eyas.engine.round import Outcome, Speculation, run_round
from eyas.engine.sequence import RunningSequence
from eyas.errors import RequestError, UsageError
from eyas.target import Target
from eyas.types import Chunk, Completion, Request
from eyas.verify import Sampler, SeededWalk, WalkRule, check_request


class Engine:
    """A target, perhaps a drafter, and the slots their sequences run in."""

    def __init__(
        self,
        target: Target,
        tokenizer: Any = None,
        speculation: Speculation | None = None,
        *,
        batch_size: int = 1,
        rule: WalkRule | None = None,
        prefill_chunk: int = 512,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch size must be at least 1, got {batch_size}")
        if prefill_chunk < 1:
            raise UsageError(f"prefill chunk must be at least 1, got {prefill_chunk}")
        self.target, self.tokenizer, self.speculation = target, tokenizer, speculation
        self.batch_size, self.rule, self.prefill_chunk = batch_size, rule or SeededWalk(), prefill_chunk
        self.eos_ids = _eos_ids(target, tokenizer)

    def check(self, request: Request) -> None:
        """Raise RequestError when a request can't run."""
        check_request(request.params, request.prompt, self._stop_ids(request), self.target.vocab_size)
        room = self.target.max_length
        if room is not None and len(request.prompt) >= room:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens, the model's context holds {room}: shorten the prompt"
            )

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run all requests, `batch_size` at a time; completions in the order of the requests."""
        done = {chunk.index: chunk.completion for chunk in self.stream(requests) if chunk.completion is not None}
        return [done[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[Request], keep: int = 0) -> Iterator[Chunk]:
        """Run all requests, yielding what each round adds to each sequence.

        `keep` > 0: the first slot still holds that many tokens of the first prompt from the call before.
        """
        for request in requests:
            self.check(request)
        waiting = iter(requests)
        yield from self.stream_from(lambda room: list(islice(waiting, room)), keep)

    @torch.inference_mode()  # all of it: what a pass allocates can't be changed outside
    def stream_from(self, take: Callable[[int], Sequence[Request]], keep: int = 0) -> Iterator[Chunk]:
        """Run requests as they come, until none runs and none comes.

        Before every round with free slots `take(room)` hands out at most `room` requests, so an answer can decide what
        is asked next. `Chunk.index` counts them. Raises RequestError for one that can't run: `check` it before.
        """
        self._prepare()
        sampler = Sampler(self.batch_size, self.target.vocab_size, self.target.device)
        taken_so_far = 0
        running: list[RunningSequence] = []
        while True:
            room = self.batch_size - len(running)
            requests = take(room) if room else ()
            if requests:
                for request in requests:
                    self.check(request)
                fresh = range(len(running), len(running) + len(requests))
                running += self._admit(fresh, list(enumerate(requests, taken_so_far)), sampler, keep)
                taken_so_far += len(requests)
                keep = 0
            if not running:
                return
            outcome, seconds = self._round(running, sampler)
            for slot, sequence in enumerate(running):
                taken = sequence.extend(outcome.tokens[slot], outcome.accepted[slot], outcome.offered[slot], seconds)
                accepted = min(outcome.accepted[slot], len(taken))
                done = self._completion(sequence) if sequence.finish_reason is not None else None
                yield Chunk(sequence.index, tuple(taken), accepted, done)
            self._release(running, sampler)

    def _prepare(self) -> None:
        """Give target and drafter as many slots as this engine runs sequences (another engine may have used them)."""
        for part in self._parts():
            if part.slots != self.batch_size:
                part.resize(self.batch_size)

    def _parts(self) -> list[Target | Drafter]:
        return [self.target] if self.speculation is None else [self.target, self.speculation.drafter]

    def _admit(
        self, rows: range, requests: list[tuple[int, Request]], sampler: Sampler, keep: int
    ) -> list[RunningSequence]:
        """Prefill requests into the slots `rows`, together."""
        began = time.perf_counter()
        admitted = []
        for slot, (index, request) in zip(rows, requests, strict=True):
            stop_ids = self._stop_ids(request)
            sampler.admit(slot, request.params, request.prompt, self.eos_ids)
            limit = request.params.max_tokens
            if self.target.max_length is not None:
                limit = min(limit, self.target.max_length - len(request.prompt))
            admitted.append(RunningSequence(index, request, limit, frozenset(stop_ids)))
            for part in self._parts():
                part.truncate(slot, keep if slot == rows[0] else 0)
        prompts = [sequence.request.prompt for sequence in admitted]
        prompts[0] = prompts[0][keep:]
        taps = () if self.speculation is None else self.speculation.drafter.taps
        for piece in self.target.prefill(rows, prompts, taps, self.prefill_chunk):
            if self.speculation is not None:
                self.speculation.drafter.observe(rows, piece.next_tokens, piece.taps, piece.counts)
        for sequence in admitted:
            sequence.stats.prefill_seconds = time.perf_counter() - began
        return admitted

    def _round(self, running: list[RunningSequence], sampler: Sampler) -> tuple[Outcome, float]:
        began = time.perf_counter()
        roots = torch.tensor([sequence.root for sequence in running], device=self.target.device)
        live = [sequence.request.speculate for sequence in running]
        outcome = run_round(self.target, self.speculation, sampler, range(len(running)), roots, self.rule, live)
        return outcome, time.perf_counter() - began

    def _release(self, running: list[RunningSequence], sampler: Sampler) -> None:
        """Drop finished sequences; the last running one takes over each freed slot."""
        for slot in reversed(range(len(running))):
            if running[slot].finish_reason is None:
                continue
            last = running.pop()
            if slot < len(running):
                running[slot] = last
                sampler.move(len(running), slot)
                for part in self._parts():
                    part.move(len(running), slot)

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        return request.params.stop_token_ids + (() if request.params.ignore_eos else self.eos_ids)

    def _completion(self, sequence: RunningSequence) -> Completion:
        return Completion(
            id=sequence.request.id,
            token_ids=sequence.tokens,
            text=self.tokenizer.decode(sequence.tokens, skip_special_tokens=True) if self.tokenizer else "",
            finish_reason=sequence.finish_reason or "length",
            stats=sequence.stats,
            lossy=self.speculation is not None and not self.rule.lossless,
        )


def _eos_ids(target: Target, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's, else the model config's, and the tokenizer's."""
    generation = getattr(target.model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(target.config, "eos_token_id", None)
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))
