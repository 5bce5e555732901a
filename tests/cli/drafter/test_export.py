"""`eyas export`: what is written, said and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from eyas.drafters.files import read_json
from eyas.interop.export.consumers import CONSUMERS

from ...pairs import Pair, save_drafter
from ...toy.pair import TOY_DRAFTER, TOY_TARGET

Run = Callable[..., Result]


def test_the_demo_leaves_and_decodes_as_before(run: Run, tmp_path: Path) -> None:
    result = run("export", TOY_DRAFTER, "--to", "vllm", "--output", tmp_path / "out", "--model", TOY_TARGET)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("vllm serve ")
    assert '"num_speculative_tokens": 5' in result.stdout
    assert "reads back as the same drafter" in result.stderr
    readme = (tmp_path / "out" / "README.md").read_text()
    for words in ("24cf43a21be0fed1", "boundaries [2, 16, 29]", "4.00 tokens per target pass", result.stdout.strip()):
        assert words in readme
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_gguf_widened_and_loaded_again(run: Run, pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    asked = ("export", pair.drafter, "--to", "gguf", "--output", tmp_path / "out", "--model", pair.model, "--json")
    result = run(*asked)
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert (said["consumer"], said["logit_difference"]) == ("gguf", 0.0)
    assert "--spec-type draft-eagle3" in said["command"]
    outputs = [
        run("generate", "--model", pair.model, "--draft-model", drafter, "--prompt", "In May?", "--max-new-tokens", 8)
        for drafter in (pair.drafter, tmp_path / "out", tmp_path / "out" / "drafter.gguf")
    ]
    assert [output.exit_code for output in outputs] == [0, 0, 0], outputs[-1].stderr
    assert len({output.stdout for output in outputs}) == 1
    inspected = json.loads(run("inspect", tmp_path / "out", "--model", pair.model, "--json").stdout)
    assert (inspected["format"], inspected["taps"], inspected["problems"]) == ("GGUF (llama.cpp)", [1, 2, 4], [])
    assert "eagle3.target_layers" in inspected["used"]


@pytest.mark.slow
def test_engines_that_read_no_gguf_files_are_given_none(run: Run, tmp_path: Path) -> None:
    for engine, begin in (("tensorrt-llm", "trtllm-serve TARGET "), ("sglang", "python -m sglang.launch_server ")):
        result = run("export", "smollm2", "--to", engine, "--output", tmp_path / engine, "--model", "smollm2")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith(begin)
        assert (".gguf" in result.stdout) == (engine == "sglang")


def test_what_is_refused(run: Run, pair: Pair, tmp_path: Path) -> None:
    def refused(code: int, *words: str, to: str = "vllm", drafter: Path = pair.drafter, **options: object) -> None:
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        result = run("export", drafter, "--to", to, "--output", tmp_path / "out", *flags)
        assert result.exit_code == code, result.output
        for word in words:
            assert word in result.stderr, result.stderr
        assert "Traceback" not in result.output
        assert not (tmp_path / "out").exists()

    refused(2, "'mlx' is not one of", *CONSUMERS, to="mlx")
    refused(1, "SafeAILab/EAGLE can't represent", "taps: ", "What you can do: serve it with", to="safeailab")
    refused(1, "without its target", "its config names the target: give --model", to="speculators")
    refused(2, "--taps '2;3'", taps="2;3")
    refused(2, "--taps has 2 boundaries, but the drafter reads 3", taps="1,2")
    refused(2, "without rounding", dtype="bfloat16")
    refused(2, "'int4' is not one of", dtype="int4")
    refused(1, "does not fit the target", drafter=save_drafter(tmp_path / "x", target_hidden_size=48), model=pair.model)
    ambiguous = save_drafter(tmp_path / "y", taps=[1, 2, 4])
    config = read_json(ambiguous / "config.json")
    for key in ("taps", "eagle_aux_hidden_state_layer_ids"):
        del config[key]
    (ambiguous / "config.json").write_text(json.dumps(config))
    refused(1, "can be read in two ways", "boundaries [2, 3, 5]", "--taps", drafter=ambiguous)
    settled = run("export", ambiguous, "--to", "vllm", "--output", tmp_path / "out", "--taps", "2,3,5")
    assert settled.exit_code == 0, settled.stderr
    assert read_json(tmp_path / "out" / "config.json")["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    again = run("export", pair.drafter, "--to", "vllm", "--output", tmp_path / "out")
    assert again.exit_code == 2
    assert "isn't empty" in again.stderr


def test_a_failed_write_leaves_nothing(run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> float:
        return 1.0

    monkeypatch.setattr("eyas.interop.export.export.largest_difference", damaged)
    result = run("export", pair.drafter, "--to", "vllm", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "logits differ from the original's" in result.stderr
    assert list(tmp_path.iterdir()) == []
