"""Correctness, speed and memory of eyas on a GPU, in one call of nine minutes that resumes where it was cut off.

    make gpu [DEVICE=cpu] [OUTPUT=runs/gpu-cuda] [GPU_PYTHON=python3]

Writes OUTPUT/gpu.json after every step and OUTPUT/gpu.md at the end. Exits with 1 if a step failed or is left to run.
On a CPU everything is tiny: this stand-in only shows that the script works.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from transformers.utils import logging

import eyas
from benchmarks.gpu import kernels, lossless, processes, speed, training
from benchmarks.gpu.pairs import FULL, SMALL, Sizes
from benchmarks.gpu.report import page
from benchmarks.gpu.steps import Results, Step, run_steps
from benchmarks.harness import script
from eyas.bench.machine import describe_machine
from eyas.files import write_text
from eyas.targets.loading import resolve_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def all_steps(sizes: Sizes, device: torch.device) -> list[Step]:
    """All measurements, the most important first."""
    from tests import tiny  # the models that the tests use

    own = [
        Step("kernels", name, partial(measure, sizes, device))
        for name, measure in (("linear layers", kernels.linears), ("passes", kernels.passes))
    ]
    demo = [
        Step("lossless: demo pair", name, partial(lossless.demo_pair, dtype, sizes, device))
        for name, dtype in DTYPES.items()
    ]
    families = [
        Step(f"lossless: {section}", f"{family}, {name}", partial(lossless.family, family, dtype, sizes, device))
        for section, models in {"families": tiny.ARCHITECTURES, "hybrids": tiny.RECURRENT}.items()
        for family in models
        for name, dtype in DTYPES.items()
    ]
    rates = [
        Step(pair, f"batch {batch}", partial(speed.rates, pair, batch, sizes, device), 20)
        for pair in ("random", "wide")
        for batch in sizes.batches
    ]
    rounds = [
        Step("rounds", f"{pair}, batch {batch}", partial(speed.rounds, pair, batch, sizes, device), 10)
        for pair in ("random", "wide")
        for batch in (sizes.batches[0], sizes.batches[-1])
    ]
    trained = [
        Step("training", "objective", partial(training.as_on_cpu, device)),
        Step("training", "step", partial(training.step_time, sizes, device)),
        Step("training", "store to drafter", partial(training.capture_and_train, sizes, device), 20),
    ]
    tests = [
        Step("tests", name, partial(processes.run_tests, files, sizes, device), 20)
        for name, files in processes.TESTS.items()
    ]
    return [own[0], *demo, rates[0], own[1], *families, *rates[1 : len(sizes.batches)], *rounds[:2], *trained, *tests,
            *rates[len(sizes.batches) :], *rounds[2:]]  # fmt: skip


def identity_of(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """The facts that results must share to be in one file."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else describe_machine()["cpu"]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "eyas": eyas.__version__}
    return {"device": name, **versions, "sizes": sizes.name}


def chosen(steps: Sequence[Step], sections: Sequence[str]) -> list[Step]:
    """The steps whose section begins with one of the names; all steps if there are no names."""
    return [step for step in steps if not sections or step.section.startswith(tuple(sections))]


@script
def main(
    *,
    output: Annotated[Path, "the folder of gpu.json and gpu.md"],
    device: str = "cuda",
    budget: Annotated[float, "seconds for the steps, not counting startup"] = 520.0,
    only: Annotated[Sequence[str], "prefixes of the sections to run"] = (),
) -> int:
    """Run the steps that aren't done yet and write the page; returns the exit code."""
    place = resolve_device(device)
    sizes = FULL if place.type == "cuda" else SMALL
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    steps = all_steps(sizes, place)
    results = Results.open(output / "gpu.json", identity_of(sizes, place))
    run_steps(chosen(steps, only), results, budget)
    write_text(output / "gpu.md", page(results, steps) + "\n")
    statuses = [results.status(step) for step in steps]
    failed = statuses.count("failed")
    left = sum(status in (None, "cut") for status in statuses)
    print(f"{statuses.count('done')} steps done, {statuses.count('skipped')} skipped, {failed} failed, {left} left")
    print(f"{output / 'gpu.md'}" + (": run the same command again to go on" if failed or left else ""))
    return int(bool(failed or left))


if __name__ == "__main__":
    raise SystemExit(main())
