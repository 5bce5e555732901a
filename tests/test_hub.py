"""Where a model is: the disk first, then the Hub, asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

import eyas.hub
from eyas.drafters.loading import local_directory
from eyas.errors import MissingModelError, ModelError
from eyas.hub import find_model, find_target
from eyas.targets.loading import read_config, resolve_dtype
from eyas.targets.tokenizers import load_tokenizer

from .pairs import save_target

Hub = Callable[[Exception | None], list[str]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """`hub(error)`: what the Hub answers, None if it has the model; the list holds what it was asked for."""
    asked: list[str] = []

    def answers(error: Exception | None) -> list[str]:
        def ask(url: str, **_: object) -> None:
            asked.append(url)
            if error is not None:
                raise error

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
        return asked

    eyas.hub._on_hub.cache_clear()
    yield answers
    eyas.hub._on_hub.cache_clear()


def missing() -> RepositoryNotFoundError:
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    error.args = ("404",)
    return error


def test_what_is_on_the_disk_is_taken_from_there(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(None)
    (tmp_path / "mine").mkdir()
    assert find_model(tmp_path / "mine") == str(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/mine") == str(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert find_model("mine") == "mine"
    assert not asked


@pytest.mark.parametrize("name", ["./mien", "../x/mien", "/no/such/mien", "~/mien", "runs/mien", "a/b/mien", "mien/"])
def test_a_missing_path_is_a_missing_path(name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(None)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingModelError, match=f"there is no {name}: ") as caught:
        find_model(name)
    assert not asked
    assert ("did you mean runs/mine?" in str(caught.value)) == (name == "runs/mien")


def test_the_hub_is_asked_once(hub: Hub) -> None:
    asked = hub(None)
    assert {find_model("owner/name") for _ in range(5)} == {"owner/name"}
    assert len(asked) == 1
    assert asked[0].endswith("owner/name/resolve/main/config.json")


def test_a_model_that_the_hub_does_not_have(hub: Hub) -> None:
    hub(missing())
    with pytest.raises(MissingModelError, match="there is no owner/name: no such folder here, and no such model"):
        find_model("owner/name")


def test_no_hub_id_at_all(hub: Hub) -> None:
    hub(None)
    with pytest.raises(MissingModelError, match="nor a Hub id"):
        find_model("owner/na me")


@pytest.mark.parametrize("error", [OfflineModeIsEnabled("offline"), ConnectionError("no route"), TimeoutError("slow")])
def test_without_the_hub_its_cache_is_read(
    error: Exception, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a folder: config, tokenizer and weights are read from there, and nothing else is asked for."""
    asked = hub(error)
    with pytest.raises(ModelError, match=r"owner/name .*check the name and the network"):
        find_model("owner/name")
    assert len(asked) == 1
    folder = save_target(tmp_path)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(folder / "config.json"))
    assert find_model("owner/name") == str(folder)
    assert read_config(find_target("owner/name")).model_type == "llama"
    assert len(load_tokenizer("owner/name")) > 0
    assert resolve_dtype("float32", "owner/name") is not None
    assert local_directory("owner/name") == folder
    assert len(asked) == 2  # again after a failure, never again once it was found
