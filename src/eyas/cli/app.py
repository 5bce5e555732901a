"""The `eyas` command: its verbs, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from typer.core import TyperGroup

import eyas
from eyas.cli.bench.accuracy import accuracy
from eyas.cli.bench.bench import bench
from eyas.cli.bench.checkpoints import checkpoints
from eyas.cli.bench.methods import methods
from eyas.cli.bench.report import report
from eyas.cli.bench.serve import serve as bench_serve
from eyas.cli.bench.trees import trees
from eyas.cli.cache import cache
from eyas.cli.common.verb import DefaultGroup, add_verb
from eyas.cli.data.capture import capture as data_capture
from eyas.cli.data.prepare import prepare as data_prepare
from eyas.cli.data.regenerate import regenerate as data_regenerate
from eyas.cli.data.synthesize import synthesize as data_synthesize
from eyas.cli.decode.chat import chat
from eyas.cli.decode.demo import demo
from eyas.cli.decode.generate import generate
from eyas.cli.decode.verify import verify
from eyas.cli.drafter.doctor import doctor
from eyas.cli.drafter.export import export
from eyas.cli.drafter.inspect import inspect
from eyas.cli.drafter.push import push
from eyas.cli.learn.learn import pin, promote, revert, run, status
from eyas.cli.serve.serve import serve
from eyas.cli.train.pipeline import pipeline
from eyas.cli.train.plan import plan
from eyas.cli.train.sweep import sweep
from eyas.cli.train.train import train

VERBS: dict[str, Callable[..., int | None]] = {
    "demo": demo,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "verify": verify,
    "inspect": inspect,
    "doctor": doctor,
    "export": export,
    "push": push,
    "plan": plan,
    "pipeline": pipeline,
    "train": train,
    "sweep": sweep,
    "cache": cache,
}

GROUPS: dict[str, tuple[str, dict[str, Callable[..., int | None]]]] = {
    "data": (
        "Make training data: chats, answers, hidden states.",
        {
            "synthesize": data_synthesize,
            "prepare": data_prepare,
            "regenerate": data_regenerate,
            "capture": data_capture,
        },
    ),
    "learn": (
        "A drafter that learns from the traffic it serves.",
        {"run": run, "status": status, "promote": promote, "revert": revert, "pin": pin},
    ),
    "bench": (
        "Measure drafters, methods, answers, checkpoints, trees, servers.",
        {
            "measure": bench,
            "methods": methods,
            "accuracy": accuracy,
            "checkpoints": checkpoints,
            "trees": trees,
            "serve": bench_serve,
            "report": report,
        },
    ),
}
"""Group -> its help and its verbs."""
DEFAULTED = {"bench"}
"""Groups that run their first verb if none is named."""


def _typer(name: str, text: str, *, completion: bool = False) -> typer.Typer:
    return typer.Typer(
        name=name,
        help=text,
        no_args_is_help=True,
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


app = _typer(
    "eyas", "Lossless speculative decoding with EAGLE drafters: decode, check, measure, train.", completion=True
)
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
    version: Annotated[  # noqa: ARG001  # its callback handles it, before a missing verb is an error
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    ctx.obj = debug


def main() -> None:
    """Run the command line of this process: the entry point of `eyas` and `python -m eyas`."""
    app(prog_name="eyas")
