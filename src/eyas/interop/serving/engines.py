"""The engines that `eyas serve --engine` starts: how each is found, and the command for it."""

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
from eyas.interop.serving.options import LLAMA_CPP, SGLANG, VLLM, Words


@dataclass(frozen=True)
class ServingEngine:
    """Another engine's server."""

    name: str
    title: str
    consumers: tuple[str, ...]
    """Whose drafters it reads; the first is what is exported for it."""
    words: Mapping[str, Words]
    module: str | None = None
    """What to import where it is a package of this Python."""
    server: str = ""
    """The module that is the server."""
    extra: tuple[str, ...] = ()
    """Arguments that make it tell what speculation does."""
    trees: bool = False
    """Does it draft trees?"""
    key_variable: str | None = None
    """The environment variable that it takes its key from."""

    def find(self) -> list[str] | None:
        """How to start the one that is installed; None if none is."""
        package = None if self.module is None else find_spec(self.module)
        if package is not None and package.origin is not None:  # a mere folder of that name has none
            return [sys.executable, "-m", self.server]
        program = PROGRAMS[self.consumers[0]]
        return None if program[0] == "python" or shutil.which(program[0]) is None else list(program)

    def plan(self, text: str, option: str) -> TreePlan:
        """A tree that was asked for, as this engine drafts it. UsageError if it can't."""
        plan = plan_of(text)
        if plan is None or text.count(",") == 3 or (plan.width > 1 and not self.trees):
            able = "chains and dynamic trees without a threshold" if self.trees else "chains"
            example = "--tree dynamic:5,4,15" if self.trees else "--num-speculative-tokens 5"
            raise UsageError(f"{self.title} drafts {able} of a fixed size only, not {option} {text}: say {example}")
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
    """A program with its arguments, and what is added to its environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def text(self, hidden: Mapping[str, str]) -> str:
        """What to type in a shell; `hidden`: secret -> the variable that is written in its place."""
        set_first = [f"{name}={_shown(value, hidden)}" for name, value in self.environment.items()]
        return " ".join([*set_first, *(_shown(part, hidden) for part in self.argv)])


def _shown(part: str, hidden: Mapping[str, str]) -> str:
    return f'"${hidden[part]}"' if part in hidden else shlex.quote(part)


def serve_command(
    engine: ServingEngine,
    program: Sequence[str] | None,
    target: str,
    drafter: ServedDrafter | None,
    said: Sequence[str],
    secret: str | None = None,
) -> Command:
    """The whole command. `said`: the other arguments; `secret`: a key, put where a list of processes shows it least."""
    environment, key = {}, []
    if secret is not None and engine.key_variable is not None:
        environment[engine.key_variable] = secret
    elif secret is not None:
        key = engine.words["api_key"]("api_key", [secret], {})
    argv = [*invocation(engine.consumers[0], target, drafter, program), *engine.extra, *key, *said]
    return Command(tuple(argv), environment)
