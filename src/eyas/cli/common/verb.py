"""Turns a function into a verb: options are parsed and gathered into groups, errors become exit codes.

A group is a dataclass of `Annotated` fields that stands for its options, so that verbs share them without copies:

    def generate(target: TargetPanel, json: bool = False) -> None: ...

becomes a command with every option of `TargetPanel`, and is called with the reassembled group. `--help` shows a group
under its `PANEL`, after the options that most people need, those in `COMMON`; those in `EXPERT` come last. It ends with
the commands after `Examples:` in the verb's docstring, which `tests/test_docs.py` parses. Exit codes: 0 = success, 1 =
failure, 2 = usage, 130 = interrupted (143: terminated); a verb may return one.
"""

from __future__ import annotations

import logging
import shlex
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from textwrap import indent, wrap
from typing import Annotated, Any, ClassVar, NamedTuple, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from eyas.assets import SMOLLM2
from eyas.cli.common.aliases import EPILOG, REFUSED, Aliases, option_name
from eyas.cli.common.display import note
from eyas.errors import VALUE_ERROR, EyasError, StoppedError, UsageError
from eyas.gguf_target import GGUF_SUFFIX
from eyas.plugins import FEATURES
from eyas.runtime import LOADING

FAILURE = 1
USAGE = 2
INTERRUPTED = 130
_ARGUMENTS = "eyas.arguments"
"""The key of a context's metadata for the arguments as given."""

_CONTEXT = Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)
COMMON = (
    "prompt", "prompt_file", "raw", "suffix", "prediction", "system", "max_new_tokens", "temperature", "seed",
    "draft_model", "method", "tree", "num_speculative_tokens", "host", "port", "api_key", "batch_size", "limit",
)  # fmt: skip
"""Options that `--help` lists first, in this order, if a verb has groups and more than `UNGROUPED` options."""
EXPERT = (
    "draft_weights", "ignore_config_key", "draft_window", "coupled", "acceptance", "costs", "attention", "compile",
    "enforce_eager", "kernels", "warmup", "min_p", "min_tokens", "stop_token_id",
)  # fmt: skip
"""Options that `--help` lists last."""
UNGROUPED = 12
TITLES = (
    "Arguments", "Common", "Options", "Sampling", "Speculation", "", "Target", "Another engine", "Output", "Expert",
)  # fmt: skip
"""The order of titles in `--help`; all other titles come where the empty one is."""
_ParseError: type[Exception] = typer.BadParameter.__bases__[0]  # the parser's own, wherever typer gets it from


class Feature(NamedTuple):
    """In a parameter's annotation: its group of options is a plug-in, the feature of this name; None if there is none.

    Such as `learns: Annotated[LearnGroup | None, Feature("learn")]`.
    """

    name: str


class GivenOptions(frozenset[str]):
    """Names of the options that were given rather than left at their defaults; a parameter of this type gets them."""


def add_verb(app: typer.Typer, name: str, function: Callable[..., int | None]) -> None:
    """Register `function` as `eyas NAME`; its docstring is the help."""
    spread = OptionGroups(function)

    def command(ctx: typer.Context, **values: Any) -> None:
        with guarded(debug=bool(ctx.obj), command=shlex.join([*ctx.command_path.split(), *ctx.meta[_ARGUMENTS]])):
            code = function(**spread.gather(values, _given(ctx, values)))
        if code:
            raise typer.Exit(code)

    parameters = [_CONTEXT, *spread.signature.parameters.values()]
    command.__signature__ = spread.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    text, examples = described(getdoc(function) or "")
    verb = type("Verb", (VerbCommand,), {"examples": examples, "needed": spread.needed})
    app.command(name, cls=verb, help=text, epilog=EPILOG if spread.has_aliases else None)(command)


def described(docstring: str) -> tuple[str, tuple[str, ...]]:
    """A verb's help, and its examples: the commands after `Examples:` in its docstring, one a line."""
    text, _, examples = docstring.partition("\nExamples:\n")
    return text, tuple(line.strip() for line in examples.splitlines() if line.strip())


def _given(ctx: typer.Context, values: Mapping[str, Any]) -> GivenOptions:
    """Options on the command line or from an environment variable."""
    sources = {name: ctx.get_parameter_source(name) for name in values}
    return GivenOptions(
        name for name, source in sources.items() if source is not None and not source.name.startswith("DEFAULT")
    )


class VerbCommand(TyperCommand):
    """A command that says what to do instead of giving another engine's option, or a prompt without --prompt."""

    examples: ClassVar[tuple[str, ...]] = ()
    """Commands that `--help` shows."""
    needed: ClassVar[frozenset[str]] = frozenset()
    """Arguments that are required although the parser lets them pass, because an option may be given instead."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """As the parser does it, with required arguments bare, whatever its release."""
        pieces = (piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx))
        return [piece.strip("[]") if piece.strip("[]") in self.needed else piece for piece in pieces]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except _ParseError as error:
            name = getattr(error, "option_name", "")
            if name in REFUSED:  # its message, with advice instead of similar options
                vars(error).update(message=f"No such option: {name}; {REFUSED[name]}", possibilities=None)
            elif "unexpected extra argument" in str(error) and any(each.name == "prompt" for each in self.params):
                vars(error).update(message=f"{error}; give the text to answer with --prompt, in quotes")
            elif (message := str(getattr(error, "message", ""))).startswith(VALUE_ERROR):  # some releases of the parser
                vars(error).update(message=message.removeprefix(VALUE_ERROR))
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of all options; if there are many, the common ones first, then group by group."""
        shown = [(each, record) for each in self.get_params(ctx) if (record := each.get_help_record(ctx)) is not None]
        grouped = len(shown) > UNGROUPED and any(getattr(each, "rich_help_panel", None) for each, _ in shown)
        sections: dict[str, list[Any]] = {}
        if grouped:
            shown.sort(key=lambda pair: COMMON.index(pair[0].name) if pair[0].name in COMMON else len(COMMON))
        shown.sort(key=lambda pair: pair[0].name in EXPERT or pair[0].name == "help")
        for param, record in shown:
            title = (getattr(param, "rich_help_panel", None) if grouped else None) or "Options"
            if param.param_type_name == "argument":
                title = "Arguments"
                if record[0].split()[0] in self.needed:
                    record = (record[0], f"{record[1]}  [required]")
            elif grouped and param.name in COMMON:
                title = "Common"
            elif grouped and param.name in EXPERT:
                title = "Expert"
            elif grouped and param.name == "help":
                title = "Output"
            sections.setdefault(title, []).append(record)
        for title in sorted(sections, key=lambda title: TITLES.index(title if title in TITLES else "")):
            with formatter.section(title):
                formatter.write_dl(sections[title])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples so that they can be copied, long ones continued, then what goes for several verbs."""
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    width = formatter.width - formatter.current_indent - 2
                    lines = wrap(example, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
                    formatter.write(indent(" \\\n".join(lines), " " * formatter.current_indent) + "\n")
        super().format_epilog(ctx, formatter)


class DefaultGroup(TyperGroup):
    """A group of verbs that runs its first verb if none is named: `eyas bench ...` is `eyas bench measure ...`.

    `--help` alone lists the verbs. Otherwise that holds if the first argument is an option, a path, a Hub id, a GGUF
    file or `smollm2`, or a folder that isn't named like a verb; a mistyped verb is reported as one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        verbs = self.list_commands(ctx)
        if args[:1] == ["--help"] or (not args and ctx.resilient_parsing):  # the latter for shell completion
            return super().parse_args(ctx, args)
        if not args or args[0].startswith("-") or _is_model(args[0], verbs):
            args = [verbs[0], *args]
        return super().parse_args(ctx, args)


def _is_model(argument: str, verbs: Sequence[str]) -> bool:
    named = "/" in argument or argument == SMOLLM2 or argument.lower().endswith(GGUF_SUFFIX)
    return named or (argument not in verbs and Path(argument).is_dir())


class OptionGroups:
    """A function's signature with its option groups expanded; `gather` reassembles them.

    A group may set `ALIASES` to an `Aliases` class: further options that stand for options of the group.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._groups: dict[str, type[Any]] = {}
        self._given: str | None = None
        self._absent: list[str] = []
        parameters: list[Parameter] = []
        # not get_type_hints, which before Python 3.11 wraps the hint of a parameter that defaults to None
        for name, parameter in signature(function, eval_str=True).parameters.items():
            hint = _plugged(parameter.annotation)
            if hint is GivenOptions:
                self._given = name
            elif hint is None:
                self._absent.append(name)
            elif isinstance(hint, type) and is_dataclass(hint):
                self._groups[name] = hint
                parameters += _options(hint)
            else:
                parameters.append(_keyword(name, parameter.default, hint))
        self.signature = Signature(parameters)

    @property
    def needed(self) -> frozenset[str]:
        """The arguments by which an alias sets a required option."""
        aliases = ((group, _aliases(group)) for group in self._groups.values())
        return frozenset(
            get_type_hints(alias, include_extras=True)[name].__metadata__[0].metavar
            for group, alias in aliases
            if alias is not None
            for name in alias.arguments
            if any(_default(field) is Parameter.empty for field in fields(group) if field.name == alias.arguments[name])
        )

    @property
    def has_aliases(self) -> bool:
        """Whether any group has aliases."""
        return any(_aliases(group) is not None for group in self._groups.values())

    def gather(self, values: Mapping[str, Any], given: GivenOptions | None = None) -> dict[str, Any]:
        """The function's arguments from the options' values; `given` names the options that were given.

        Raises UsageError if an alias contradicts the option it stands for, or if a required option is missing.
        """
        rest = dict(values)
        named = set(given or ())
        for group in self._groups.values():
            aliases = _aliases(group)
            if aliases is not None:
                _resolve(aliases(**{field.name: rest.pop(field.name) for field in fields(aliases)}), rest, named)
                _check_required(group, aliases, rest)
        groups = {
            name: group(**{field.name: rest.pop(field.name) for field in fields(group)})
            for name, group in self._groups.items()
        }
        given_names = {} if self._given is None else {self._given: GivenOptions(named)}
        return rest | groups | dict.fromkeys(self._absent) | given_names


def _resolve(aliases: Aliases, values: dict[str, Any], given: set[str]) -> None:
    """Give options the values that their aliases stand for."""
    for spelled, options in aliases.meaning():
        for name, value in options.items():
            if name in given and values[name] != value:
                raise UsageError(
                    f"{spelled} means {option_name(name)} {value}, and {values[name]} was given as well: leave one out"
                )
            values[name] = value
            given.add(name)


def _check_required(group: type[Any], aliases: type[Aliases], values: Mapping[str, Any]) -> None:
    """Reject missing options that the parser let pass because an alias might have set them."""
    for field in fields(group):
        if _default(field) is Parameter.empty and values[field.name] is None:
            raise UsageError(aliases.required[field.name])


def _aliases(group: type[Any]) -> type[Aliases] | None:
    return getattr(group, "ALIASES", None)


def _options(group: type[Any]) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    panel = getattr(group, "PANEL", None)
    own = [_keyword(field.name, _default(field), _titled(hints[field.name], panel)) for field in fields(group)]
    aliases = _aliases(group)
    if aliases is None:
        return own
    own = [each.replace(default=None) if each.default is Parameter.empty else each for each in own]
    return [*_options(aliases), *own]


def _titled(hint: Any, panel: str | None) -> Any:
    """The annotation with `panel` as its option's title in `--help`, unless it has one already."""
    if panel is None or hint.__metadata__[0].rich_help_panel:
        return hint
    option = copy(hint.__metadata__[0])
    option.rich_help_panel = panel
    return Annotated[hint.__origin__, option]


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return Parameter.empty if field.default_factory is MISSING else field.default_factory()


def _plugged(hint: Any) -> Any:
    """The annotation; for a feature, the group that it is, or None if it isn't there."""
    named = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Feature)]
    return FEATURES.get(named[0].name) if named else hint


def _keyword(name: str, default: Any, hint: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


@contextmanager
def note_if_interrupted(what: str) -> Iterator[None]:
    """If Ctrl-C or SIGTERM ends the block, say what is kept: an independent clause, such as `2 shards are finished`."""
    caught = signal.SIGINT

    def terminate(number: int, _: Any) -> None:
        nonlocal caught
        caught = signal.Signals(number)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if main else None
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(f"stopped: {what}", caught) from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def guarded(debug: bool, command: str = "") -> Iterator[None]:
    """Turn errors into messages and exit codes; a traceback is shown only with `debug`.

    `command` is the command line that was run; after a signal, the message says to run it again to resume.
    """
    log = logging.getLogger("eyas")
    warnings = _Warnings(logging.WARNING)
    progress = _Progress()
    log.addHandler(warnings)
    LOADING.addHandler(progress)
    LOADING.setLevel(logging.INFO)
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except StoppedError as error:
        _report(f"{error}.\nResume with the same command: {command}", debug)
        raise typer.Exit(128 + error.signal_number) from None
    except EyasError as error:
        _report(f"error: {error}", debug)
        raise typer.Exit(USAGE if isinstance(error, UsageError) else FAILURE) from None
    except Exception as error:  # noqa: BLE001  # the outermost handler
        first = (str(error).strip() or "no message").splitlines()[0]
        _report(f"unexpected {type(error).__name__}: {first} (run with --debug: `eyas --debug ...`)", debug)
        raise typer.Exit(FAILURE) from None
    finally:
        log.removeHandler(warnings)
        LOADING.removeHandler(progress)
        LOADING.setLevel(logging.NOTSET)


class _Warnings(logging.Handler):
    """Writes the library's log records to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname.lower()}: {record.getMessage()}")


class _Progress(logging.Handler):
    """Writes what a first load does to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"  {record.getMessage()}")


def _report(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    note(message)
