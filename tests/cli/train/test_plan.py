"""`eyas plan` from a config.json alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from eyas.interop.serving import hidden_states

Run = Callable[..., Result]

CONFIG = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip


def test_a_32b_model(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    work = ("--samples", 500_000, "--length", 2048)
    for model in (path, tmp_path):
        result = run("plan", model, *work, "--machine", "H100", "--devices", 8)
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        classic = next(line.split() for line in lines if "classic (" in line)
        assert classic[-4:] == ["40,976", "41.96", "38.16", "1.00"]
        ours = next(line.split() for line in lines if "--states fp8 --final answers *" in line)
        assert ours[-4:] == ["17,928", "18.36", "16.70", "0.44"]
        assert "expected speedup at batch 1: 2.2x to 5.7x, an estimate" in result.stdout
        assert "regeneration, 32 chats at a time on a device, without a drafter: " in result.stdout
        assert "training memory of a device, micro-batches of 8,192 tokens: " in result.stdout
        assert " with drafter.loop.parallel=fsdp; " in result.stdout
        assert "H100: 396 TFLOP/s and 2680 GB/s sustained, x 8" in result.stdout
    other = run("plan", path, *work, "--tflops", 10, "--bandwidth", 100, "--states", "bf16", "--final", "top:8")
    assert "as stated: 10 TFLOP/s" in other.stdout
    assert "fsdp" not in other.stdout  # of one device there are no shards
    assert "your choice, --states bf16 --final top:8: 31.49 TB" in other.stdout


def test_a_cluster(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    work = ("--samples", 500_000, "--length", 2048)

    def row(step: str, output: str) -> list[str]:
        return next(line for line in output.splitlines() if line.strip().startswith(step)).split()

    one = run("plan", path, *work, "--machine", "H100", "--devices", 32)
    many = run("plan", path, *work, "--machines", "4x8xH100", "--price", 2.5)
    assert many.exit_code == 0, many.output
    assert set(one.stdout.splitlines()) <= set(many.stdout.splitlines())  # the same hours, and the same assumptions
    assert "on 4 machines with 8 H100 each" in many.stdout
    hours, unit, of_gpus, dollars = row("capture", many.stdout.split("on 4 machines")[1])[1:]
    assert unit == "hours"
    assert float(of_gpus.replace(",", "")) == pytest.approx(32 * float(hours), rel=0.05)
    assert float(dollars.replace(",", "")) == pytest.approx(2.5 * float(of_gpus.replace(",", "")), rel=0.01)
    parts = [row(step, many.stdout.split("on 4 machines")[1])[-1] for step in ("regen", "capture", "training from")]
    total = row("all three", many.stdout)[-1]
    assert sum(float(part.replace(",", "")) for part in parts) == pytest.approx(float(total.replace(",", "")), abs=0.03)
    assert "$2.50 an hour per H100: --price" in many.stdout
    rough = run("plan", path, *work, "--machines", "8xH100").stdout
    assert "on 1 machine with 8 H100" in rough
    assert "an hour per H100: a rough figure: give yours with --price" in rough
    assert "or vLLM's servers (--engine vllm), whose hidden-states connector writes the states" in rough
    assert "vLLM has it since 0.18, and isn't installed here" in rough
    monkeypatch.setattr(hidden_states, "installed_connector", lambda: ("0.17.1", False))
    assert "since 0.18; 0.17.1, installed here, does not" in run("plan", path, *work, "--machines", "8xH100").stdout


def test_bad_plans(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    work = ("--samples", 10, "--length", 20)
    for words, *options in (
        ("boundaries are 0 to 65", "--taps", "1,66"),
        ("use --final all", "--taps", "65"),
        ("is unknown: use A100", "--machine", "abacus"),
        ("give one of them", "--machine", "H100", "--tflops", 1, "--bandwidth", 1),
        ("such as 8xH100", "--machines", "H100"),
        ("such as 8xH100", "--machines", "0xH100"),
        ("--machines abacus is unknown: use A100", "--machines", "8xabacus"),
        ("leave out --machine and --devices", "--machines", "8xH100", "--devices", 8),
        ("--price would be ignored", "--price", 2),
    ):
        result = run("plan", path, *work, *options)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
    assert run("plan", tmp_path / "none", *work).exit_code == 2


def test_block_drafters(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    work = ("--samples", 10, "--length", 2048, "--machine", "H100")
    result = run("plan", path, *work, "--kind", "dspark", "--anchors", 64)
    assert result.exit_code == 0, result.output
    assert "taps for 5 draft layers: capture with --taps 2,17,32,47,62" in result.stdout
    assert "1 x all chats, up to 64 blocks of 7 slots each" in result.stdout
    assert "a dspark drafter of the target's widths, 5 layers" in result.stdout
    five = next(line.split() for line in result.stdout.splitlines() if "--states fp8 --final answers *" in line)
    assert five[-4] == "28,170"  # five states of 5,121 bytes, the id, its bit, and half of the final states
    peagle = run("plan", path, *work, "--kind", "peagle", "--draft-layers", 2, "--unroll", 6)
    assert peagle.exit_code == 0, peagle.output
    assert "1 x all tokens, 6 steps on a sample of their positions" in peagle.stdout
    assert "a P-EAGLE drafter of the target's widths, 2 layers, 32000 draft tokens" in peagle.stdout
    for kind, *options in (
        ("dflash", "--unroll", 7),
        ("dspark", "--draft-vocab", 10),
        ("eagle3", "--anchors", 3),
        ("eagle3", "--draft-layers", 3),
        ("peagle", "--block-size", 3),
    ):
        result = run("plan", path, *work, "--kind", kind, *options)
        assert result.exit_code == 2, result.output
        assert f"{options[0]} has no meaning for a drafter of kind {kind}" in result.stderr
