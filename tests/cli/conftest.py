"""Verbs run in this process, with a tiny pair that is saved once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from eyas.cli.app import app

from ..pairs import Pair, save_drafter, save_target

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("pair")
    return Pair(save_target(path / "model"), save_drafter(path / "drafter"))


@pytest.fixture(scope="session")
def run() -> Run:
    """Run `eyas ARGUMENTS`, which must never end with an unhandled exception."""

    def call(*arguments: Any, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return call


@pytest.fixture
def decode(run: Run, pair: Pair) -> Run:
    """Run `eyas generate` with the pair for 8 tokens."""

    def call(*arguments: Any) -> Result:
        drafting = () if "none" in arguments else ("--draft-model", pair.drafter)
        return run("generate", "--model", pair.model, *drafting, "--max-new-tokens", 8, *arguments)

    return call
