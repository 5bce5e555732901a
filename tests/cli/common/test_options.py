"""What an option is called is the same in every verb."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from eyas.cli.app import app

from ...verbs import GROUPS, VERBS


def commands() -> dict[str, Any]:
    """Every verb's command by its name."""
    root: Any = typer.main.get_command(app)
    found = {name: root.get_command(None, name).command for name in VERBS}
    return found | {
        f"{group} {name}": root.get_command(None, group).command.commands[name]
        for group, (_, verbs) in GROUPS.items()
        for name in verbs
    }


COMMANDS = commands()


def options(name: str) -> dict[str, Any]:
    """Each spelling of a verb's options, and the option."""
    return {spelled: each for each in COMMANDS[name].params for spelled in each.opts if spelled.startswith("-")}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_output_and_model_mean_one_thing(name: str) -> None:
    known = options(name)
    if "--json" in known:
        assert known["--json"].is_flag, "writes to standard output; a file is --output's"
    assert ("--output" in known) == ("-o" in known)
    assert "--target" not in known, "the target is --model"
    of_a_folder = name.startswith("learn ")  # which says what the model is
    assert ("--model" in known) or of_a_folder or name in ("demo", "train", "sweep", "cache", "bench report")


@pytest.mark.parametrize("name", ["bench measure", "bench checkpoints", "bench trees", "bench serve"])
def test_measurements_are_written_as_json_to_the_screen_or_a_file(name: str) -> None:
    assert {"--json", "--output", "-o"} <= options(name).keys()
