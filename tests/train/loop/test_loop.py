"""The loop: resuming and accumulation are exact, schedules have the shapes they are named for."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from eyas import runtime
from eyas.errors import CheckpointError, StoppedError
from eyas.train.loop import loop
from eyas.train.loop.checkpoint import TrainingProgress
from eyas.train.loop.distributed import ProcessGroup
from eyas.train.loop.log import Advance, MicroBatchLoss
from eyas.train.loop.loop import LoopConfig, ResolvedLoop, resolved, train
from eyas.train.loop.optimizer import OptimizerConfig, ScheduleConfig, schedule_factor

ALONE = ProcessGroup(0, 1, torch.device("cpu"), "none")


class Regression:
    """A little network with dropout, so that the random state matters; batches differ in size."""

    plans = False  # whether attention may be cuDNN's, in the last batch

    def __init__(self, dropout: float = 0.1) -> None:
        torch.manual_seed(5)
        self.model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.LayerNorm(8), nn.Linear(8, 3))

    def micro_batch_loss(self, number: int) -> MicroBatchLoss:
        self.plans = torch.backends.cuda.cudnn_sdp_enabled()
        x = torch.randn(4 + number % 3, 6, generator=torch.Generator().manual_seed(number))
        loss = F.mse_loss(self.model(x).float(), x[:, :3], reduction="sum")
        return MicroBatchLoss(loss, len(x), {"size": (float(len(x)), 1.0)})

    def validate(self, progress: TrainingProgress, advance: Advance) -> dict[str, float]:
        advance("scoring", 1, 1)
        torch.rand(3)  # validation may use randomness: it doesn't leak
        return {"validation_step": progress.step}


def config(steps: int, kind: str = "adamw", **more: object) -> ResolvedLoop:
    return ResolvedLoop.model_validate(
        {
            "steps": steps,
            "validate_every": 100,
            "log_every": 2,
            "bf16": False,
            "optimizer": {"kind": kind, "lr": 0.01},
            **more,
        }
    )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("bf16", [False, True])
def test_resuming_is_exact_to_the_bit(tmp_path: Path, kind: str, bf16: bool) -> None:
    plateau = {"schedule": {"kind": "constant", "warmup": 0.0}, "bf16": bf16, "accumulate": 2}
    whole = Regression()
    halves = Regression()
    train(whole, config(9, kind, **plateau), tmp_path / "whole", ALONE, {"run": 1})
    train(halves, config(4, kind, **plateau), tmp_path / "halves", ALONE, {"run": 1})
    fresh = Regression()
    torch.rand(7)  # whatever happened in between
    train(fresh, config(9, kind, **plateau), tmp_path / "halves", ALONE, {"run": 1})
    for a, b in zip(whole.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(a, b)
    lines = [json.loads(x) for x in (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [2, 4, 6, 8, 9]


class Watched(Regression):
    """Notes torch's threads in every micro-batch; others take a core from the second one on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.threads: list[int] = []
        monkeypatch.setattr(runtime.CoreWatch, "seconds", 1.0)
        monkeypatch.setattr(runtime.CoreWatch, "look", lambda _: float(len(self.threads) > 0))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def micro_batch_loss(self, number: int) -> MicroBatchLoss:
        self.threads.append(torch.get_num_threads())
        return super().micro_batch_loss(number)


@pytest.mark.parametrize(("threads", "seen"), [(None, [2, 1, 1]), (2, [2, 2, 2]), (1, [1, 1, 1])])
def test_threads_follow_others_unless_their_number_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, seen: list[int]
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        watched = Watched(monkeypatch)
        train(watched, config(3, threads=threads), tmp_path, ALONE, {"run": 1})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert watched.threads == seen


@pytest.mark.parametrize("computes", [False, True])
def test_auto_is_bf16_where_the_device_computes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computes: bool
) -> None:
    monkeypatch.setattr(loop, "computes_in_bf16", lambda _: computes)
    auto = LoopConfig(steps=2)
    assert auto.bf16 == "auto"
    assert resolved(auto, 1, 48, tmp_path, ALONE).bf16 is computes
    assert resolved(LoopConfig(steps=2, bf16=not computes), 1, 48, tmp_path, ALONE).bf16 is not computes


@pytest.mark.parametrize(
    ("epochs", "accumulate", "batches", "steps"), [(2, 1, 7, 14), (2, 4, 7, 4), (0.5, 1, 7, 4), (0.01, 1, 7, 1)]
)
def test_steps_come_from_epochs(tmp_path: Path, epochs: float, accumulate: int, batches: int, steps: int) -> None:
    config = LoopConfig(epochs=epochs, accumulate=accumulate, bf16=False)
    assert resolved(config, batches, 48, tmp_path, ALONE).steps == steps


@pytest.mark.parametrize("began", [False, True])
def test_a_resumed_run_keeps_the_precision_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], began: bool
) -> None:
    train(Regression(), config(2, bf16=began), tmp_path, ALONE, {})  # what a run wrote when bf16 was a boolean
    monkeypatch.setattr(loop, "computes_in_bf16", lambda _: not began)
    auto = LoopConfig.model_validate(config(4).model_dump() | {"bf16": "auto"})
    again = resolved(auto, 1, 48, tmp_path, ALONE)
    assert again.bf16 is began
    capsys.readouterr()
    train(Regression(), again, tmp_path, ALONE, {})
    assert f"training in {'bfloat16' if began else 'float32'}" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="bf16"):
        train(Regression(), config(4, bf16=not began), tmp_path, ALONE, {})


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    train(Regression(), config(2), tmp_path, ALONE, {"data": "a"})
    with pytest.raises(CheckpointError, match="data was 'a', is 'b'"):
        train(Regression(), config(4), tmp_path, ALONE, {"data": "b"})
    other = r"settings: optimizer\.lr was 0\.01, is 0\.02 \(`lm\.loop\.optimizer\.lr=`\)\. Restore"
    with pytest.raises(CheckpointError, match=other):
        train(Regression(), config(4, optimizer={"lr": 0.02}), tmp_path, ALONE, {"data": "a"}, "lm")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_state_and_the_resumed_run_ends_alike(tmp_path: Path, number: signal.Signals) -> None:
    class Stopped(Regression):
        """Gets a signal amid the third step."""

        def micro_batch_loss(self, batch: int) -> MicroBatchLoss:
            if batch == 2:
                os.kill(os.getpid(), number)
            return super().micro_batch_loss(batch)

    before = signal.getsignal(number)
    whole = Regression()
    train(whole, config(6), tmp_path / "whole", ALONE, {})
    with pytest.raises(StoppedError, match="stopped after step 3 of 6; the state of that step is saved in") as caught:
        train(Stopped(), config(6), tmp_path / "run", ALONE, {})
    assert caught.value.signal_number == number
    assert signal.getsignal(number) is before
    resumed = Regression()
    train(resumed, config(6), tmp_path / "run", ALONE, {})
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [2, 4, 6]
    last = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-2]) for name in ("whole", "run")]
    assert last[0]["loss"] == last[1]["loss"]


def test_a_second_signal_acts_at_once(tmp_path: Path) -> None:
    class Impatient(Regression):
        def micro_batch_loss(self, batch: int) -> MicroBatchLoss:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            return super().micro_batch_loss(batch)

    with pytest.raises(KeyboardInterrupt):
        train(Impatient(), config(6), tmp_path, ALONE, {})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_under_torchrun_a_signal_comes_twice_and_is_one_request(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From who sent it to the whole group, and from the agent, which passes on what it got."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")

    class Twice(Regression):
        def micro_batch_loss(self, batch: int) -> MicroBatchLoss:
            for _ in range(2):
                os.kill(os.getpid(), number)
            return super().micro_batch_loss(batch)

    with pytest.raises(StoppedError, match="the state of that step is saved in"):
        train(Twice(), config(6), tmp_path, ALONE, {})


def test_accumulation_over_unequal_parts_is_one_big_batch(tmp_path: Path) -> None:
    class Whole(Regression):
        def micro_batch_loss(self, number: int) -> MicroBatchLoss:
            parts = [super(Whole, self).micro_batch_loss(number * 3 + i) for i in range(3)]
            return MicroBatchLoss(torch.stack([p.loss for p in parts]).sum(), sum(p.weight for p in parts))

    small = Regression(dropout=0.0)
    big = Whole(dropout=0.0)
    train(small, config(3, accumulate=3), tmp_path / "a", ALONE, {})
    train(big, config(3), tmp_path / "b", ALONE, {})
    for a, b in zip(small.model.parameters(), big.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_it_learns(tmp_path: Path) -> None:
    run = Regression(dropout=0.0)
    before = run.micro_batch_loss(0).loss.item()
    train(run, config(150), tmp_path, ALONE, {})
    assert not run.plans, "a plan for every batch"
    assert run.micro_batch_loss(0).loss.item() < before / 3
    assert run.plans


def test_schedules() -> None:
    wsd = ScheduleConfig(kind="wsd", warmup=0.1, decay=0.5)
    values = [schedule_factor(wsd, step, 20) for step in range(20)]
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[9:12] == pytest.approx([1.0, 1.0, 0.9])
    assert values[19] == pytest.approx(0.1)
    cosine = ScheduleConfig(kind="cosine", warmup=0.1, floor=0.2)
    curve = [schedule_factor(cosine, step, 20) for step in range(20)]
    assert curve[2] == 1.0
    assert all(a > b for a, b in pairwise(curve[2:]))
    assert 0.2 <= curve[19] < 0.22
    assert schedule_factor(ScheduleConfig(kind="constant", warmup=0.0), 7, 20) == 1.0


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="typo"):
        OptimizerConfig.model_validate({"typo": 1})
