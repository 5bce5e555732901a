"""The command that serves a drafter, consumer by consumer: the one place where other engines' flags are written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from eyas.interop.export.subject import Subject, TreePlan, tree_plan

GGUF_FILE = "drafter.gguf"
TENSORRT_FILE = "trtllm.yaml"
TARGET = "TARGET"
"""Stands for the target where it is not known."""


class Drafting(NamedTuple):
    """What a command says of a drafter."""

    kind: str
    place: str
    """The directory, or the file where that is what is read."""
    plan: TreePlan

    @property
    def method(self) -> str:
        """The generation, in the words of the field."""
        return "eagle" if self.kind == "eagle1" else "eagle3"


def command(consumer: str, subject: Subject, place: Path) -> str:
    """What to type; `place` is the exported directory."""
    target = TARGET if subject.serving is None else subject.serving.name
    if consumer == "gguf":  # the target must be GGUF, too
        target, place = f"{TARGET}.gguf", place / GGUF_FILE
    drafting = Drafting(subject.kind.name, str(place), tree_plan(subject))
    return shlex.join(invocation(consumer, target, drafting))


def invocation(
    consumer: str, target: str, drafting: Drafting | None, program: Sequence[str] | None = None
) -> list[str]:
    """The program, by its usual name or another, and what it is told of target and drafter.

    Without drafting, for the engines that eyas starts, it decodes plainly.
    """
    start = list(program or PROGRAMS[consumer])
    rest = _TARGETS[consumer](target) if drafting is None else _DRAFTING[consumer](target, drafting)
    if consumer == "vllm" and start[-1] != "serve":  # run as a module, it takes no target but by name
        rest = ["--model", *rest]
    return start + rest


PROGRAMS: dict[str, tuple[str, ...]] = {
    "safeailab": ("python", "-m", "eagle.application.webui"),
    "sglang": ("python", "-m", "sglang.launch_server"),
    "vllm": ("vllm", "serve"),
    "speculators": ("vllm", "serve"),
    "atom": ("python", "-m", "atom.entrypoints.openai_server"),
    "tensorrt-llm": ("trtllm-serve",),
    "gguf": ("llama-server",),
}
_TARGETS: dict[str, Callable[[str], list[str]]] = {
    "sglang": lambda target: ["--model-path", target],
    "vllm": lambda target: [target],
    "gguf": lambda target: ["-m", target],
}


def _safeailab(target: str, drafting: Drafting) -> list[str]:
    depth, width, nodes = map(str, drafting.plan)
    third = [] if drafting.kind == "eagle1" else ["--use_eagle3"]
    named = ["--base-model-path", target, "--ea-model-path", drafting.place, *third]
    return [*named, "--depth", depth, "--top-k", width, "--total-token", str(int(nodes) + 1)]


def _sglang(target: str, drafting: Drafting) -> list[str]:
    return [
        *_TARGETS["sglang"](target),
        *("--speculative-algorithm", drafting.method.upper()),
        *("--speculative-draft-model-path", drafting.place),
        *("--speculative-num-steps", str(drafting.plan.depth)),
        *("--speculative-eagle-topk", str(drafting.plan.width)),
        *("--speculative-num-draft-tokens", str(drafting.plan.nodes + 1)),
    ]


def _vllm(target: str, drafting: Drafting) -> list[str]:
    length = drafting.plan.depth
    settings = {"method": drafting.method, "model": drafting.place, "num_speculative_tokens": length}
    return [*_TARGETS["vllm"](target), "--speculative-config", json.dumps(settings)]


def _speculators(target: str, drafting: Drafting) -> list[str]:  # noqa: ARG001  # its config names the target
    return [drafting.place]


def _atom(target: str, drafting: Drafting) -> list[str]:
    named = ["--model", target, "--method", drafting.method, "--draft-model", drafting.place]
    return [*named, "--num-speculative-tokens", str(drafting.plan.depth)]


def _tensorrt_llm(target: str, drafting: Drafting) -> list[str]:
    return [target, "--backend", "pytorch", "--extra_llm_api_options", f"{drafting.place}/{TENSORRT_FILE}"]


def _gguf(target: str, drafting: Drafting) -> list[str]:
    return [
        *_TARGETS["gguf"](target),
        *("-md", drafting.place, "--spec-type", "draft-eagle3"),
        *("--spec-draft-n-max", str(drafting.plan.depth)),
        "--no-spec-draft-backend-sampling",  # with it acceptance collapses as soon as two requests run
    ]


_DRAFTING: dict[str, Callable[[str, Drafting], list[str]]] = {
    "safeailab": _safeailab,
    "sglang": _sglang,
    "vllm": _vllm,
    "speculators": _speculators,
    "atom": _atom,
    "tensorrt-llm": _tensorrt_llm,
    "gguf": _gguf,
}


def tensorrt_yaml(subject: Subject, place: Path) -> str:
    """TensorRT-LLM's serving configuration: layer numbers are outputs, a set, there."""
    lines = ["speculative_config:", "  decoding_type: Eagle3", f"  max_draft_len: {tree_plan(subject).depth}"]
    lines.append(f"  speculative_model_dir: {json.dumps(str(place))}")
    if subject.config.taps is not None:
        lines.append(f"  eagle3_layers_to_capture: {[tap - 1 for tap in subject.config.taps]}")
    return "\n".join(lines) + "\n"
