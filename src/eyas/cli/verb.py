"""What makes a function a verb: option groups are spread, errors guarded, a returned number is the exit code."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter
from typing import Any

import typer

from eyas.cli.groups import Given, Spread
from eyas.cli.guard import guarded

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
