"""The command that serves an exported drafter, consumer by consumer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from eyas.interop.plan import chain_length, tree_plan
from eyas.interop.subject import Subject

GGUF_FILE = "drafter.gguf"
TENSORRT_FILE = "trtllm.yaml"
TARGET = "TARGET"
"""Stands for the target where it is not known."""


def command(consumer: str, subject: Subject, place: Path) -> str:
    """What to type; `place` is the exported directory."""
    target = TARGET if subject.serving is None else quote(subject.serving.name)
    return _COMMANDS[consumer](subject, target, str(place))


def _safeailab(subject: Subject, target: str, place: str) -> str:
    plan = tree_plan(subject)
    third = "" if subject.kind.name == "eagle1" else " --use_eagle3"
    return (
        f"python -m eagle.application.webui --base-model-path {target} --ea-model-path {quote(place)}{third} "
        f"--depth {plan.depth} --top-k {plan.width} --total-token {plan.nodes + 1}"
    )


def _sglang(subject: Subject, target: str, place: str) -> str:
    plan = tree_plan(subject)
    algorithm = "EAGLE" if subject.kind.name == "eagle1" else "EAGLE3"
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {quote(place)} --speculative-num-steps {plan.depth} "
        f"--speculative-eagle-topk {plan.width} --speculative-num-draft-tokens {plan.nodes + 1}"
    )


def _vllm(subject: Subject, target: str, place: str) -> str:
    method = "eagle" if subject.kind.name == "eagle1" else "eagle3"
    settings = {"method": method, "model": place, "num_speculative_tokens": chain_length(subject)}
    return f"vllm serve {target} --speculative-config {quote(json.dumps(settings))}"


def _speculators(subject: Subject, target: str, place: str) -> str:  # noqa: ARG001  # its config names the target
    return f"vllm serve {quote(place)}"


def _atom(subject: Subject, target: str, place: str) -> str:
    return (
        f"python -m atom.entrypoints.openai_server --model {target} --method eagle3 --draft-model {quote(place)} "
        f"--num-speculative-tokens {chain_length(subject)}"
    )


def _tensorrt_llm(subject: Subject, target: str, place: str) -> str:  # noqa: ARG001  # in the YAML
    return f"trtllm-serve {target} --backend pytorch --extra_llm_api_options {quote(place + '/' + TENSORRT_FILE)}"


def _gguf(subject: Subject, target: str, place: str) -> str:  # noqa: ARG001  # the target must be GGUF, too
    return (
        f"llama-server -m TARGET.gguf -md {quote(place + '/' + GGUF_FILE)} --spec-type draft-eagle3 "
        f"--spec-draft-n-max {chain_length(subject)} --no-spec-draft-backend-sampling"
    )


_COMMANDS: dict[str, Callable[[Subject, str, str], str]] = {
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
    lines = ["speculative_config:", "  decoding_type: Eagle3", f"  max_draft_len: {chain_length(subject)}"]
    lines.append(f"  speculative_model_dir: {json.dumps(str(place))}")
    if subject.config.taps is not None:
        lines.append(f"  eagle3_layers_to_capture: {[tap - 1 for tap in subject.config.taps]}")
    return "\n".join(lines) + "\n"
