"""`eyas inspect`: targets and drafters, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result

from ...pairs import Pair, save_drafter, tokenizer
from ...toy.pair import TOY_DRAFTER

Run = Callable[..., Result]


def test_a_target(run: Run, pair: Pair) -> None:
    result = run("inspect", pair.model, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["role"], report["usable"], report["problems"]) == ("target", True, [])
    assert (report["layers"], report["hidden_size"], report["vocab_size"]) == (4, 32, len(tokenizer()))
    assert report["attention"] == {"full_attention": None}
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["chat_template"] is True
    assert report["max_length"] == 256
    assert report["parameters"] > 2 * 32 * len(tokenizer())
    text = run("inspect", pair.model).stdout
    for words in ("LlamaForCausalLM", f"{report['parameters']:,}", "default taps", "full_attention: all positions"):
        assert words in text
    words_only = " ".join(text.split())
    assert all(words_only.count(place) == 1 for place in report["stop_ids"].values()), text


def test_a_drafter_and_its_target(run: Run, pair: Pair) -> None:
    result = run("inspect", pair.drafter, "--model", pair.model, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["role"], report["kind"], report["taps"]) == ("drafter", "eagle3", [1, 2, 4])
    text = run("inspect", pair.drafter, "--verbose").stdout
    assert "warning: no provenance" in text
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("rope_parameters:")
    assert {"rope_type: default", "rope_theta: 10000.0"} == set(lines[at + 1 : at + 3])
    assert "default_tree: None" not in text


def test_a_drafter_fits_a_screen(run: Run) -> None:
    """The demo's, which knows all about its training; whatever is wrong with it is shown all the same."""
    brief, whole = (run("inspect", TOY_DRAFTER, *more).stdout.splitlines() for more in ((), ("--verbose",)))
    assert sum(1 + len(line.rstrip()) // 80 for line in brief) <= 40
    assert len(whole) > 80
    for words in ("eagle3", "2,884,608", "2, 16, 29", "default_tree dynamic:5,4,15", "target demo", "rows 5,665"):
        assert words in " ".join(" ".join(brief).split()), words
    assert [line for line in brief if line.startswith("warning:")] == [
        line for line in whole if line.startswith("warning:")
    ]


def test_a_drafter_that_does_not_fit_fails(run: Run, pair: Pair, tmp_path: Path) -> None:
    result = run("inspect", save_drafter(tmp_path, target_hidden_size=48), "--model", pair.model)
    assert result.exit_code == 1
    assert "problem: doesn't fit the target: states of 48, but the target's is 32" in result.stdout


def directory(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def test_an_unusable_target_says_why(run: Run, tmp_path: Path) -> None:
    config = {"model_type": "xlstm", "architectures": ["xLSTMForCausalLM"], "hidden_size": 8, "num_hidden_layers": 2}
    result = run("inspect", directory(tmp_path, config), "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["usable"] is False
    assert "xlstm keeps a recurrent state" in report["problems"][0]
    assert report["attention"] == {}
    assert "no weights: targets are loaded from safetensors only" in report["problems"]


def test_what_is_neither(run: Run, tmp_path: Path) -> None:
    assert "has no config.json" in run("inspect", tmp_path).stderr
    result = run("inspect", directory(tmp_path, {"hidden_size": 8}))
    assert result.exit_code == 2
    assert "names no architecture" in result.stderr
    gone = run("inspect", "no/such-model")
    assert gone.exit_code == 1
    assert "no copy in the Hub's cache" in gone.stderr


def test_smollm2_is_a_target(run: Run) -> None:
    result = run("inspect", "smollm2", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["usable"], report["problems"]) == (0, True, [])
    assert (report["role"], report["layers"], report["hidden_size"]) == ("target", 30, 576)
    assert (report["parameters"], report["dtypes"]) == (134_515_008, ["F32", "Q4_1", "Q8_0"])
