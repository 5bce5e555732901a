"""The commands that serve a drafter with each consumer, with other engines' flags for target and drafter."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eyas.drafters.kind import DFLASH, DSPARK, EAGLE3, PEAGLE
from eyas.gguf_target import GGUF_SUFFIX
from eyas.interop.export.drafter import DrafterToExport, TreePlan, tree_plan

GGUF_FILE = "drafter.gguf"
TENSORRT_FILE = "trtllm.yaml"
OPENVINO_FOLDER = "openvino"
TARGET = "TARGET"
"""The placeholder for an unknown target in a command."""
_READ_GGUF = ("gguf", "vllm", "sglang")
"""The engines that read targets in GGUF files; others need the checkpoint that the file was made from."""


class ServedDrafter(NamedTuple):
    """The properties of a drafter that a command needs."""

    method: str
    """The engines' name for its method, such as `eagle3`."""
    path: str
    """The drafter's folder, or its file for engines that read one."""
    plan: TreePlan


def command(consumer: str, drafter: DrafterToExport, path: Path) -> str:
    """The shell command that serves an exported drafter, or converts it for OpenVINO; `path`: where it was exported."""
    target = TARGET if drafter.target is None else drafter.target.name
    in_gguf = target.lower().endswith(GGUF_SUFFIX)
    if consumer == "gguf":  # the target must be a GGUF file too
        target = target if in_gguf else f"{TARGET}{GGUF_SUFFIX}"
        path = path / GGUF_FILE
    elif in_gguf and consumer not in _READ_GGUF:
        target = TARGET
    assert drafter.kind.family is not None  # no consumer can represent others
    served = ServedDrafter(drafter.kind.family.method, str(path), tree_plan(drafter))
    line = shlex.join(invocation(consumer, target, served))
    if consumer == "openvino" and drafter.config.taps is not None:
        return f"{line} && {_openvino_taps(drafter, path)}"
    return line


def invocation(
    consumer: str, target: str, drafter: ServedDrafter | None, program: Sequence[str] | None = None
) -> list[str]:
    """A consumer's program, or `program` instead, with the arguments for target and drafter.

    Without a drafter the engine decodes plainly, which is supported only for the engines that eyas starts.
    """
    start = list(program or PROGRAMS[consumer])
    rest = _TARGETS[consumer](target) if drafter is None else _DRAFTING[consumer](target, drafter)
    if consumer == "vllm" and start[-1] != "serve":  # the module takes the target only as an option
        rest = ["--model", *rest]
    return start + rest


PROGRAMS: dict[str, tuple[str, ...]] = {
    "safeailab": ("python", "-m", "eagle.application.webui"),
    "sglang": ("python", "-m", "sglang.launch_server"),
    "vllm": ("vllm", "serve"),
    "speculators": ("vllm", "serve"),
    "atom": ("python", "-m", "atom.entrypoints.openai_server"),
    "tensorrt-llm": ("trtllm-serve",),
    "openvino": ("optimum-cli", "export", "openvino"),
    "gguf": ("llama-server",),
}
_TARGETS: dict[str, Callable[[str], list[str]]] = {
    "sglang": lambda target: ["--model-path", target],
    "vllm": lambda target: [target],
    "gguf": lambda target: ["-m", target],
}


def _safeailab(target: str, drafter: ServedDrafter) -> list[str]:
    depth, width, nodes = drafter.plan
    third = ["--use_eagle3"] if drafter.method == "eagle3" else []
    named = ["--base-model-path", target, "--ea-model-path", drafter.path, *third]
    # another pass drafts the first level, before its loop of --depth passes
    return [*named, "--depth", str(depth - 1), "--top-k", str(width), "--total-token", str(nodes + 1)]


def _sglang(target: str, drafter: ServedDrafter) -> list[str]:
    steps = ("--speculative-num-steps", str(drafter.plan.depth), "--speculative-eagle-topk", str(drafter.plan.width))
    return [
        *_TARGETS["sglang"](target),
        *("--speculative-algorithm", drafter.method.upper()),
        *("--speculative-draft-model-path", drafter.path),
        *(() if drafter.method in (DFLASH.method, DSPARK.method) else steps),  # a block is one step
        *("--speculative-num-draft-tokens", str(drafter.plan.nodes + 1)),
    ]


def vllm_speculation(method: str, path: str, length: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for chains of `length` tokens; P-EAGLE is its EAGLE-3, drafting in parallel."""
    named: dict[str, Any] = {"method": method}
    if method == PEAGLE.method:
        named = {"method": EAGLE3.method, "parallel_drafting": True}
    return named | {"model": path, "num_speculative_tokens": length}


def _vllm(target: str, drafter: ServedDrafter) -> list[str]:
    settings = vllm_speculation(drafter.method, drafter.path, drafter.plan.depth)
    return [*_TARGETS["vllm"](target), "--speculative-config", json.dumps(settings)]


def _speculators(target: str, drafter: ServedDrafter) -> list[str]:  # noqa: ARG001  # its config names the target
    return [drafter.path]


def _atom(target: str, drafter: ServedDrafter) -> list[str]:
    named = ["--model", target, "--method", drafter.method, "--draft-model", drafter.path]
    return [*named, "--num-speculative-tokens", str(drafter.plan.depth)]


def _tensorrt_llm(target: str, drafter: ServedDrafter) -> list[str]:
    return [target, "--backend", "pytorch", "--extra_llm_api_options", f"{drafter.path}/{TENSORRT_FILE}"]


def _openvino(target: str, drafter: ServedDrafter) -> list[str]:  # noqa: ARG001  # given to the library later
    converted = ("--task", "text-generation-with-past", "--trust-remote-code", f"{drafter.path}/{OPENVINO_FOLDER}")
    return ["--model", drafter.path, *converted]


def _openvino_taps(drafter: DrafterToExport, path: Path) -> str:
    """The shell command that writes the boundaries into the converted model, which otherwise uses default ones."""
    boundaries = ", ".join(map(str, drafter.config.taps or ()))
    added = f's|<eagle3_mode.*|&<hidden_layers_list value="{boundaries}" />|'
    return shlex.join(["sed", "-i", added, str(path / OPENVINO_FOLDER / "openvino_model.xml")])


def _gguf(target: str, drafter: ServedDrafter) -> list[str]:
    return [
        *_TARGETS["gguf"](target),
        *("-md", drafter.path, "--spec-type", f"draft-{drafter.method}"),
        *("--spec-draft-n-max", str(drafter.plan.depth)),
        "--no-spec-draft-backend-sampling",  # backend sampling ruins acceptance as soon as two requests run
    ]


_DRAFTING: dict[str, Callable[[str, ServedDrafter], list[str]]] = {
    "safeailab": _safeailab,
    "sglang": _sglang,
    "vllm": _vllm,
    "speculators": _speculators,
    "atom": _atom,
    "tensorrt-llm": _tensorrt_llm,
    "openvino": _openvino,
    "gguf": _gguf,
}


def tensorrt_yaml(drafter: DrafterToExport, path: Path) -> str:
    """TensorRT-LLM's serving configuration for the drafter at `path`; its layer numbers are layer outputs."""
    lines = ["speculative_config:", "  decoding_type: Eagle3", f"  max_draft_len: {tree_plan(drafter).depth}"]
    lines.append(f"  speculative_model_dir: {json.dumps(str(path))}")
    if drafter.config.taps is not None:
        lines.append(f"  eagle3_layers_to_capture: {[tap - 1 for tap in drafter.config.taps]}")
    return "\n".join(lines) + "\n"
