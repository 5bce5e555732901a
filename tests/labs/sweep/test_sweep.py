"""Whole sweeps with a fake trainer and real decoding."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.offline.runner import read_tasks, run_group
from eyas.errors import ConfigError
from eyas.labs.sweep.search import SweepConfig
from eyas.labs.sweep.sweep import Sweep, SweepResult
from eyas.session import load
from eyas.types import SamplingParams, Stats

from ...forks import Fork
from .conftest import Setup


def swept(config: SweepConfig) -> Sweep:
    made = Sweep(config, lambda line: None)  # noqa: ARG005
    made.train()
    return made


def seeds(outcomes: list[SweepResult]) -> list[int]:
    return [outcome.trial.values["drafter.loop.seed"] for outcome in outcomes]


def decoded(setup: Setup, seed: int) -> float:
    """A drafter's accept length, decoded by itself."""
    engine = load(setup.drafters / "target", setup.drafters / str(seed), tree="dynamic:2,25,50")
    pooled = Stats()
    for group in read_tasks([setup.prompts], 1)[0].groups:
        pooled.merge(run_group(engine, group, SamplingParams(max_tokens=12)).stats)
    return pooled.accept_length


def test_trials_are_ranked_by_decoded_accept_length(setup: Setup) -> None:
    made = swept(setup.config(parallel=2, threads=3, devices=["4", "5"]))
    expected = {seed: decoded(setup, seed) for seed in range(3)}
    assert len(set(expected.values())) > 1
    assert {seed: o.accept_length for seed, o in zip(seeds(made.ranked), made.ranked, strict=True)} == expected
    assert made.ranked[0].accept_length == max(expected.values())
    assert made.ranked[0].trial.seconds == 2.5
    assert sorted(call.split()[0] for call in setup.calls) == ["0", "1", "2"]
    assert {call.split()[1] for call in setup.calls} == {"3"}
    assert {call.split()[2] for call in setup.calls} == {"4", "5"}


def bar(total: int) -> Any:
    from contextlib import nullcontext

    assert total > 0
    return nullcontext(lambda: None)


def test_speed_is_measured_afterwards_of_the_best(setup: Setup) -> None:
    made = swept(setup.config(timing={"repeats": 1, "warmup": 0, "best": 2}))
    choice = made.time(bar)
    assert choice is not None
    assert choice.best.name == made.ranked[0].trial.name
    assert [outcome.timed is not None for outcome in made.ranked] == [True, True, False]
    timed = made.ranked[0].timed
    assert timed is not None
    assert timed.mean("tokens_per_second") > 0
    assert timed.mean("accept_length") == pytest.approx(made.ranked[0].accept_length)


def test_a_failing_trial_is_reported_and_the_rest_goes_on(setup: Setup) -> None:
    config = setup.config(knobs={"drafter.loop.seed": [7, 0, 1]})
    made = swept(config)
    assert seeds(made.ranked) == sorted((0, 1), key=lambda seed: -decoded(setup, seed))
    (failed,) = made.failed
    assert failed.failure is not None
    assert "exit code 1: error: no such drafter" in failed.failure
    before = len(setup.calls)
    again = swept(config)
    assert setup.calls[before:] == setup.calls[:1]  # only what failed is tried again
    assert len(again.ranked) == 2


def test_an_edited_sweep_keeps_its_trials_and_scores_anew(setup: Setup) -> None:
    swept(setup.config(knobs={"drafter.loop.seed": [0, 1]}))
    made = swept(setup.config(score={"prompt_files": [setup.prompts], "max_tokens": 5}))
    assert [call.split()[0] for call in setup.calls] == ["0", "1", "2"]
    assert len(made.ranked) == 3
    assert made.ranked[0].accept_lengths.keys() == {"rows"}


def test_a_search_resumes(setup: Setup) -> None:
    def config(trials: int) -> SweepConfig:
        return setup.config(knobs={"drafter.loop.seed": {"low": 0, "high": 2}}, search="tpe", trials=trials)

    first = swept(config(2))
    calls = len(setup.calls)
    second = swept(config(6))
    assert first.results.keys() <= second.results.keys()
    assert len(setup.calls) == len(second.results) >= calls  # none is trained twice
    assert set(seeds(second.ranked)) <= {0, 1, 2}


def test_a_killed_sweep_leaves_a_trial_that_the_next_one_waits_for(setup: Setup, models: Path) -> None:
    block = models / "block-0"
    block.touch()
    config = setup.config(knobs={"drafter.loop.seed": [0]})
    script = (
        "import sys\n"
        "from eyas.labs.sweep import sweep, trial\n"
        "from eyas.labs.sweep.search import SweepConfig\n"
        f"trial.train_command = lambda recipe: [{sys.executable!r}, sys.argv[1], str(recipe), sys.argv[2]]\n"
        "sweep.Sweep(SweepConfig.model_validate_json(sys.argv[3]), print).train()\n"
    )
    arguments = [str(models / "trainer.py"), str(models), config.model_dump_json()]
    first = Fork(["-c", script, *arguments])
    try:
        while not setup.calls:
            assert first.poll() is None
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    unblock = subprocess.Popen([sys.executable, "-c", f"import time, os; time.sleep(0.5); os.remove({str(block)!r})"])
    began = time.monotonic()
    made = swept(config)
    unblock.wait()
    assert time.monotonic() - began >= 0.4  # the orphan had the folder
    assert seeds(made.ranked) == [0]
    assert len(setup.calls) == 2


def test_an_interruption_ends_the_trials(setup: Setup, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = models / "block-1"
    block.touch()
    made = Sweep(setup.config(knobs={"drafter.loop.seed": [1]}), lambda line: None)  # noqa: ARG005
    real = time.sleep

    def interrupted(seconds: float) -> None:
        real(seconds)
        if setup.calls:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    block.unlink()
    (folder,) = made.trials.folder.iterdir()
    with (folder / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody trains it any more
    assert not (folder / "trained.json").exists()


@pytest.mark.slow  # trains every trial twice
def test_halving_is_the_same_however_many_are_trained_at_once(setup: Setup) -> None:
    """All three for a third of the steps, the best of them to the end; run again, nothing is trained."""
    found = {}
    for name, parallel in (("a", 1), ("b", 3)):
        config = setup.config(
            output=setup.folder / name, parallel=parallel, set={"drafter.loop.steps": 8}, halving={"rungs": 2}
        )
        before = len(setup.calls)
        made = swept(config)
        assert len(setup.calls) == before + 4
        found[name] = [(row.trial.name, row.accept_lengths, row.until) for row in made.ranked]
        assert [until for *_, until in found[name]] == [None, 3, 3]
        again = swept(config)
        assert len(setup.calls) == before + 4
        assert [(row.trial.name, row.accept_lengths, row.until) for row in again.ranked] == found[name]
        choice = made.time(bar)
        assert choice is not None
        assert [each.name for each in choice.ranked] == [made.ranked[0].trial.name]  # only what is trained to the end
    assert found["a"] == found["b"]
    best = max(range(3), key=lambda seed: decoded(setup, seed))
    assert seeds(made.ranked)[0] == best


def test_halving_needs_steps(setup: Setup) -> None:
    with pytest.raises(ConfigError, match="halving needs the same number of steps"):
        Sweep(setup.config(halving={"rungs": 2}, knobs={"drafter.loop.steps": [1, 2]}), print)
    with pytest.raises(ValueError, match="use random or grid"):
        setup.config(halving={"rungs": 2}, search="tpe", trials=3)
