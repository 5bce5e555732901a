"""`transformers.generate` as a second baseline: plain decoding by other code, counted by the same counter.

It decodes the rows of a group together, padded on the left, greedily, with the untouched model: eyas's kernels, slots
and ragged passes have no part in it. Sampled answers can't be compared, because its noise isn't ours.

Prefill is what passes until the model's first forward has returned: the padded prompts, and what `generate` sets up.
All after it is decoding, with `generate`'s own bookkeeping. A row's passes are its tokens but the first, which comes
with prefill. Rows that are finished run along as padding until the group is, as `generate` does it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig

from eyas.bench.offline.runner import Group, GroupRun, pooled
from eyas.engine import Engine
from eyas.errors import UsageError
from eyas.hub import find_target
from eyas.targets.loading import read_config, read_model
from eyas.text.dialogue import Dialogue
from eyas.types import Completion, Request, SamplingParams, Stats


class TransformersBaseline:
    """A transformers model that decodes groups of rows with its own `generate`."""

    def __init__(self, model: str | Path, engine: Engine) -> None:
        """Load `model` a second time, untouched, in the dtype and on the device of `engine`'s target.

        The engine makes the prompts and knows which tokens end an answer; it doesn't run. Raises ModelError.
        """
        name = find_target(model)
        loaded = read_model(name, read_config(name), engine.target.dtype)
        self.model = loaded.to(engine.target.device).eval().requires_grad_(False)
        self.model.generation_config = GenerationConfig()  # a checkpoint's own may penalise or ban tokens
        self._engine = engine

    def run_group(self, group: Group, params: SamplingParams) -> GroupRun:
        """Decode a group, turn by turn, as `run_group` of the runner does with an engine. UsageError unless greedy."""
        dialogues = [Dialogue(row) for row in group]
        stats = self.answer(dialogues, params)
        return GroupRun(
            stats,
            [completion.token_ids for dialogue in dialogues for completion in dialogue.completions],
            [dialogue.error for dialogue in dialogues if dialogue.error is not None],
        )

    def answer(self, dialogues: Sequence[Dialogue], params: SamplingParams) -> Stats:
        """Answer all turns of dialogues; returns their statistics, pooled. Raises UsageError unless greedy."""
        refuse_sampling(params)
        stats = Stats()
        while unanswered := [dialogue for dialogue in dialogues if dialogue.open]:
            requests = [(dialogue, dialogue.next_request(self._engine, params)) for dialogue in unanswered]
            running = [(dialogue, request) for dialogue, request in requests if request is not None]
            completions = self._generate([request for _, request in running]) if running else []
            for (dialogue, _), completion in zip(running, completions, strict=True):
                dialogue.answer(completion)
            stats.merge(pooled(completions) if completions else Stats())
        return stats

    @torch.inference_mode()
    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The answers to requests that are decoded together."""
        width = max(len(request.prompt) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        params, device = requests[0].params, self.model.device
        limit, room = params.max_tokens, self._engine.target.max_length
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(*(self._engine.end_ids(request) for request in requests))
        began, passed = time.perf_counter(), list[float]()

        def note(*_: object) -> None:
            if not passed and device.type == "cuda":
                torch.cuda.synchronize(device)
            passed.append(time.perf_counter())

        hook = self.model.register_forward_hook(note)
        try:
            out = self.model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=limit if room is None else min(limit, room - width),
                do_sample=False,
                eos_token_id=sorted(stop_ids) or None,
                pad_token_id=0,
                trust_remote_code=False,
            )
            answers = out[:, width:].tolist()  # waits for the device
        finally:
            hook.remove()
        prefill, decode = passed[0] - began, time.perf_counter() - passed[0]
        return [
            self._completion(request, tokens, stop_ids, prefill, decode)
            for request, tokens in zip(requests, answers, strict=True)
        ]

    def _completion(
        self, request: Request, tokens: list[int], stop_ids: set[int], prefill: float, decode: float
    ) -> Completion:
        stop = next((count for count, token in enumerate(tokens, 1) if token in stop_ids), None)
        tokens = tokens[:stop]
        stats = Stats(tokens=len(tokens), prefill_tokens=1, prefill_seconds=prefill, decode_seconds=decode)
        for emitted in range(1, len(tokens)):
            stats.record(0, 0, len(request.prompt) + emitted)
        tokenizer = self._engine.tokenizer
        text = tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else ""
        return Completion(request.id, tokens, text, "length" if stop is None else "stop", stats)


def refuse_sampling(params: SamplingParams) -> None:
    """Raise UsageError for parameters that `generate` doesn't follow as the engine does."""
    same = {name: getattr(params, name) for name in ("max_tokens", "stop_token_ids", "ignore_eos", "seed")}
    if params != SamplingParams(**same):
        raise UsageError(
            "transformers.generate is a baseline of greedy answers only: leave out temperature, penalties, bans and "
            "log-probabilities, or this method"
        )
