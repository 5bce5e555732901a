"""Engines, servers and `transformers.generate` measured alike: a group of prompts, timed as a client sees it.

Groups are interleaved as in `runner.py`; figures go into the same report. An answer's number is `turn * rows + row`.

`transformers.generate` is a second baseline: plain decoding by other code, counted by the same counter.

It decodes the rows of a group together, left-padded and greedily, with the unmodified model: none of eyas's kernels,
slots or ragged passes take part. Sampled answers can't be compared, because its noise isn't ours.

Prefill is the time until the model's first forward pass returns: the padded prompts, and `generate`'s setup. All later
time is decoding, `generate`'s bookkeeping included. A row's passes are its tokens except the first, which comes with
prefill. `generate` keeps finished rows in the batch as padding until the whole group has finished.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig

from eyas.bench.offline.report import MethodLine
from eyas.bench.offline.runner import Advance, Group, GroupRun, Plan, Task, interleaved, median_run, pooled
from eyas.bench.serving.client import Client, Item, Load, LoadRun, TimedAnswer, item_of
from eyas.bench.serving.report import ACCEPT_LENGTH, accept_length, quantiles, throughput
from eyas.bench.serving.servers import Side, SpeculationCounts
from eyas.engine import Engine
from eyas.errors import RequestError, UsageError
from eyas.hub import find_target
from eyas.targets.gguf_weights import model_by_transformers
from eyas.targets.loading import read_config, read_model
from eyas.text.dialogue import Dialogue, converse
from eyas.types import Completion, Request, SamplingParams, Stats

T = TypeVar("T")
Method = Callable[[Group], LoadRun]
"""Answers a group of prompts: an engine in this process or a server."""

DEFINITIONS = (
    "tokens/s: output tokens (for a server, as its `usage` counts them) / wall time from the request to the end of the "
    "answer, prefill included. A group of prompts counts with its median run.",
    "speedup: tokens/s of the method / tokens/s of the baseline.",
    "TTFT: request sent to first text. TPOT: (end - first text) / (tokens - 1). Medians over the answers.",
    ACCEPT_LENGTH,
    "efficiency: speedup / accept length, if the baseline decodes plainly.",
    "by position: drafts accepted at that depth / drafts, from the server's counters.",
    "identical: answers whose text equals the baseline's, in every repeat.",
    "mean: arithmetic mean of the files' figures.",
)


def run_engine_as_client(engine: Engine, group: Group, params: SamplingParams) -> LoadRun:
    """Decode a group in this process; a turn begins when the last answer of the previous turn has ended."""
    dialogues = [Dialogue(row) for row in group]
    began = ended = time.perf_counter()
    starts: dict[int, float] = {0: began}
    firsts: dict[int, float] = {}
    answers: list[TimedAnswer] = []
    stats = Stats()
    for dialogue, chunk in converse(engine, dialogues, params):
        now = time.perf_counter()
        done = chunk.completion
        turn = len(dialogue.completions) - (done is not None)
        start = starts.setdefault(turn, ended)
        number = turn * len(group) + dialogues.index(dialogue)
        if chunk.token_ids:
            firsts.setdefault(number, now - start)
        if done is not None:
            ended = now
            answers.append(
                TimedAnswer(
                    number,
                    start - began,
                    now - start,
                    firsts.get(number),
                    done.stats.tokens,
                    len(dialogue.requests[turn].prompt),
                    done.text,
                    float(done.stats.target_passes),
                    float(done.stats.walked),
                    done.error,
                )
            )
            stats.merge(done.stats)
    for row, dialogue in enumerate(dialogues):
        if dialogue.error is not None:
            answers.append(_failed(len(dialogue.completions) * len(group) + row, dialogue.error))
    return LoadRun(ended - began, sorted(answers, key=lambda answer: answer.item), _counted(stats))


class Endpoint:
    """A server that answers groups of prompts. Use it as a context manager; raises EndpointError if unreachable.

    With a tokenizer, prompts are sent as token ids if the server accepts them; `sends_ids` says whether it does.
    """

    def __init__(
        self,
        side: Side,
        params: SamplingParams,
        timeout: float = 600.0,
        api_key: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._client = Client(side, params, timeout, api_key, own_seeds=False)
        self._tokenizer = tokenizer
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Endpoint:
        try:
            self._await(self._client.__aenter__())
            if self._tokenizer is not None:
                some_ids = self._tokenizer("one two")["input_ids"]
                self._tokenizer = self._tokenizer if self._await(self._client.takes_ids(some_ids)) else None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._await(self._client.__aexit__())
        self._loop.close()

    @property
    def sends_ids(self) -> bool:
        """Whether prompts are sent as token ids."""
        return self._tokenizer is not None

    def run(self, group: Group) -> LoadRun:
        """Send all rows of a group concurrently, turn by turn."""
        return self._await(self._converse(group))

    async def _converse(self, group: Group) -> LoadRun:
        texts: list[list[str]] = [[] for _ in group]
        open_rows = list(range(len(group)))
        answers = list[TimedAnswer]()
        runs = list[LoadRun]()
        turn = 0
        while open_rows:
            items: dict[int, Item] = {}
            for row in open_rows:
                number = turn * len(group) + row
                try:
                    items[row] = item_of(group[row], group[row].id, self._tokenizer, texts[row])
                except RequestError as error:
                    answers.append(_failed(number, f"{group[row].where}: {error}"))
            run = await self._client.run(Load("closed", max(1, len(items))), list(items.values()), 0, 0)
            for row, answer in zip(items, run.answers, strict=True):
                answers.append(replace(answer, item=turn * len(group) + row))
                texts[row].append(answer.text)
            failed = {answer.item % len(group) for answer in answers if answer.error is not None}
            turn += 1
            open_rows = [row for row in open_rows if row not in failed and turn < len(group[row].turns or ("",))]
            runs.append(run)
        total = sum(runs, LoadRun(0.0, []))
        return replace(total, answers=sorted(answers, key=lambda answer: answer.item))

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


def _failed(number: int, error: str) -> TimedAnswer:
    return TimedAnswer(number, 0.0, 0.0, error=error)


def _counted(stats: Stats) -> SpeculationCounts:
    """The engine's statistics as the counters that servers publish."""
    histogram, offered = stats.accepted_histogram, stats.offered_by_depth
    return SpeculationCounts(
        float(offered[0]) if offered else 0.0,
        float(stats.drafted_depth),
        float(stats.walked),
        tuple(float(sum(histogram[depth + 1 :])) for depth in range(len(offered))),
    )


@dataclass
class ExternalResult:
    """A method's result on a task, timed as a client sees it."""

    run: LoadRun = LoadRun(0.0, [])  # noqa: RUF009  # frozen
    """The median runs of all groups, added up."""
    same: int = 0
    compared: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def speed(self) -> float:
        """Output tokens of all answers per second."""
        return throughput(self.run) if self.run.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: the counts that figures are computed from."""
        answers = self.run.answers
        return {
            "tokens": sum(answer.tokens for answer in answers),
            "seconds": round(self.run.seconds, 6),
            "passes": sum(answer.passes for answer in answers),
            "accepted_in_passes": sum(answer.accepted for answer in answers),
            "counted": vars(self.run.counted),
        }


def measure_external(
    task: Task, methods: Mapping[str, Method], baseline: str | None, plan: Plan, advance: Advance = lambda: None
) -> dict[str, ExternalResult]:
    """Have every method answer every group, interleaved; texts are compared with the baseline's."""
    results = {name: ExternalResult() for name in methods}
    for _ in range(plan.warmup if task.groups else 0):
        for method in methods.values():
            method(task.groups[0])
    for number, group in enumerate(task.groups):
        runs = interleaved(list(methods), lambda name, each: methods[name](each), group, plan.repeats, number, advance)
        for name, one in results.items():
            one.run += median_run(runs[name], lambda run: run.seconds)
            one.errors.update(a.error for run in runs[name] for a in run.answers if a.error is not None)
            if baseline is not None:
                texts = _texts(runs[baseline][0])
                one.compared += len(texts)
                one.same += sum(
                    all(_texts(run).get(item) == text for run in runs[name]) for item, text in texts.items()
                )
    return results


def _texts(run: LoadRun) -> dict[int, str]:
    """Number -> text of the answers without an error."""
    return {answer.item: answer.text for answer in run.answers if answer.error is None}


def external_lines(task: str, results: Mapping[str, ExternalResult], baseline: str | None) -> list[MethodLine]:
    """The figures of every method on one file."""
    base = None if baseline is None else results[baseline].speed
    plain = baseline is not None and accept_length([results[baseline].run]) in (None, 1.0)
    return [_line(task, name, one, base, against_plain=plain and name != baseline) for name, one in results.items()]


def _line(task: str, method: str, result: ExternalResult, base: float | None, *, against_plain: bool) -> MethodLine:
    good = [answer for answer in result.run.answers if answer.error is None]
    return MethodLine(
        task,
        method,
        result.speed,
        None if base is None else result.speed / base if base else 0.0,
        accept_length([result.run]),
        None,
        result.run.counted.rates,
        result.same,
        result.compared,
        quantiles([answer.first_seconds for answer in good]).get("p50"),
        quantiles([answer.seconds_per_token for answer in good]).get("p50"),
        against_plain=against_plain,
    )


def external_errors(results: Mapping[str, Mapping[str, ExternalResult]]) -> Sequence[str]:
    """Every error of every method and task, with how often it occurred."""
    return [
        f"{task}, {method}: {count} times {error}"
        for task, methods in results.items()
        for method, one in methods.items()
        for error, count in one.errors.items()
    ]


class TransformersBaseline:
    """A transformers model that decodes groups of rows with its own `generate`."""

    def __init__(self, model: str | Path, engine: Engine) -> None:
        """Load `model` a second time, unmodified, in the dtype and on the device of `engine`'s target.

        A GGUF file is read by transformers' own reader. The engine makes the prompts and knows which tokens end an
        answer; it doesn't run. Raises ModelError.
        """
        files = find_target(model)
        dtype = engine.target.dtype
        if files.gguf is None:
            loaded = read_model(files, read_config(files), dtype)
        else:
            loaded = model_by_transformers(files.gguf, dtype)
        self.model = loaded.to(engine.target.device).eval().requires_grad_(False)
        self.model.generation_config = GenerationConfig()  # a checkpoint's own may penalize or ban tokens
        self._engine = engine

    def run_group(self, group: Group, params: SamplingParams) -> GroupRun:
        """Decode a group, turn by turn, as `runner.run_group` does with an engine. Raises UsageError unless greedy."""
        dialogues = [Dialogue(row) for row in group]
        stats = self.answer(dialogues, params)
        return GroupRun.of(stats, dialogues)

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
        """Answer requests that are decoded together."""
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
        began = time.perf_counter()
        passed = list[float]()

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
        prefill = passed[0] - began
        decode = time.perf_counter() - passed[0]
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
    """Raise UsageError for parameters that `generate` doesn't apply as the engine does."""
    same = {name: getattr(params, name) for name in ("max_tokens", "stop_token_ids", "ignore_eos", "seed")}
    if params != SamplingParams(**same):
        raise UsageError(
            "transformers.generate is a baseline for greedy answers only: leave out temperature, penalties, bans and "
            "log-probabilities, or this method"
        )
