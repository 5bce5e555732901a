"""`eyas serve --engine`: another engine's server, started in this process's place or printed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

import typer
from typer import Option

from eyas.cli.common.aliases import option_name
from eyas.cli.common.build import hide_progress_bars, tree_text
from eyas.cli.common.display import note
from eyas.cli.common.options import DraftOptions, EngineArguments, EngineCommand, TargetPanel
from eyas.cli.common.verb import FAILURE
from eyas.drafters.options import AUTO
from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.interop.export.drafter import ServedTarget
    from eyas.interop.serving.commands import ServedDrafter
    from eyas.interop.serving.engines import Command, ServingEngine

OWN_ENGINE = "eyas"
OWN_OPTIONS = ("model", "draft_model", "method", "num_speculative_tokens", "tree", "draft_weights", "ignore_config_key")
"""Options that are handled here; the others are translated for the engine."""


@dataclass(frozen=True)
class EnginePanel:
    """Which engine serves, and how another one is started."""

    PANEL: ClassVar[str] = "Another engine"
    engine: Annotated[str, Option(help="eyas, vllm, sglang or llama.cpp.")] = OWN_ENGINE
    print_command: Annotated[bool, Option("--print-command", help="Print another engine's command, don't run it.")] = (
        False
    )
    engine_command: EngineCommand = None
    engine_option: EngineArguments = field(default_factory=list)
    export_to: Annotated[
        Path | None, Option(file_okay=False, help="Where to export the drafter if the engine can't read it as it is.")
    ] = None
    export_target: Annotated[
        str | None, Option(help="With --export-to and llama.cpp: the target in transformers' format.")
    ] = None


def refuse_engine_options(options: EnginePanel) -> None:
    """Refuse options about other engines where eyas itself serves."""
    given = [each.name for each in fields(options) if each.name != "engine" and getattr(options, each.name)]
    if given:
        names = ", ".join(map(option_name, given))
        raise UsageError(f"{names}: about other engines; say which with --engine vllm, sglang or llama.cpp")


def serve_elsewhere(
    options: EnginePanel,
    target: TargetPanel,
    draft: DraftOptions,
    requested: Mapping[str, Any],
    secret: tuple[str, str] | None,
) -> int:
    """Become the engine's server; if it isn't installed, print its command and return exit code 1.

    `requested`: the options that were given; `secret`: an environment variable with an API key, and that key.
    """
    if draft.draft_model == AUTO:
        raise UsageError(f"--draft-model {AUTO} is for eyas's own engine: name the drafter")
    environment = dict(os.environ)  # before libraries add variables that aren't meant for the engine
    hide_progress_bars()
    from eyas.hub import target_as_file
    from eyas.interop.serving.engines import ENGINES, serve_command, translated
    from eyas.interop.serving.speculation import read_gguf_target

    if options.engine not in ENGINES:
        raise UsageError(f"unknown engine {options.engine!r}: write {OWN_ENGINE}, {', '.join(ENGINES)}")
    engine = ENGINES[options.engine]
    name = target_as_file(target.model)
    rest = {key: value for key, value in requested.items() if key not in OWN_OPTIONS}
    program = engine.find() if options.engine_command is None else shlex.split(options.engine_command)
    # refused options are reported before a drafter is read or exported
    arguments = [*translated(engine.title, engine.translators, rest), *options.engine_option]
    drafter = _served_drafter(engine, options, name, draft)
    if drafter is None and engine.name == "llama.cpp":
        read_gguf_target(name)
    command = serve_command(engine, program, name, drafter, arguments, None if secret is None else secret[1])
    missing = _missing(engine, program)
    if options.print_command or missing is not None:
        typer.echo(command.text({} if secret is None else {secret[1]: secret[0]}))
    if options.print_command:
        return 0
    if missing is not None:
        note(f"{missing}; this is its command")
        return FAILURE
    replace_process(command, environment)


def _missing(engine: ServingEngine, program: Sequence[str] | None) -> str | None:
    """Why the engine can't be started; None if it can."""
    if program is None:
        return f"{engine.title} isn't installed here (if it is elsewhere, give --engine-command)"
    if not program or shutil.which(program[0]) is None:
        return f"there is no program {' '.join(program) or 'in --engine-command'!r}"
    return None


def replace_process(command: Command, environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the server, so that signals reach it and its exit code is this process's."""
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python; the server gets the defaults
        signal.signal(ignored, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command.argv[0], command.argv, {**environment, **command.environment})


def _served_drafter(
    engine: ServingEngine, options: EnginePanel, model: str, draft: DraftOptions
) -> ServedDrafter | None:
    """The drafter as the engine will serve it, exported if necessary; None for plain decoding."""
    from eyas.drafters.loading import local_directory
    from eyas.interop.serving.speculation import SpeculationRequest, served_drafter

    tree = _checked_tree(draft)
    if draft.draft_model is None:
        if options.export_to is not None:
            raise UsageError("--export-to is about a drafter: give --draft-model")
        return None
    path = local_directory(draft.draft_model)
    reads = options.export_target
    if engine.name != "llama.cpp":
        if reads is not None:
            raise UsageError("--export-target is for llama.cpp, whose target is a GGUF file: leave it out")
        reads = model
    elif (reads is None) != (options.export_to is None):
        raise UsageError("for llama.cpp --export-to and --export-target MODEL belong together: the target's tokenizer "
                         "goes into the drafter's file")  # fmt: skip

    def load_target() -> ServedTarget:
        from eyas.cli.drafter.served_target import served_target

        return served_target(str(reads), path, None, draft)

    return served_drafter(
        engine,
        SpeculationRequest(
            path,
            draft.draft_model,
            model,
            None if reads is None else load_target,
            draft.method,
            tree,
            "tree" if draft.num_speculative_tokens is None else "num_speculative_tokens",
            options.export_to,
            draft.draft_weights,
            tuple(draft.ignore_config_key),
        ),
    )


def _checked_tree(draft: DraftOptions) -> str | None:
    """The spec of the tree to draft, or None for the drafter's own; UsageError if it is misspelled."""
    from eyas.tree import parse_tree

    text = tree_text(draft)
    if text is not None and not text.startswith("auto"):
        parse_tree(text)
    return text
