"""SmolLM2-135M with its drafter: `auto` against plain decoding, on the sets of prompts that figures on a CPU are of."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from benchmarks.gpu.pairs import Sizes
from benchmarks.gpu.steps import Outcome, Row, Skipped
from benchmarks.harness import paired
from eyas.assets import SMOLLM2
from eyas.bench.offline.runner import PLAIN, Plan, measure, read_tasks
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine
from eyas.errors import ModelError, UsageError
from eyas.options import EngineOptions, TargetOptions
from eyas.session import Session
from eyas.targets.triton import why_unusable
from eyas.types import SamplingParams

SETS = ("gsm8k", "humaneval", "mt_bench", "edits")
KERNELS = ("triton", "modules")
AUTO = "auto"
PROMPTS = 4
"""Prompts of a set."""
LEAST = {"gsm8k": 1.9}
"""Speedups that are asked for; of other sets 0.98."""


def auto(file: Path, how: str, sizes: Sizes, device: torch.device) -> Outcome:
    """Tokens/s on the first prompts of a set; wrong if an answer is another, which kernels in Triton rule out."""
    if not file.is_file():
        raise Skipped(f"there is no {file}: give --data")
    engines = _engines(how, device)
    (task,) = read_tasks([file], 1, PROMPTS)
    found = measure(task, engines, SamplingParams(max_tokens=sizes.answers * 2), Plan(repeats=2, warmup=1))
    rows: list[Row] = []
    for name, result in found.items():
        row: Row = {"setting": name, "tokens/s": round(result.stats.tokens_per_second, 1)}
        row |= {"accept length": round(result.stats.accept_length, 2), "same": f"{result.same} of {result.answers}"}
        rows.append(row | paired(result.ratios, [1.0] * len(result.ratios)))
    wrong = list(task.errors)
    if how == "triton" and not found[AUTO].identical:
        wrong.append("speculation gives other answers than plain decoding")
    if device.type != "cpu" and rows[-1]["median"] < LEAST.get(file.stem, 0.98):
        wrong.append(f"auto is {rows[-1]['median']} times as fast as plain decoding")
    return Outcome(rows, wrong)


@lru_cache(maxsize=1)
def _engines(how: str, device: torch.device) -> dict[str, Engine]:
    """Engines that decode plainly and with `auto`."""
    unusable = why_unusable(device) if how == "triton" else None
    if unusable is not None:
        raise Skipped(unusable)
    kernels = "triton" if how == "triton" else None
    try:
        session = Session.open(TargetOptions(SMOLLM2, device=device, kernels=kernels))
    except (ModelError, UsageError) as error:  # the model's package isn't installed
        raise Skipped(str(error)) from error
    drafter = session.drafter(DrafterOptions(SMOLLM2))
    return {PLAIN: session.engine(), AUTO: session.engine(drafter, EngineOptions(tree=AUTO))}
