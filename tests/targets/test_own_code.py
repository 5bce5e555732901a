"""Code of a checkpoint never runs, and nobody is asked: a "y" on standard input may be the user's first chat line."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.cli.app import app
from eyas.errors import ModelError
from eyas.hub import find_target
from eyas.targets.loading import load_embedding_and_head, load_target, read_config
from eyas.targets.tokenizers import load_tokenizer

from .. import tiny
from ..source import FILES, parsed

CODE = "from pathlib import Path\nPath({!r}).touch()\nclass Own: pass\nclass OwnConfig: model_type = 'own'\n"
WITHOUT_CODE = {"GenerationConfig", "PeftConfig"}
"""Classes that read a JSON file and import nothing for it."""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """What code of the checkpoint creates when it runs."""
    return tmp_path / "it-ran"


@pytest.fixture
def checkpoint(tmp_path: Path, planted: Path) -> Path:
    """A tiny Llama whose tokenizer, and a model of a type nobody knows whose config, is code of its own."""
    folder = tmp_path / "model"
    tiny.build_model("llama").save_pretrained(folder)
    (folder / "own.py").write_text(CODE.format(str(planted)))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def claim(file: Path, **fields: object) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | fields))


def of_its_own(checkpoint: Path, part: str) -> None:
    """Make the tokenizer, the config or the model of a checkpoint code of its own."""
    if part == "tokenizer":
        claim(checkpoint / "config.json", model_type="arcee")  # a type without a tokenizer of its own
        claim(
            checkpoint / "tokenizer_config.json",
            tokenizer_class="Own",
            auto_map={"AutoTokenizer": [None, "own.Own"]},
        )
    else:
        claim(checkpoint / "config.json", model_type="own", auto_map={part: "own.OwnConfig"})


@pytest.mark.parametrize("part", ["tokenizer", "AutoConfig"])
@pytest.mark.parametrize("verb", ["chat", "inspect", "generate"])
def test_a_yes_on_standard_input_runs_no_code(checkpoint: Path, planted: Path, part: str, verb: str) -> None:
    of_its_own(checkpoint, part)
    extra = ["--max-new-tokens", "2", "--prompt", "hello"] if verb == "generate" else []
    done = CliRunner().invoke(app, [verb, str(checkpoint), *extra], input="y\ny\nyes\nhello\n")
    said = done.stdout + done.stderr
    assert not planted.exists()
    assert "eyas runs no code of a checkpoint" in said
    assert "[y/N]" not in said
    assert "unexpected" not in said


def test_every_loader_refuses_without_asking(checkpoint: Path, planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    of_its_own(checkpoint, "tokenizer")
    with pytest.raises(ModelError, match="eyas runs no code of a checkpoint"):
        load_tokenizer(checkpoint)
    of_its_own(checkpoint, "AutoConfig")
    loaders = (
        lambda name: read_config(find_target(name)),
        load_target,
        lambda name: load_embedding_and_head(name, dtype="float32"),
    )
    for load in loaders:
        with pytest.raises(ModelError, match="eyas runs no code of a checkpoint"):
            load(str(checkpoint))
    assert not planted.exists()


def test_a_model_that_transformers_knows_is_loaded_without_its_own_code(checkpoint: Path, planted: Path) -> None:
    claim(checkpoint / "config.json", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"})
    assert load_target(checkpoint).num_layers == tiny.LAYERS
    assert not planted.exists()


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """Every `X.from_pretrained(...)` of the package and `model.generate(...)` of transformers."""
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                generates = node.func.attr == "generate" and ast.unparse(node.func.value).endswith("model")
                if generates or node.func.attr == "from_pretrained":
                    yield file, node


@pytest.mark.slow
def test_every_call_that_loads_says_that_code_is_not_trusted() -> None:
    found = list(calls())
    assert len(found) > 8
    for file, call in found:
        assert isinstance(call.func, ast.Attribute)
        if ast.unparse(call.func.value) in WITHOUT_CODE:
            continue
        said = {each.arg: ast.unparse(each.value) for each in call.keywords}
        assert said.get("trust_remote_code") == "False", f"{file}:{call.lineno}: {ast.unparse(call)}"
