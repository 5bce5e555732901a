"""A stop by a signal: what is kept, the exit code, and the handlers as they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import typer

from eyas.cli.common.verb import guarded, note_if_interrupted
from eyas.errors import StoppedError


@pytest.fixture(autouse=True)
def _as_from_a_terminal() -> Iterator[None]:
    """A shell ignores Ctrl-C in what it starts in the background, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_message_and_the_code_are_the_signal_s(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(typer.Exit) as caught,
        guarded(debug=False, command="eyas x --y"),
        note_if_interrupted("all is kept"),
    ):
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == 128 + number
    assert capsys.readouterr().err == "stopped: all is kept.\nResume with the same command: eyas x --y\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_says_more_is_left_alone() -> None:
    with pytest.raises(StoppedError, match="step 3"), note_if_interrupted("the rest"):
        raise StoppedError("step 3 is saved", signal.SIGINT)
