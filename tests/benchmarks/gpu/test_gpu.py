"""The steps of `make gpu` on a CPU: a few run, all are named once, and every section of the page is one of theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__, kernels, processes, report, smollm2, speed, training
from benchmarks.gpu.pairs import SMALL, make_pair
from benchmarks.gpu.steps import Outcome, Skipped, Step

from ... import tiny

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def test_every_step_has_a_name_of_its_own() -> None:
    steps = __main__.all_steps(SMALL, CPU, Path())
    names = [(step.section, step.name) for step in steps]
    assert len(set(names)) == len(names) > 2 * len(tiny.ARCHITECTURES)
    assert set(report.NOTES) <= {section for section, _ in names}


def test_tests_that_are_run_on_a_device_exist() -> None:
    assert all((ROOT / file).is_file() for files in processes.TESTS.values() for file in files)


@pytest.mark.slow
def test_a_batch_of_the_random_pair() -> None:
    target = make_pair("random", SMALL, CPU).target
    made = []
    record = target.record
    assert record is not None
    target.record = lambda compute: made.append(record(compute)) or made[-1]
    outcome = speed.rates("random", 2, SMALL, CPU)
    lines = {row["setting"]: row for row in outcome.rows}
    assert next(iter(lines)) == speed.PLAIN
    assert set(speed.ORACLES) | {speed.STOCK} | {setting + speed.EAGER for setting in speed.ROUNDS} < set(lines)
    assert made
    assert lines[speed.PLAIN]["to plain"] == lines[speed.PLAIN]["min"] == lines[speed.PLAIN]["max"] == 1.0
    for setting in (*speed.ORACLES, "chain:3 at 0.9, no graphs"):
        assert lines[setting]["answers as plain"] == "2 of 2"
        assert lines[setting]["accept length"] > 1.5
        assert lines[setting]["peak GiB"] is None
    rounds = speed.rounds("random", 2, SMALL, CPU)
    assert [row["setting"] for row in rounds.rows] == [name + end for name in speed.ROUNDS for end in ("", speed.EAGER)]
    assert all(row["round ms"] > 0 and row["host waits"] is None for row in rounds.rows)


def test_the_random_pair_is_sure_of_its_tokens() -> None:
    """Else answers would part at near-ties, and no accept length could be set."""
    model = make_pair("random", SMALL, CPU).target.model
    logits = model(torch.arange(50).unsqueeze(0)).logits[0].float()
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 0.1 * float(best[:, 0].max())
    assert len(set(logits.argmax(1).tolist())) == 50


def test_the_stock_model_has_its_own_attention_for_a_while() -> None:
    target = make_pair("random", SMALL, CPU).target
    own = target.model.config._attn_implementation
    with speed.stock_attention(target) as model:
        assert model.config._attn_implementation == "sdpa"
    assert target.model.config._attn_implementation == own != "sdpa"


def test_smollm2_needs_prompts_and_a_device(tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    with pytest.raises(Skipped, match="give --data"):
        smollm2.auto(file, "modules", SMALL, CPU)
    file.write_text('{"prompt": "What is 2 + 3?"}\n', encoding="utf-8")
    with pytest.raises(Skipped, match="run on a GPU, not on cpu"):
        smollm2.auto(file, "triton", SMALL, CPU)


def test_a_prompt_is_read_whole_and_in_pieces() -> None:
    outcome = kernels.prompts(SMALL, CPU)
    assert not outcome.wrong
    assert [row["piece"] for row in outcome.rows] == [SMALL.train_length, SMALL.train_length // 3 + 1]
    assert outcome.rows[-1]["same bits"] in ("True", "False")


def test_an_objective_on_the_device_is_that_on_the_cpu() -> None:
    outcome = training.as_on_cpu(CPU)
    assert not outcome.wrong
    assert outcome.rows[0]["gradient apart"] == 0.0


def test_the_call_writes_both_files_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> Outcome:
        raise Skipped("there is no GPU")

    steps = [step for step in __main__.all_steps(SMALL, CPU, Path()) if step.name == "objective"]
    steps.append(Step("tests", "absent", absent))
    monkeypatch.setattr(__main__, "all_steps", lambda *_: steps)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--output", str(tmp_path), "--budget", "300"])
    assert __main__.main() == 0
    assert "1 steps done, 1 skipped, 0 failed, 0 left" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.md"}
    assert "| absent | skipped: there is no GPU |" in (tmp_path / "gpu.md").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--output", str(tmp_path / "b"), "--budget", "0"])
    assert __main__.main() == 1
    assert "run the same command again to go on" in capsys.readouterr().out
