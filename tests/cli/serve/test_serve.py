"""`eyas serve` before it serves: options, their page, what is refused."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from eyas.cli.common.options import DraftOptions, TargetPanel
from eyas.cli.serve.elsewhere import EnginePanel
from eyas.cli.serve.serve import CapacityOptions, ServerOptions, _load, _with_defaults
from eyas.errors import UsageError

from ...toy.pair import TOY_DRAFTER, TOY_TARGET

Run = Callable[..., Result]
PAGE = Path(__file__).parents[3] / "docs" / "serve.md"


def test_every_option_is_on_the_page_with_its_default() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    rows = [row for row in rows if row.count("|") == 4]  # the tables of options, not the one of other engines' words
    for group in (ServerOptions, CapacityOptions, EnginePanel):
        for field in fields(group):
            flag = "--" + field.name.replace("_", "-")
            (row,) = [row for row in rows if f"`{flag}`" in row.split("|")[1]]
            if isinstance(field.default, int | float | str) and field.default:
                default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
                assert default in row.split("|")[2].replace("`", "").replace(",", "").split()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "none", "--tree", "chain:2"], "--tree would be ignored"),
        (["--tree", "chain:2"], "needs a drafter"),
        (["--draft-model", TOY_DRAFTER, "--num-speculative-tokens", "2", "--tree", "auto"], "give one of them"),
        (["--log-format", "xml"], "'xml' is not one of"),
        (["--port", "70000"], "--port"),
        (["--max-running", "0"], "--max-running"),
        (["--seed", "-1"], "--seed"),
        (["--ssl-certfile", "nowhere.pem"], "does not exist"),
        (["--chat-template", "nowhere.jinja"], "does not exist"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(run: Run, options: list[Any], message: str) -> None:
    result = run("serve", "--model", "nowhere", "--port", 0, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_context_beyond_the_models_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(Exception):  # noqa: N818  # it is what should happen
        """The model would be loaded."""

    def open_engine(*_: Any, **__: Any) -> Any:
        raise Opened

    monkeypatch.setattr("eyas.cli.serve.serve.open_engine", open_engine)
    target = TargetPanel(model=TOY_TARGET)
    with pytest.raises(UsageError, match=r"--max-model-len 999999999 is more than .* context of 2048 tokens"):
        _load(target, DraftOptions(), CapacityOptions(max_model_len=999999999))
    for fits in (2048, 100, None):
        with pytest.raises(Opened):
            _load(target, DraftOptions(), CapacityOptions(max_model_len=fits))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--root-path", "eyas"], "--root-path eyas: write the beginning of a URL's path, such as /eyas"),
        (["--root-path", "/a?b"], "--root-path /a?b"),
        (["--ssl-keyfile", __file__], "needs its certificate: give --ssl-certfile"),
        (["--ssl-certfile", __file__], "give a PEM certificate and the unencrypted key"),
    ],
)
def test_settings_of_a_server_are_refused_before_it_listens(run: Run, options: list[Any], message: str) -> None:
    result = run("serve", "--model", TOY_TARGET, "--port", 0, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_address_that_is_taken_is_told(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--model", TOY_TARGET, "--port", port)
    assert result.exit_code == 2
    assert f"can't listen on 127.0.0.1:{port}" in result.stderr


def test_how_memory_is_kept_is_settled_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[str] = []
    for name in ("keep_freed_memory", "keep_few_kernels"):
        monkeypatch.setattr(f"eyas.cli.serve.serve.{name}", lambda name=name: settled.append(name))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run("serve", "--model", TOY_TARGET, "--port", taken.getsockname()[1])
    assert settled == ["keep_freed_memory", "keep_few_kernels"]


def test_a_server_without_a_drafter_drafts_predictions_unless_it_is_told_not_to() -> None:
    found = _with_defaults(DraftOptions())
    assert (found.method, found.tree) == ("prediction", "auto")
    assert _with_defaults(DraftOptions(method="none")) == DraftOptions(method="none")


@pytest.mark.parametrize(("device", "method"), [("cpu", "+suffix"), ("cuda", None)])
def test_on_a_cpu_a_draft_model_is_joined_by_copies(
    monkeypatch: pytest.MonkeyPatch, device: str, method: str | None
) -> None:
    class Opened(Exception):  # noqa: N818  # it is what should happen
        """The model would be loaded."""

    def open_engine(_: TargetPanel, draft: DraftOptions, **__: Any) -> Any:
        raise Opened(draft.method)

    monkeypatch.setattr("eyas.cli.serve.serve.open_engine", open_engine)
    monkeypatch.setattr("eyas.targets.loading.resolve_device", lambda _: torch.device(device))
    for adds, found in ((True, method), (False, None)):
        with pytest.raises(Opened) as opened:
            _load(
                TargetPanel(model=TOY_TARGET), DraftOptions(draft_model=str(TOY_DRAFTER)), CapacityOptions(), None, adds
            )
        assert opened.value.args == (found,)
