"""Option groups: taken apart for the command line, put together for the verb."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer
from typer.testing import CliRunner

from eyas.cli.common.verb import Spread, add_verb


@dataclass(frozen=True)
class Fruit:
    name: Annotated[str, typer.Option(help="Which.")] = field(kw_only=True)
    count: Annotated[int, typer.Option(min=1)] = 2
    marks: Annotated[list[str], typer.Option("--mark")] = field(default_factory=list)


def pick(fruit: Fruit, loud: Annotated[bool, typer.Option("--loud")] = False) -> int:
    """Pick some."""
    typer.echo(f"{fruit} {loud}")
    return fruit.count - 2


def test_a_group_is_its_options() -> None:
    spread = Spread(pick)
    assert set(spread.signature.parameters) == {"name", "count", "marks", "loud"}
    gathered = spread.gather({"name": "fig", "count": 3, "marks": ["a"], "loud": True})
    assert gathered == {"fruit": Fruit(name="fig", count=3, marks=["a"]), "loud": True}


def test_a_verb() -> None:
    app = typer.Typer()
    add_verb(app, "pick", pick)
    add_verb(app, "again", pick)
    run = CliRunner().invoke
    result = run(app, ["pick", "--name", "fig", "--mark", "x", "--mark", "y", "--loud"])
    assert (result.exit_code, result.stdout) == (0, f"{Fruit(name='fig', marks=['x', 'y'])} True\n")
    assert run(app, ["pick", "--name", "fig", "--count", "3"]).exit_code == 1  # the returned number
    assert run(app, ["pick"]).exit_code == 2
    assert "Pick some." in run(app, ["pick", "--help"]).stdout
    assert "--mark" not in run(app, ["again", "--name", "fig"]).stdout
