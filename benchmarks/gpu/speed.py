"""Tokens per second of a pair on a device, plain and at set accept lengths, and the host's cost of a round.

All settings run the same prompts with the same counter, in turns, in one process. Only decoding counts: prefill is
measured separately, and the time of a single token is subtracted from `transformers.generate`.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.oracle import OracleDrafter, expected_accept_length
from benchmarks.gpu.pairs import Pair, Sizes, make_pair, stock_attention, without_graphs
from benchmarks.gpu.steps import Outcome, Row
from benchmarks.harness import interleave, paired
from benchmarks.plain_decoding import transformers_rate
from eyas.drafters.base import Drafter
from eyas.engine import Engine, Speculation
from eyas.errors import EyasError
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams, Stats

ORACLES: dict[str, tuple[float, ...]] = {
    "chain:3 at 0.6": (0.6,) * 3,
    "chain:3 at 0.9": (0.9,) * 3,
    "chain:5 at 0.8": (0.8,) * 5,
}
"""Setting -> how often each level is right. Drafting costs as much as with a real drafter."""
DRAFTED = ("chain:3", "dynamic:5,6,24")
"""Trees for the wide pair's own drafter."""
PLAIN, STOCK = "plain", "transformers.generate"
EAGER = ", no graphs"
"""Suffix of settings whose passes aren't CUDA graphs."""
ROUNDS: dict[str, tuple[float, ...]] = {PLAIN: (), "chain:3 at 0.9": (0.9,) * 3}
"""Settings whose rounds are profiled, with and without graphs."""


def rates(name: str, batch: int, sizes: Sizes, device: torch.device) -> Outcome:
    """Tokens/s of each setting at a batch size: medians, and ratios to plain decoding in the same repeat."""
    pair = make_pair(name, sizes, device)
    prompts = random_prompts(pair, batch, sizes.prompt)
    requests = [Request(tuple(row), _params(sizes.tokens)) for row in prompts.tolist()]
    recorded = record(pair, requests, sizes.tokens + 8)
    drafters: dict[str, Drafter | None] = {PLAIN: None}
    for setting, right in ORACLES.items():
        drafters[setting] = oracle(pair, recorded, right)
    drafters["chain:3 at 0.9, draft for free"] = oracle(pair, recorded, (0.9,) * 3, free=True)
    if name == "wide":
        drafters |= {f"{tree}, its drafter": pair.drafter for tree in DRAFTED}
    drafters |= {setting + EAGER: drafters[setting] for setting in ROUNDS}
    engines = {}
    for setting, drafter in drafters.items():
        with without_graphs(pair) if setting.endswith(EAGER) else nullcontext():
            engines[setting] = engine(pair, drafter, setting, batch)

    def run(setting: str) -> Row:
        with peak_memory(device) as memory:
            if setting == STOCK:
                with stock_attention(pair.target) as model:
                    row: Row = {"tokens/s": transformers_rate(model, prompts, sizes.tokens)}
            else:
                row = _generated(engines[setting], requests)
        return row | memory

    plain = [sequence[sizes.prompt :][: sizes.tokens] for sequence in recorded]
    runs = interleave({setting: partial(run, setting) for setting in (*engines, STOCK)}, sizes.repeats)
    return Outcome([_line(setting, batch, found, runs[PLAIN], plain) for setting, found in runs.items()])


def _line(setting: str, batch: int, runs: Sequence[Row], plain: Sequence[Row], expected: list[list[int]]) -> Row:
    """One setting's figures over all repeats."""
    speeds, base = ([run["tokens/s"] for run in each] for each in (runs, plain))
    ratio = paired(speeds, base)
    row: Row = {
        "batch": batch, "setting": setting,
        "tokens/s": round(statistics.median(speeds), 1),
        "to plain": ratio["median"], "min": ratio["least"], "max": ratio["most"],
        "peak GiB": runs[-1]["peak GiB"],
    }  # fmt: skip
    if "accept length" in runs[-1]:
        same = sum(a == b for a, b in zip(runs[-1]["token ids"], expected, strict=True))
        row |= {"accept length": runs[-1]["accept length"], "answers as plain": f"{same} of {len(expected)}"}
    if (oracle := setting.removesuffix(EAGER)) in ORACLES:
        row["set to"] = round(expected_accept_length(ORACLES[oracle]), 3)
    return row


def rounds(name: str, batch: int, sizes: Sizes, device: torch.device) -> Outcome:
    """Mid-answer rounds: their time, the device's part of it, kernels, and how often the host waits."""
    pair = make_pair(name, sizes, device)
    length = 4 * sizes.rounds * (1 + max(map(len, ROUNDS.values()))) + 8
    prompts = random_prompts(pair, batch, sizes.prompt)
    requests = [Request(tuple(row), _params(length)) for row in prompts.tolist()]
    recorded = record(pair, requests, length)
    rows: list[Row] = []
    detail: dict[str, Any] = {}
    for (setting, right), eager in product(ROUNDS.items(), (False, True)):
        drafter = oracle(pair, recorded, right) if right else None
        name = setting + EAGER * eager
        with (
            without_graphs(pair) if eager else nullcontext(),
            decoding(engine(pair, drafter, setting, batch), requests) as step,
        ):
            row, waits = _round(step, sizes.rounds, device)
        rows.append({"batch": batch, "setting": name, **row})
        detail[name] = waits
    return Outcome(rows, detail=detail)


def _round(step: Callable[[], object], count: int, device: torch.device) -> tuple[Row, dict[str, float]]:
    """The cost of a round, each figure measured over `count` rounds; and where the host waits."""
    seconds: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    row: Row = {"round ms": round(1e3 * statistics.median(seconds), 3)}
    if device.type != "cuda":
        return row | {"device ms": None, "exposed host ms": None, "kernels": None, "host waits": None}, {}
    waits = host_waits(step, count)
    row |= device_work(step, count, row["round ms"])
    row["host waits"] = round(sum(waits.values()) / count, 1)
    return row, {line: number / count for line, number in waits.most_common()}


def host_waits(step: Callable[[], object], count: int) -> Counter[str]:
    """`file:line` -> how often it made the host wait for the device in `count` calls, as PyTorch reports it.

    A copy from pageable memory to the device counts: it waits for all work before it.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(count):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [each for each in caught if "synchroniz" in str(each.message)]
    return Counter(f"{Path(each.filename).name}:{each.lineno}" for each in found)


def device_work(step: Callable[[], object], count: int, round_ms: float) -> Row:
    """Kernel time and number of kernels per round, and the host time that no kernel hides.

    The profiler slows down the host but not the kernels, so `round_ms` is measured without it.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e3 / count
    return {
        "device ms": round(busy, 3),
        "exposed host ms": round(max(0.0, round_ms - busy), 3),
        "kernels": round(len(kernels) / count),
    }


@contextmanager
def decoding(engine: Engine, requests: Sequence[Request]) -> Iterator[Callable[[], object]]:
    """Prefill all prompts, then give the block the engine's step; the requests end with the block."""
    indices = [engine.submit(request) for request in requests]

    def step() -> None:
        for chunk in engine.step():
            if chunk.completion is not None:
                raise EyasError(f"an answer ended early: {chunk.completion.error or chunk.completion.finish_reason}")

    while engine.state().running < len(requests):
        step()
    for _ in range(2):  # warm-up
        step()
    try:
        yield step
    finally:
        for index in indices:
            engine.cancel(index)
        engine.step()


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Row]:
    """Yield a row that gets the peak device memory allocated during the block; None on a CPU."""
    found: Row = {"peak GiB": None}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.type == "cuda":
        found["peak GiB"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)


def random_prompts(pair: Pair, batch: int, length: int) -> torch.Tensor:
    """Random tokens [batch, length]; no two rows start alike."""
    draw = torch.Generator().manual_seed(batch)
    prompts = torch.randint(5, pair.target.vocab_size, (batch, length), generator=draw)
    prompts[:, 1] = torch.randperm(pair.target.vocab_size - 5, generator=draw)[:batch] + 5
    return prompts.to(pair.target.device)


def record(pair: Pair, requests: Sequence[Request], tokens: int) -> list[list[int]]:
    """Prompts with their plain continuations, decoded together."""
    longer = [Request(request.prompt, _params(tokens)) for request in requests]
    done = Engine(pair.target, batch_size=len(requests)).generate(longer)
    return [[*request.prompt, *completion.token_ids] for request, completion in zip(requests, done, strict=True)]


def oracle(pair: Pair, recorded: Sequence[Sequence[int]], right: Sequence[float], free: bool = False) -> OracleDrafter:
    """An oracle for the pair; unless drafts are `free`, the pair's draft network also runs."""
    network = None if free else pair.drafter
    return OracleDrafter(recorded, right, pair.target.vocab_size, pair.target.device, network)


def engine(pair: Pair, drafter: Drafter | None, setting: str, batch: int) -> Engine:
    """An engine for the pair's target with `batch` slots; a `setting` begins with its tree."""
    tree = setting.split()[0].rstrip(",")
    speculation = None if drafter is None else Speculation(drafter, parse_tree(tree))
    return Engine(pair.target, None, speculation, batch_size=batch)


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def _generated(engine: Engine, requests: Sequence[Request]) -> Row:
    """A run by the engine's counters: sequences decode in parallel, so the longest time is the batch's time."""
    done = engine.generate(requests)
    pooled = Stats()
    for completion in done:
        pooled.merge(completion.stats)
    seconds = max(completion.stats.decode_seconds for completion in done)
    return {
        "tokens/s": pooled.decoded_tokens / seconds,
        "accept length": round(pooled.accept_length, 3),
        "token ids": [completion.token_ids for completion in done],
    }
