"""Messages of the library name parameters; the command line shows the options that set them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from click.testing import Result

from eyas.cli.common.aliases import in_options
from eyas.cli.common.verb import guarded

Run = Callable[..., Result]
_GENERATE = ("generate", "smollm2", "--prompt", "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*_GENERATE, "--method", "ngram", "--draft-window", 8), "--draft-window is for drafters that are networks"),
        ((*_GENERATE, "--method", "suffix", "--draft-quantize", "int8"), "--draft-quantize is for drafters with"),
        ((*_GENERATE, "--quantize", "int8", "--compile"), "which aren't compiled: leave out --compile"),
        ((*_GENERATE, "--draft-model", "auto", "--method", "eagle3"), "leave out --method eagle3, or auto"),
        (("plan", "smollm2", "--samples", 9, "--length", 9, "--machine", "abacus"), "or give --tflops and --bandwidth"),
    ],
)
def test_errors_name_the_options_of_the_command(run: Run, arguments: tuple[object, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "`" not in result.stderr


def test_warnings_name_options_too(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded(debug=False):
        logging.getLogger("eyas").warning("slow: leave out `compiled=`")
    assert capsys.readouterr().err == "warning: slow: leave out --compile\n"


def test_only_parameters_become_options() -> None:
    told = "`max_tokens=5` or `stop_token_ids=`, `eager=`; `messages`, `loop.parallel=ddp` and a=b stay"
    shown = "--max-new-tokens 5 or --stop-token-id, --enforce-eager; `messages`, `loop.parallel=ddp` and a=b stay"
    assert in_options(told) == shown
