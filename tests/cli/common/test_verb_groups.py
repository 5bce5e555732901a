"""Option groups: taken apart for the command line, put together for the verb."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from eyas.cli.app import app as eyas_app
from eyas.cli.common.verb import OptionGroups, add_verb


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
    spread = OptionGroups(pick)
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


def sections(*words: str) -> dict[str, list[str]]:
    """Title -> the first names of its options in the help of a verb, on a terminal of 80 columns."""
    shown = CliRunner().invoke(eyas_app, [*words, "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80
    parts = re.split(r"^(\w[\w ]*):\n", shown, flags=re.MULTILINE)[1:]
    return {
        title: re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_help_begins_with_what_most_people_need() -> None:
    found = sections("generate")
    assert list(found) == ["Arguments", "Common", "Sampling", "Speculation", "Target", "Output", "Expert", "Examples"]
    assert found["Common"] == [
        "--prompt", "--prompt-file", "--raw", "--suffix", "--prediction", "--max-new-tokens", "--temperature", "--seed",
        "--draft-model", "--method", "--tree", "--num-speculative-tokens", "--batch-size",
    ]  # fmt: skip
    assert "--top-p" in found["Sampling"]
    assert "--draft-quantize" in found["Speculation"]
    assert "--acceptance" in found["Expert"]
    assert "--dtype" in found["Target"]
    assert found["Output"] == ["--json", "--help"]


def test_help_without_groups_keeps_the_order_of_the_options() -> None:
    options = sections("plan")["Options"]
    assert options[:2] == ["--model", "--samples"]
    assert options[-1] == "--help"


@pytest.mark.parametrize(
    "verb", [["generate"], ["chat"], ["verify"], ["serve"], ["bench", "measure"], ["bench", "trees"]]
)
def test_help_shows_every_option_once(verb: list[str]) -> None:
    found = sections(*verb)
    assert list(found)[:2] == ["Arguments", "Common"]
    assert max(map(len, found.values())) <= 20
    names = [name for options in found.values() for name in options]
    assert len(names) == len(set(names))
    command = typer.main.get_command(eyas_app)
    for word in verb:
        command = command.commands[word]
        command = getattr(command, "command", command)  # verbs are imported when they are run
    every = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    assert {name for each in every for name in each.opts[:1] if name.startswith("--")} <= set(names) | {"-n"}
    assert len(names) == len(every) + 1  # --help


def test_the_help_of_a_small_verb_has_no_groups() -> None:
    for verb in ("train", "inspect", "plan"):
        assert list(sections(verb)) == ["Arguments", "Options", "Examples"]
