"""The `eyas` command and its verbs."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import eyas
from eyas.cli.bench.bench import bench
from eyas.cli.bench.checkpoints import checkpoints
from eyas.cli.bench.report import report
from eyas.cli.bench.serve import serve as bench_serve
from eyas.cli.bench.trees import trees
from eyas.cli.common.guard import guarded
from eyas.cli.common.options import Given, Spread
from eyas.cli.data.capture import capture as data_capture
from eyas.cli.data.prepare import prepare as data_prepare
from eyas.cli.data.regenerate import regenerate as data_regenerate
from eyas.cli.decode.chat import chat
from eyas.cli.decode.demo import demo
from eyas.cli.decode.generate import generate
from eyas.cli.decode.verify import verify
from eyas.cli.drafter.doctor import doctor
from eyas.cli.drafter.export import export
from eyas.cli.drafter.inspect import inspect
from eyas.cli.serve.serve import serve
from eyas.cli.train.plan import plan
from eyas.cli.train.sweep import sweep
from eyas.cli.train.train import train

# A verb group that is also a verb: where no verb of it is named, its first one is meant.


class DefaultGroup(TyperGroup):
    """`eyas bench --model ...` is `eyas bench measure --model ...`, help included.

    Only what begins with a dash goes to the first verb, so a mistyped verb is still reported as one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0].startswith("-"):
            args = [self.list_commands(ctx)[0], *args]
        return super().parse_args(ctx, args)


# What makes a function a verb: option groups are spread, errors guarded, a returned number is the exit code.


_CONTEXT = Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)


def add_verb(app: typer.Typer, name: str, function: Callable[..., int | None]) -> None:
    """Register `function` as `eyas NAME`; its docstring is the help."""
    spread = Spread(function)

    def command(ctx: typer.Context, **values: Any) -> None:
        with guarded(debug=bool(ctx.obj)):
            code = function(**spread.gather(values, _given(ctx, values)))
        if code:
            raise typer.Exit(code)

    parameters = [_CONTEXT, *spread.signature.parameters.values()]
    command.__signature__ = spread.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=function.__doc__)(command)


def _given(ctx: typer.Context, values: dict[str, Any]) -> Given:
    """On the command line or by an environment variable."""
    sources = {name: ctx.get_parameter_source(name) for name in values}
    return Given(
        name for name, source in sources.items() if source is not None and not source.name.startswith("DEFAULT")
    )


VERBS: dict[str, Callable[..., int | None]] = {
    "demo": demo,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "verify": verify,
    "inspect": inspect,
    "doctor": doctor,
    "export": export,
    "plan": plan,
    "train": train,
    "sweep": sweep,
}

# group -> its help and its verbs
GROUPS: dict[str, tuple[str, dict[str, Callable[..., int | None]]]] = {
    "data": (
        "From chats to what a drafter is trained on.",
        {"prepare": data_prepare, "regenerate": data_regenerate, "capture": data_capture},
    ),
    "bench": (
        "Measure: methods, a run's checkpoints, draft trees, servers under load; report.",
        {"measure": bench, "checkpoints": checkpoints, "trees": trees, "serve": bench_serve, "report": report},
    ),
}
# groups whose first verb is meant where none is named
DEFAULTED = {"bench"}


def _typer(name: str, text: str) -> typer.Typer:
    return typer.Typer(
        name=name,
        help=text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


app = _typer("eyas", "Lossless speculative decoding with EAGLE drafters: decode, check, measure, train.")
for _name, _function in VERBS.items():
    add_verb(app, _name, _function)
for _group, (_text, _verbs) in GROUPS.items():
    _part = _typer(_group, _text)
    for _name, _function in _verbs.items():
        add_verb(_part, _name, _function)
    app.add_typer(_part, cls=DefaultGroup if _group in DEFAULTED else TyperGroup)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eyas {eyas.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[  # noqa: ARG001  # its callback does it, before a missing verb is an error
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    ctx.obj = debug


def main() -> None:
    """The entry point."""
    app(prog_name="eyas")
