"""The engines that `eyas serve --engine` starts: where each is installed, its command, its arguments.

Options without a counterpart are refused by name, never ignored. Flags are those of vLLM 0.32, SGLang's main branch of
2026-09, and the llama.cpp in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from eyas.errors import UsageError
from eyas.interop.export.drafter import TreePlan, plan_of
from eyas.interop.serving.commands import PROGRAMS, ServedDrafter, invocation

Options = Mapping[str, Any]
"""The options given by the user: name in Python -> value."""
Translator = Callable[[str, Any, Options], list[str]]
"""Translates one option: (name, value, all given options) -> arguments. Raises UsageError."""


def _one(flag: str) -> Translator:
    return lambda _name, value, _given: [flag, str(value)]


def _many(flag: str) -> Translator:
    return lambda _name, values, _given: [flag, *values]


def _joined(flag: str) -> Translator:
    return lambda _name, values, _given: [flag, ",".join(values)]


def _single(flag: str) -> Translator:
    def translate(name: str, values: list[str], _given: Options) -> list[str]:
        if len(values) > 1:
            raise UsageError(f"this engine takes only one `{name}=`: remove the others")
        return [flag, *values]

    return translate


def _choice(choices: Mapping[Any, list[str]]) -> Translator:
    """A translator for an option if the engine supports only some of its values."""

    def translate(name: str, value: Any, _given: Options) -> list[str]:
        if value not in choices:
            known = " or ".join(f"`{name}={each}`" for each in choices)
            raise UsageError(f"this engine has no counterpart to `{name}={value}`, only to {known}")
        return choices[value]

    return translate


def _port(_name: str, value: int, _given: Options) -> list[str]:
    if value == 0:
        raise UsageError("`port=0` isn't possible with another engine: give a port")
    return ["--port", str(value)]


def _vllm_waiting(_name: str, value: int, given: Options) -> list[str]:
    """Translate to vLLM's limit, which is for running and waiting requests together."""
    if "max_running" not in given:
        raise UsageError("`max_waiting=` also needs `max_running=`: vLLM limits running and waiting requests together")
    return ["--max-num-queued-reqs", str(value + given["max_running"])]


def _sglang_device(_name: str, value: str, _given: Options) -> list[str]:
    kind, _, number = value.partition(":")
    return ["--device", kind, *(["--base-gpu-id", number] if number else [])]


def _llama_device(_name: str, value: str, _given: Options) -> list[str]:
    kind, _, number = value.partition(":")
    return ["--device", "none" if kind == "cpu" else f"{kind.upper()}{number or 0}"]


def _llama_length(_name: str, value: int, given: Options) -> list[str]:
    """Translate to llama.cpp's limit for each slot; without `--ctx-size`, its pool holds all slots at that limit."""
    pool = [] if "max_cached_tokens" in given else ["--kv-unified"]
    return [*pool, "--kv-unified-per-slot", str(value)]


_EVERYWHERE: dict[str, Translator] = {"host": _one("--host"), "port": _port, "log_format": _choice({"text": []})}
VLLM: dict[str, Translator] = _EVERYWHERE | {
    "api_key": _many("--api-key"),
    "chat_template": _one("--chat-template"),
    "reasoning_parser": _one("--reasoning-parser"),
    "root_path": _one("--root-path"),
    "seed": _one("--seed"),
    "ssl_certfile": _one("--ssl-certfile"),
    "ssl_keyfile": _one("--ssl-keyfile"),
    "served_model_name": _many("--served-model-name"),
    "allow_origin": lambda _name, origins, _given: ["--allowed-origins", json.dumps(origins)],
    "per_request_spec_decode_metrics": _one("--per-request-spec-decode-metrics"),
    "otlp_traces_endpoint": _one("--otlp-traces-endpoint"),
    "drain_seconds": lambda _name, seconds, _given: ["--shutdown-timeout", str(math.ceil(seconds))],
    "dtype": _one("--dtype"),
    "enforce_eager": lambda _name, _value, _given: ["--enforce-eager"],
    "max_running": _one("--max-num-seqs"),
    "max_waiting": _vllm_waiting,
    "max_model_len": _one("--max-model-len"),
    "prefix_tokens": _choice({0: ["--no-enable-prefix-caching"]}),
    "prefill_chunk": _one("--max-num-batched-tokens"),
}
SGLANG: dict[str, Translator] = _EVERYWHERE | {
    "api_key": _single("--api-key"),
    "chat_template": _one("--chat-template"),
    "reasoning_parser": _one("--reasoning-parser"),
    "root_path": _one("--fastapi-root-path"),
    "seed": _one("--random-seed"),
    "log_level": _one("--log-level"),
    "served_model_name": _single("--served-model-name"),
    "dtype": _one("--dtype"),
    "device": _sglang_device,
    "compile": lambda _name, _value, _given: ["--enable-torch-compile"],
    "enforce_eager": lambda _name, _value, _given: ["--disable-cuda-graph"],
    "max_running": _one("--max-running-requests"),
    "max_waiting": _one("--max-queued-requests"),
    "max_model_len": _one("--context-length"),
    "max_cached_tokens": _one("--max-total-tokens"),
    "prefix_tokens": _choice({0: ["--disable-radix-cache"]}),
    "prefill_chunk": _one("--chunked-prefill-size"),
}
LLAMA_CPP: dict[str, Translator] = _EVERYWHERE | {
    "api_key": _joined("--api-key"),
    "chat_template": lambda _name, file, _given: ["--jinja", "--chat-template-file", str(file)],
    "seed": _one("--seed"),
    "ssl_certfile": _one("--ssl-cert-file"),
    "ssl_keyfile": _one("--ssl-key-file"),
    "served_model_name": _joined("--alias"),
    "allow_origin": _joined("--cors-origins"),
    "device": _llama_device,
    "attention": _choice({"sdpa": ["--flash-attn", "on"], "eager": ["--flash-attn", "off"]}),
    "kv_cache_dtype": _choice({"auto": [], "int8": ["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]}),
    "max_running": _one("--parallel"),
    "max_model_len": _llama_length,
    "max_cached_tokens": lambda _name, value, _given: ["--kv-unified", "--ctx-size", str(value)],
    "prefix_tokens": _choice({0: ["--no-cache-prompt"]}),
    "prefill_chunk": _one("--batch-size"),
    "log_format": _choice({"text": [], "json": ["--log-jsonl"]}),
}


def translated(engine: str, translators: Mapping[str, Translator], given: Options) -> list[str]:
    """The arguments for all given options; UsageError, naming them, if any have no counterpart."""
    unknown = [f"`{name}=`" for name in given if name not in translators]
    if unknown:
        raise UsageError(
            f"{engine} has no counterpart to {', '.join(unknown)}: remove it, or give the engine's own option with "
            "`engine_option=`"
        )
    return [part for name, value in given.items() for part in translators[name](name, value, given)]


@dataclass(frozen=True)
class ServingEngine:
    """Another engine whose server eyas can start."""

    name: str
    title: str
    """Its name as its authors spell it."""
    consumers: tuple[str, ...]
    """The names of the consumers whose forms it reads; drafters are exported in the form of the first."""
    translators: Mapping[str, Translator]
    """Option of `eyas serve` -> its translation into the engine's arguments."""
    module: str | None = None
    """The Python package to look for; None = the engine is only a program."""
    server: str = ""
    """The module that runs the server."""
    extra: tuple[str, ...] = ()
    """Arguments that make it publish metrics of speculation."""
    trees: bool = False
    """Whether it can draft trees as well as chains."""
    key_variable: str | None = None
    """The environment variable from which it reads its API key; None = it takes the key only as an argument."""

    def find(self) -> list[str] | None:
        """The command that starts the installed engine; None if it isn't installed."""
        package = None if self.module is None else find_spec(self.module)
        if package is not None and package.origin is not None:  # a mere folder of that name has no origin
            return [sys.executable, "-m", self.server]
        program = PROGRAMS[self.consumers[0]]
        return None if program[0] == "python" or shutil.which(program[0]) is None else list(program)

    def plan(self, text: str, parameter: str) -> TreePlan:
        """The plan for the tree `text`, given as `parameter`; UsageError if this engine can't draft it."""
        plan = plan_of(text)
        if plan is None or text.count(",") == 3 or (plan.width > 1 and not self.trees):
            able = "chains and dynamic trees of a fixed size" if self.trees else "chains of a fixed size"
            example = "`tree=dynamic:5,4,15`" if self.trees else "`num_speculative_tokens=5`"
            raise UsageError(f"{self.title} drafts only {able}, not `{parameter}={text}`: use {example}")
        return plan


_ALL = (
    ServingEngine("vllm", "vLLM", ("vllm", "speculators"), VLLM, "vllm", "vllm.entrypoints.openai.api_server",
                  key_variable="VLLM_API_KEY"),
    ServingEngine("sglang", "SGLang", ("sglang",), SGLANG, "sglang", "sglang.launch_server", ("--enable-metrics",),
                  trees=True),
    ServingEngine("llama.cpp", "llama.cpp", ("gguf",), LLAMA_CPP, extra=("--metrics",), key_variable="LLAMA_API_KEY"),
)  # fmt: skip
ENGINES: dict[str, ServingEngine] = {engine.name: engine for engine in _ALL}


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and variables to add to its environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def text(self, hidden: Mapping[str, str]) -> str:
        """The shell command; `hidden` maps secrets to the names of variables that are shown instead."""
        assignments = [f"{name}={_shown(value, hidden)}" for name, value in self.environment.items()]
        return " ".join([*assignments, *(_shown(part, hidden) for part in self.argv)])


def _shown(part: str, hidden: Mapping[str, str]) -> str:
    return f'"${hidden[part]}"' if part in hidden else shlex.quote(part)


def serve_command(
    engine: ServingEngine,
    program: Sequence[str] | None,
    target: str,
    drafter: ServedDrafter | None,
    arguments: Sequence[str],
    secret: str | None = None,
) -> Command:
    """The complete command, with `arguments` at the end.

    `secret` is an API key. It is passed in the environment if the engine supports that, because process lists show
    arguments to everybody.
    """
    environment = {}
    key = []
    if secret is not None and engine.key_variable is not None:
        environment[engine.key_variable] = secret
    elif secret is not None:
        key = engine.translators["api_key"]("api_key", [secret], {})
    argv = [*invocation(engine.consumers[0], target, drafter, program), *engine.extra, *key, *arguments]
    return Command(tuple(argv), environment)
