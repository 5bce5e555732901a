"""The `eyas` command: its verbs, those of other packages among them, and what all of them share.

A verb is a function, whose parameters are its options (`common/verb.py`). A group of verbs is a module: its docstring
is the group's help, `VERBS` its functions by name, and `DEFAULT`, if it has that, the verb that runs if none is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import eyas
from eyas.cli.common.verb import DefaultGroup, add_verb, described, guarded
from eyas.plugins import WHAT, Registry, others

Verb = Callable[..., "int | None"]


def _wrong(_: str, found: Any) -> str | None:
    if isinstance(found, ModuleType):
        verbs = getattr(found, "VERBS", None)
        good = isinstance(verbs, Mapping) and all(map(callable, verbs.values())) and len(verbs) > 0
        return None if good else "its module has no VERBS, which maps names to functions"
    return None if callable(found) else f"it is a {type(found).__name__}, neither a function nor a module"


VERBS: Registry[Verb | ModuleType] = Registry(
    "eyas.verbs",
    {
        "demo": "eyas.cli.decode.demo:demo",
        "generate": "eyas.cli.decode.generate:generate",
        "chat": "eyas.cli.decode.chat:chat",
        "serve": "eyas.cli.serve.serve:serve",
        "verify": "eyas.cli.decode.verify:verify",
        "inspect": "eyas.cli.drafter.inspect:inspect",
        "doctor": "eyas.cli.drafter.doctor:doctor",
        "export": "eyas.cli.drafter.export:export",
        "push": "eyas.cli.drafter.push:push",
        "plan": "eyas.cli.train.plan:plan",
        "pipeline": "eyas.cli.train.pipeline:pipeline",
        "train": "eyas.cli.train.train:train",
        "cache": "eyas.cli.cache:cache",
        "data": "eyas.cli.data.verbs",
        "bench": "eyas.cli.bench.verbs",
    },
    _wrong,
)
"""All verbs and groups of verbs, in the order of `--help`. Other packages' verbs are entry points `eyas.verbs`."""


def _typer(name: str, text: str, *, completion: bool = False) -> typer.Typer:
    return typer.Typer(
        name=name,
        help=text,
        no_args_is_help=True,
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def command_of(name: str, found: Verb | ModuleType) -> Any:
    """The command that runs a verb or one of a group of verbs."""
    if not isinstance(found, ModuleType):
        alone = _typer(name, "")
        add_verb(alone, name, found)
        return typer.main.get_command(alone)
    verbs = dict(found.VERBS)
    default = getattr(found, "DEFAULT", None)
    if default is not None:  # the first, for `DefaultGroup`
        verbs = {default: verbs[default], **verbs}
    part = _typer(name, (found.__doc__ or "").strip())
    for verb, function in verbs.items():
        add_verb(part, verb, function)
    part.info.cls = TyperGroup if default is None else DefaultGroup
    return typer.main.get_group(part)


class DeferredCommand(TyperCommand):
    """A verb or group that is imported when it is run. Until then its line of help is read from its file."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._named = name

    @cached_property
    def command(self) -> Any:
        """The command itself. Raises PluginError."""
        return command_of(self._named, VERBS[self._named])

    def get_short_help_str(self, limit: int = 45) -> str:
        plugin, *further = VERBS.claims(self._named)
        text = described(plugin.docstring())[0]
        if further:
            text = f"Brought by {' and by '.join(each.package for each in (plugin, *further))}: uninstall one."
        return TyperCommand(self._named, help=text or f"A verb of {plugin.package}.").get_short_help_str(limit)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with guarded(debug=parent is not None and bool(parent.obj)):
            command = self.command
        return command.make_context(info_name, args, parent, **extra)


class Verbs(TyperGroup):
    """All verbs. Other packages' metadata is read only for a name that isn't one of eyas's own, and for `--help`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands.update({name: DeferredCommand(name) for name in VERBS.own})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_plugins()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_plugins()
        return super().list_commands(ctx)

    def _add_plugins(self) -> None:
        self.commands = {name: self.commands.get(name) or DeferredCommand(name) for name in VERBS}


app = _typer(
    "eyas", "Lossless speculative decoding with EAGLE drafters: decode, check, measure, train.", completion=True
)
app.info.cls = Verbs


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eyas {eyas.__version__}")
        for plugin in others():
            typer.echo(f"  {plugin.package} {plugin.version}: {WHAT[plugin.group]} {plugin.name}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[  # noqa: ARG001  # its callback handles it, before a missing verb is an error
        bool,
        typer.Option(
            "--version",
            help="Print the version, what other packages add, and exit.",
            is_eager=True,
            callback=_show_version,
        ),
    ] = False,
) -> None:
    ctx.obj = debug


def main() -> None:
    """Run the command line of this process: the entry point of `eyas` and `python -m eyas`."""
    app(prog_name="eyas")
