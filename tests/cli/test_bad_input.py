"""Bad input: exit code 2 for usage, 1 for failures; the message names the thing and what to do; no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

from eyas.targets import Target, slots

from ..pairs import Pair, save_drafter, write_rows
from ..toy.pair import TOY_TARGET

Run = Callable[..., Result]


def refused(result: Result, code: int, *words: str) -> None:
    """The exit code, a message with all the words, and nothing of Python's."""
    assert result.exit_code == code, result.output
    for word in words:
        assert word in result.stderr, result.stderr
    assert "Traceback" not in result.output
    assert "unexpected" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", -1), ("--temperature -1", "greater than or equal to 0")),
        (("--temperature", "nan"), ("--temperature nan", "finite")),
        (("--top-p", 0), ("--top-p 0", "greater than 0")),
        (("--top-k", -1), ("--top-k -1",)),
        (("--min-p", 2), ("--min-p 2", "less than or equal to 1")),
        (("--seed", -1), ("--seed -1",)),
        (("--repetition-penalty", 0), ("--repetition-penalty 0",)),
        (("--max-new-tokens", 0), ("--max-new-tokens", "greater than or equal to 1")),
        (("--batch-size", 0), ("--batch-size", "greater than or equal to 1")),
        (("--stop-token-id", 9999), ("9999", "outside the target's vocabulary")),
        (("--tree", "bush"), ("unknown tree 'bush'", "chain:K", "dynamic:DEPTH,TOPK,NODES")),
        (("--tree", "static:oak"), ("unknown static tree 'oak'", "known are eagle1, mc_sim_7b_63, slim")),
        (("--tree", "chain:0"), ("chain",)),
        (("--tree", "chain:2", "-n", 3), ("--num-speculative-tokens", "--tree", "give one")),
        (("-n", 0), ("--num-speculative-tokens",)),
        (("--method", "oak"), ("unknown method 'oak'", "eagle1, eagle3, ")),
        (("--acceptance", "kind"), ("unknown acceptance 'kind'", "typical:EPSILON,DELTA")),
        (("--acceptance", "typical:2,1"), ("epsilon 2.0",)),
        (("--dtype", "int8"), ("'int8' is not one of", "bfloat16")),
        (("--device", "toaster"), ("unknown device 'toaster'", "cpu")),
        (("--attention", "flash"), ("'flash' is not one of", "'sdpa', 'eager'")),
        (("--no-such-option",), ("--no-such-option",)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_bad_options(options: tuple[Any, ...], words: tuple[str, ...], decode: Run) -> None:
    refused(decode("--prompt", "In May?", *options), 2, *words)


def test_options_that_would_be_ignored(run: Run, pair: Pair) -> None:
    pair_options = ("--model", pair.model, "--draft-model", pair.drafter)
    refused(
        run("generate", *pair_options, "--method", "none", "--tree", "chain:2", "--prompt", "x"),
        2,
        "--draft-model, --tree would be ignored",
    )
    drafting = run("generate", "--model", pair.model, "--tree", "chain:2", "--prompt", "x")
    refused(drafting, 2, "--tree needs a drafter", "--draft-model")
    refused(run("generate", *pair_options, "--prompt-file", __file__, "--raw"), 2, "--raw is about `prompt`")


def test_prompts_that_cannot_run(decode: Run, tmp_path: Path) -> None:
    refused(decode(), 2, "--prompt TEXT or --prompt-file FILE")
    refused(decode("--prompt", "x", "--prompt-file", __file__), 2, "either")
    refused(decode("--prompt", ""), 2, "the prompt is empty")
    refused(decode("--prompt", "May " * 300), 2, "the model's context holds 256", "shorten the prompt")
    refused(decode("--prompt-file", tmp_path / "none.jsonl"), 2, "none.jsonl", "does not exist")
    refused(
        decode("--prompt-file", write_rows(tmp_path / "empty.jsonl", [])), 1, "has no rows", "one JSON object a line"
    )


def test_targets_that_cannot_be_loaded(run: Run, tmp_path: Path) -> None:
    def generate(model: Path | str) -> Result:
        return run("generate", "--model", model, "--method", "none", "--prompt", "x")

    refused(generate("no/such-model"), 1, "no/such-model")
    refused(generate(tmp_path), 1, str(tmp_path), "model config")
    xlstm = {"model_type": "xlstm", "architectures": ["xLSTMForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(xlstm), encoding="utf-8")
    refused(generate(tmp_path), 1, "xlstm keeps a recurrent state", "use a model with a key-value cache")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_hidden_size": 48}, ("states 48 wide, the target's are 32",)),
        ({"vocab_size": 97, "draft_vocab_size": 60}, ("97 tokens, the target's",)),
        ({"num_aux_hidden_states": 2}, ("reads 2 taps, but 3 are named",)),
        ({"taps": [1, 2, 40]}, ("outside the target's boundaries 0..5",)),
    ],
    ids=["hidden size", "vocabulary", "tap count", "tap range"],
)
def test_a_drafter_that_does_not_fit(
    settings: dict[str, Any], words: tuple[str, ...], decode: Run, tmp_path: Path
) -> None:
    path = save_drafter(tmp_path, **settings)
    result = decode("--prompt", "x", "--draft-model", path)
    refused(result, 1, str(path), "does not fit the target", "Use one trained for this model", *words)


def change_tensors(path: Path, *, drop: tuple[str, ...] = (), **add: torch.Tensor) -> None:
    tensors = {name: t for name, t in load_file(path / "model.safetensors").items() if name not in drop}
    save_file(tensors | add, path / "model.safetensors")


def test_missing_and_extra_tensors(decode: Run, tmp_path: Path) -> None:
    change_tensors(save_drafter(tmp_path), drop=("fc.weight",), surplus=torch.zeros(2))
    refused(
        decode("--prompt", "x", "--draft-model", tmp_path), 1, str(tmp_path), "missing: fc.weight", "extra: surplus"
    )


def test_an_unknown_key_in_a_config(decode: Run, tmp_path: Path) -> None:
    config = save_drafter(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"swirl": 3}), encoding="utf-8")
    refused(decode("--prompt", "x", "--draft-model", tmp_path), 2, str(config), "swirl", "--ignore-config-key")
    result = decode("--prompt", "x", "--draft-model", tmp_path, "--ignore-config-key", "swirl")
    assert result.exit_code == 0, result.stderr


def test_pickles_are_read_only_when_named(decode: Run, tmp_path: Path) -> None:
    path = save_drafter(tmp_path) / "model.safetensors"
    torch.save(load_file(path), tmp_path / "pytorch_model.bin")
    path.unlink()
    asked = ("--prompt", "x", "--draft-model", tmp_path)
    refused(decode(*asked), 1, "--draft-weights pytorch_model.bin")
    assert decode(*asked, "--draft-weights", "pytorch_model.bin").exit_code == 0


def test_no_memory_for_the_cache(decode: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = slots.mapped_zeros

    def scarce(size: Any, *options: Any, **named: Any) -> Any:
        if len(size) == 5 and size[1]:  # keys and values of some slots
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return zeros(size, *options, **named)

    load = Target.__post_init__

    def loaded(target: Target) -> None:
        load(target)
        monkeypatch.setattr(slots, "mapped_zeros", scarce)

    monkeypatch.setattr(Target, "__post_init__", loaded)
    result = decode("--prompt", "x", "--method", "none")
    monkeypatch.undo()
    refused(result, 1, "cache")


def test_a_bad_recipe(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lm:\n  swirl: 3\n", encoding="utf-8")
    refused(run("train", recipe), 2, "recipe.yaml", "lm.swirl")
    recipe.write_text("{}\n", encoding="utf-8")
    refused(run("train", recipe), 2, "one section, `lm` or `drafter`")
    refused(run("train", recipe, "lm"), 2, "override 'lm' must look like key=value")
    refused(run("train", tmp_path / "none.yaml"), 2, "there is no file", "none.yaml", "eagle3_8b")


def test_tracebacks_are_for_debug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = ("generate", "--model", "x", "--method", "none", "--prompt", "")
    assert "Traceback" not in run(*usage).output
    shown = run("--debug", *usage)
    assert shown.exit_code == 2
    assert "Traceback" in shown.stderr
    assert "error: the prompt is empty" in shown.stderr

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("seven\nlines")

    monkeypatch.setattr("eyas.interop.inspect.report.locate", broken)
    result = run("inspect", TOY_TARGET)
    assert result.exit_code == 1
    assert result.stderr.startswith("unexpected ZeroDivisionError: seven (run with --debug")
    assert "Traceback" in run("--debug", "inspect", TOY_TARGET).stderr


def test_an_interrupt_is_no_failure_of_ours(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("eyas.interop.inspect.report.locate", interrupt)
    result = run("inspect", TOY_TARGET)
    assert result.exit_code == 130
    assert "Traceback" not in result.output
