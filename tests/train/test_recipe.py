"""Recipe files: sections, overrides, and values on top of those of other files."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import SafetensorError

from eyas.errors import CheckpointError, ConfigError, LockedError
from eyas.files import FileLock
from eyas.recipes import read_recipe
from eyas.train import recipe as recipes
from eyas.train.recipe import load_recipe, run_recipe

from ..toy.pair import TOY_TARGET

DRAFTER: dict[str, Any] = {"target": str(TOY_TARGET), "chats": "c.jsonl", "output": "run", "loop": {"steps": 5}}


def write(path: Path, **values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return path


def test_overrides_reach_and_typos_do_not(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", drafter=DRAFTER)
    recipe = load_recipe(path, ["drafter.loop.steps=7"])
    assert recipe.drafter is not None
    assert recipe.drafter.loop.steps == 7
    with pytest.raises(ConfigError, match=r"drafter\.loop\.step:"):
        load_recipe(path, ["drafter.loop.step=7"])
    with pytest.raises(ConfigError, match="must look like key=value"):
        load_recipe(path, ["drafter.loop.steps"])


def test_two_runs_never_share_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.yaml", drafter=DRAFTER | {"output": str(tmp_path / "run")})
    begun: list[str] = []

    def train_meanwhile(_: object) -> None:
        begun.append("first")
        monkeypatch.setattr(recipes, "train_drafter", lambda _: begun.append("second"))
        with pytest.raises(LockedError, match=r"another process is writing .*run: wait for it, or choose another"):
            run_recipe(load_recipe(path))

    monkeypatch.setattr(recipes, "train_drafter", train_meanwhile)
    run_recipe(load_recipe(path))
    assert begun == ["first"]
    run_recipe(load_recipe(path))
    assert begun == ["first", "second"]
    monkeypatch.setenv("RANK", "1")  # the first process of a run locks it for all
    with FileLock(tmp_path / "run"):
        run_recipe(load_recipe(path))
    assert begun == ["first", "second", "second"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_wherever_a_run_writes(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also outside the loop: in `config.yaml`, in checkpoints, in the last copy."""

    def fill(_: object) -> None:
        raise error

    monkeypatch.setattr(recipes, "train_drafter", fill)
    path = write(tmp_path / "r.yaml", drafter=DRAFTER | {"output": str(tmp_path / "run")})
    with pytest.raises(CheckpointError, match=r"the disk that holds .*/run is full .*free some space and run the same"):
        run_recipe(load_recipe(path))


@pytest.mark.parametrize("sections", [{}, {"drafter": DRAFTER, "lm": {}}])
def test_a_recipe_has_one_section(tmp_path: Path, sections: dict[str, Any]) -> None:
    if sections:
        sections["lm"] = {"output": "o", "corpus": {"chats": "c"}, "loop": {"steps": 1}}
    with pytest.raises(ConfigError, match="one section"):
        load_recipe(write(tmp_path / "r.yaml", **sections))


def test_a_recipe_replaces_values_of_those_it_extends(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", drafter={**DRAFTER, "shape": {"taps": [1, 2, 3], "layers": 2}})
    write(tmp_path / "deep" / "sizes.yaml", drafter={"loop": {"steps": None, "epochs": 2}, "shape": {"taps": [4]}})
    path = write(tmp_path / "deep" / "r.yaml", extends=["../base.yaml", "sizes.yaml"], drafter={"shape": {"layers": 3}})
    assert read_recipe(path) == {
        "drafter": {**DRAFTER, "shape": {"taps": [4], "layers": 3}, "loop": {"steps": None, "epochs": 2}}
    }
    recipe = load_recipe(path, ["drafter.shape.layers=1"]).drafter
    assert recipe is not None
    assert (recipe.shape.layers, recipe.shape.taps, recipe.loop.epochs) == (1, (4,), 2)
    single = write(tmp_path / "single.yaml", extends="deep/r.yaml")
    assert read_recipe(single) == read_recipe(path)


def test_extending_in_a_circle_or_something_else_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", extends="b.yaml")
    path = write(tmp_path / "b.yaml", extends="a.yaml")
    with pytest.raises(ConfigError, match="extends itself"):
        read_recipe(path)
    with pytest.raises(ConfigError, match=r"there is no file there.yaml, and no recipe of that name"):
        read_recipe(write(tmp_path / "c.yaml", extends="there.yaml"))
    with pytest.raises(ConfigError, match="a file or a list of files, not 3"):
        read_recipe(write(tmp_path / "d.yaml", extends=3))


@pytest.mark.parametrize("loop", [{}, {"steps": 3, "epochs": 1.5}])
def test_a_loop_has_steps_or_epochs(tmp_path: Path, loop: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"either steps or epochs; .* loop\.epochs=null loop\.steps=300"):
        load_recipe(write(tmp_path / "r.yaml", drafter={**DRAFTER, "loop": loop}))


def test_a_target_from_text_counts_steps(tmp_path: Path) -> None:
    section = {"output": "o", "corpus": {"chats": "c"}, "loop": {"epochs": 1}}
    with pytest.raises(ConfigError, match=r"no epochs: give loop\.steps"):
        load_recipe(write(tmp_path / "r.yaml", lm=section))
