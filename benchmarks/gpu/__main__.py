"""Correctness, speed and memory of eyas on a GPU, in one call of nine minutes that resumes where it was cut off.

    make gpu [DEVICE=cpu] [OUTPUT=runs/gpu-cuda] [GPU_PYTHON=python3]

Writes OUTPUT/gpu.json after every step and OUTPUT/gpu.md at the end. Exits with 1 if a step failed or is left to run.
On a CPU everything is tiny: this stand-in only shows that the script works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from transformers.utils import logging

import eyas
from benchmarks.gpu import kernels, lossless, processes, smollm2, speed, training
from benchmarks.gpu.pairs import FULL, SMALL, Sizes
from benchmarks.gpu.report import page
from benchmarks.gpu.steps import Results, Step, run_steps
from benchmarks.harness import script
from eyas.bench.machine import describe_machine
from eyas.files import write_text
from eyas.targets.loading import resolve_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FIRST = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "olmo2")
"""Families that are run early: those with passes in Triton that many models are of."""
DATA = Path("../shared/data")


def all_steps(sizes: Sizes, device: torch.device, data: Path) -> list[Step]:
    """All measurements, the most important first."""
    from tests import tiny  # the models that the tests use

    def demo(dtype: str) -> Step:
        return Step("lossless: demo pair", dtype, partial(lossless.demo_pair, DTYPES[dtype], sizes, device))

    def families(names: Iterable[str], dtype: str) -> list[Step]:
        return [
            Step(
                "lossless: hybrids" if name in tiny.RECURRENT else "lossless: families",
                f"{name}, {dtype}",
                partial(lossless.family, name, DTYPES[dtype], sizes, device),
            )
            for name in names
        ]

    def rates(pair: str, batches: Iterable[int]) -> list[Step]:
        measured = ((batch, partial(speed.rates, pair, batch, sizes, device)) for batch in batches)
        return [Step(pair, f"batch {batch}", measure, 20, 90) for batch, measure in measured]

    def rounds(pair: str) -> list[Step]:
        few = (sizes.batches[0], sizes.batches[-1])
        return [
            Step("rounds", f"{pair}, batch {batch}", partial(speed.rounds, pair, batch, sizes, device), 10)
            for batch in few
        ]

    own = {
        name: Step("kernels", name, partial(measure, sizes, device))
        for name, measure in (
            ("linear layers", kernels.linears),
            ("passes", kernels.passes),
            ("prompts", kernels.prompts),
        )
    }
    auto = [
        Step(
            "SmolLM2",
            f"{name}, {how}",
            partial(smollm2.auto, data / "eval" / f"{name}.jsonl", how, sizes, device),
            10,
            90,
        )
        for how in smollm2.KERNELS
        for name in smollm2.SETS
    ]
    trained = [
        Step("training", "objective", partial(training.as_on_cpu, device)),
        Step("training", "step", partial(training.step_time, sizes, device)),
        Step("training", "store to drafter", partial(training.capture_and_train, sizes, device), 20),
    ]
    tests = [
        Step("tests", name, partial(processes.run_tests, files, sizes, device), 20, 120)
        for name, files in processes.TESTS.items()
    ]
    others = [name for name in (*tiny.ARCHITECTURES, *tiny.RECURRENT) if name not in FIRST]
    return [
        own["linear layers"],
        demo("bfloat16"),
        *rates("random", sizes.batches[:1]),
        own["passes"],
        auto[0],
        *families(FIRST, "bfloat16"),
        *rates("int4", sizes.batches[:1]),
        *rates("random", sizes.batches[1:]),
        own["prompts"],
        *rounds("random"),
        *rates("modules", sizes.batches[:1]),
        *auto[1:],
        *trained,
        *tests,
        *families(others, "bfloat16"),
        demo("float32"),
        *families((*FIRST, *others), "float32"),
        *rates("wide", sizes.batches),
        *rounds("wide"),
    ]


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
    data: Annotated[Path, "the folder of eval/*.jsonl, the prompts of SmolLM2"] = DATA,
) -> int:
    """Run the steps that aren't done yet and write the page; returns the exit code."""
    place = resolve_device(device)
    sizes = FULL if place.type == "cuda" else SMALL
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    steps = all_steps(sizes, place, data)
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
