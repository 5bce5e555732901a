"""The engines that `eyas serve --engine` starts: where each is installed, and the command that starts it."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from eyas.errors import UsageError
from eyas.interop.export.drafter import TreePlan, plan_of
from eyas.interop.serving.commands import PROGRAMS, ServedDrafter, invocation
from eyas.interop.serving.options import LLAMA_CPP, SGLANG, VLLM, Translator


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

    def plan(self, text: str, option: str) -> TreePlan:
        """The plan for the tree `text`, given in `option`; UsageError if this engine can't draft it."""
        plan = plan_of(text)
        if plan is None or text.count(",") == 3 or (plan.width > 1 and not self.trees):
            able = "chains and dynamic trees of a fixed size" if self.trees else "chains of a fixed size"
            example = "--tree dynamic:5,4,15" if self.trees else "--num-speculative-tokens 5"
            raise UsageError(f"{self.title} drafts only {able}, not {option} {text}: use {example}")
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
    environment, key = {}, []
    if secret is not None and engine.key_variable is not None:
        environment[engine.key_variable] = secret
    elif secret is not None:
        key = engine.translators["api_key"]("api_key", [secret], {})
    argv = [*invocation(engine.consumers[0], target, drafter, program), *engine.extra, *key, *arguments]
    return Command(tuple(argv), environment)
