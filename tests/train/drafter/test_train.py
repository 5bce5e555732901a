"""From recipe to a drafter that the engine loads, and that agrees with what training said of it."""

from __future__ import annotations

import errno
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eyas.data.capture.shard import read_rows
from eyas.drafters.network import DraftNetwork
from eyas.errors import CheckpointError, ConfigError
from eyas.session import load
from eyas.train.drafter import train as run
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter
from eyas.train.drafter.validation import choose_prompts
from eyas.train.recipe import Recipe, run_recipe
from eyas.types import Request, SamplingParams, Stats


def recipe(target: Path, chats: Path, output: Path, **more: Any) -> DrafterTrainConfig:
    """Six steps of a small EAGLE-3.1 drafter, the target in the loop."""
    shape = {"kind": "eagle3.1", "draft_vocab_size": 64, **more.pop("shape", {})}
    validation = {"batches": 1, "prompts": 3, "max_tokens": 12, "tree": "chain:3", **more.pop("validation", {})}
    return DrafterTrainConfig.model_validate(
        {
            "target": str(target),
            "chats": chats,
            "output": output,
            "shape": shape,
            "loss": {"unroll": 3, **more.pop("loss", {})},
            "batch_tokens": 256,
            "max_length": 128,
            "held_out_share": 0.2,
            "validation": validation,
            "device": "cpu",
            "loop": {"steps": 6, "optimizer": {"lr": 0.01}},
            **more,
        }
    )


def test_trained_drafter_serves(target: Path, chats: Path, tmp_path: Path) -> None:
    drafter = train_drafter(recipe(target, chats, tmp_path))
    provenance = json.loads((drafter / "config.json").read_text())["eyas"]
    assert provenance["steps"] == 6
    assert provenance["covered"] > 0.9
    assert {"target_fingerprint", "data_hash", "taps", "loss", "versions"} <= provenance.keys()
    assert provenance["validation"]["decoded_accept_length"] >= 1
    assert str(tmp_path) not in json.dumps(provenance)

    request = Request((3, 20, 21, 22, 1, 4), SamplingParams(max_tokens=40, ignore_eos=True))
    plain = load(target).generate([request])[0]
    drafted = load(target, drafter, tree="chain:3").generate([request])[0]
    assert drafted.token_ids == plain.token_ids
    assert len(set(plain.token_ids)) > 3


def test_training_lowers_the_loss_and_resumes(target: Path, chats: Path, tmp_path: Path) -> None:
    def losses(folder: Path) -> dict[int, float]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def run(steps: int, folder: Path) -> None:
        loop = {
            "steps": steps, "log_every": 1, "validate_every": 1000, "bf16": False,
            "optimizer": {"lr": 0.01}, "schedule": {"kind": "constant", "warmup": 0.0},
        }  # fmt: skip
        train_drafter(recipe(target, chats, folder, loop=loop))

    run(12, tmp_path / "whole")
    run(5, tmp_path / "halves")
    run(12, tmp_path / "halves")
    whole = losses(tmp_path / "whole")
    assert whole == losses(tmp_path / "halves")
    assert whole[12] < whole[1]
    weights = [(tmp_path / name / "drafter" / "model.safetensors").read_bytes() for name in ("whole", "halves")]
    assert weights[0] == weights[1]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "kind",
    ["eagle3.1", "dspark", "peagle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dflash", "lilicorr"))],
)
def test_segments_and_random_starts_resume(kind: str, target: Path, chats: Path, tmp_path: Path) -> None:
    """Rows of at most 22 tokens of chats of about 40, the positions drawn anew: the same weights in two goes."""
    sizes: dict[str, Any] = {
        "dflash": {"block_size": 4}, "dspark": {"block_size": 3}, "lilicorr": {"block_size": 4},
        "peagle": {"num_depths": 3},
    }  # fmt: skip
    shape = {"kind": kind, "taps": [1, 2, 3], "layers": 1, **sizes.get(kind, {})}
    loop = {"steps": 4, "log_every": 1, "validate_every": 1000, "bf16": False, "optimizer": {"lr": 0.01}}
    loop["schedule"] = {"kind": "constant", "warmup": 0.0}
    more: dict[str, Any] = {
        "shape": shape, "segments": {"length": 14, "context": 8}, "validation": {"decode": False},
    }  # fmt: skip
    for name, steps in (("whole", [4]), ("halves", [2, 4])):
        for each in steps:
            given = {**more, "loss": {"random_start": 200}, "loop": {**loop, "steps": each}}
            train_drafter(recipe(target, chats, tmp_path / name, **given))
    weights = [(tmp_path / name / "drafter" / "model.safetensors").read_bytes() for name in ("whole", "halves")]
    assert weights[0] == weights[1]
    assert provenance(tmp_path / "whole" / "drafter")["segments"] == {"length": 14, "context": 8}
    assert re.search(r"segments +14 +tokens after 8 of context", (tmp_path / "whole" / "settings.txt").read_text())
    with pytest.raises(CheckpointError, match=r"segments"):
        train_drafter(recipe(target, chats, tmp_path / "whole", **{**given, "segments": {"length": 13, "context": 8}}))
    with pytest.raises(ConfigError, match=r"random_start 240 and rows of 22 tokens .* set it to 234 or less"):
        train_drafter(recipe(target, chats, tmp_path / "beyond", **{**given, "loss": {"random_start": 240}}))


def test_a_narrow_drafter_needs_its_own_embedding(target: Path, chats: Path, tmp_path: Path) -> None:
    narrow = {"hidden_size": 16, "head_dim": 8}
    with pytest.raises(ConfigError, match="train_embedding"):
        train_drafter(recipe(target, chats, tmp_path / "a", shape=narrow))
    drafter = train_drafter(recipe(target, chats, tmp_path / "b", shape={**narrow, "train_embedding": True}))
    assert load(target, drafter).generate([Request((3, 20), SamplingParams(max_tokens=5))])


def test_decoding_and_its_settings_leave_training_alone(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    """Validation every step, with or without decoding, or not at all: the same weights."""
    found = {}
    for name, every, decode in (("never", 100, False), ("scored", 1, False), ("decoded", 1, True)):
        loop = {"steps": 4, "validate_every": every, "optimizer": {"lr": 0.01}}
        drafter = train_drafter(
            recipe(
                sure_target, chats, tmp_path / name, loop=loop, validation={"decode": decode}, target_dtype="float32"
            )
        )
        found[name] = (drafter / "model.safetensors").read_bytes()
    assert found["never"] == found["scored"] == found["decoded"]


def test_the_best_goes_by_what_was_decoded_or_says_that_nothing_was(
    sure_target: Path, chats: Path, tmp_path: Path
) -> None:
    loop = {"steps": 9, "validate_every": 3, "optimizer": {"lr": 0.03}, "log_every": 100}
    for decode, chosen_by in ((True, "decoded_accept_length"), (False, "accept_length")):
        folder = tmp_path / chosen_by
        train_drafter(recipe(sure_target, chats, folder, loop=loop, validation={"decode": decode}))
        made = {path.name: provenance(path) for path in (folder / "checkpoints").iterdir()}
        assert sorted(made) == ["step-000003", "step-000006", "step-000009"]
        best = provenance(folder / "best")
        assert best["chosen_by"] == chosen_by
        assert best["validation"][chosen_by] == max(m["validation"][chosen_by] for m in made.values())
        assert provenance(folder / "drafter")["steps"] == 9
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in records if "validation_loss" in r] == [3, 6, 9]
        assert all(("decoded_accept_length" in r) == decode for r in records if "validation_loss" in r)
        assert all(b["seconds"] >= a["seconds"] > 0 for a, b in pairwise(records))


def test_what_is_decoded_is_what_the_checkpoint_does(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    drafter = train_drafter(recipe(sure_target, chats, tmp_path, validation={"prompts": 2}, target_dtype="float32"))
    engine = load(sure_target, drafter, tree="chain:3", dtype="float32", draft_quantize="off")
    rows = read_rows(engine.tokenizer, chats, 0.2, 128, engine.target.vocab_size).rows["validation"]
    stats = Stats()
    for prompt in choose_prompts(rows, 2, None):
        stats.merge(engine.generate([Request(prompt, SamplingParams(max_tokens=12))])[0].stats)
    assert provenance(drafter)["validation"]["decoded_accept_length"] == round(stats.accept_length, 4)


def test_a_full_disk_is_explained_and_the_run_goes_on(
    target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = (
        recipe(target, chats, tmp_path / name, loop={"steps": 4, "validate_every": 2}) for name in ("whole", "stopped")
    )
    written = run.save_network

    def full(network: DraftNetwork, path: Path, facts: Any) -> None:
        if facts["steps"] > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(network, path, facts)

    with monkeypatch.context() as patch:
        patch.setattr(run, "save_network", full)
        with pytest.raises(CheckpointError, match=r"disk that holds .* is full"):
            run_recipe(Recipe(drafter=stopped))
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == ["step-000002"]
    assert json.loads((tmp_path / "stopped" / "state" / "state.json").read_text())["step"] == 2
    files = [train_drafter(config) / "model.safetensors" for config in (stopped, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_folder_of_another_recipe_is_refused(target: Path, chats: Path, tmp_path: Path) -> None:
    train_drafter(recipe(target, chats, tmp_path))
    with pytest.raises(
        CheckpointError, match=r"settings: loss.unroll was 3, is 2 \(`drafter.loss.unroll=`\)\. Restore"
    ):
        train_drafter(recipe(target, chats, tmp_path, loss={"unroll": 2}))


def test_a_warm_start_begins_where_the_other_ended(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    loop = {"steps": 12, "log_every": 1, "optimizer": {"lr": 0.02}, "bf16": False}
    first = train_drafter(recipe(sure_target, chats, tmp_path / "first", loop=loop))
    second = recipe(
        sure_target, chats, tmp_path / "second", loop=loop, warm_start=str(first), shape={"draft_vocab_size": 80}
    )
    assert provenance(train_drafter(second))["warm_start"] == "drafter"
    begun, ended = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("second", "first")
    )
    assert begun[0]["accept_length"] > ended[0]["accept_length"]


def test_what_will_be_trained_is_reported(
    target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_drafter(recipe(target, chats, tmp_path))
    said = capsys.readouterr().err
    assert re.search(r"kind +eagle3\.1 +recipe", said)
    assert re.search(r"parameters +[\d,]+ trained, [\d,]+ frozen", said)
    assert "never occur" in said
    assert "6 of 1 micro-batches" in said
    assert re.search(r"48 +never +occur", (tmp_path / "settings.txt").read_text())


def provenance(drafter: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((drafter / "config.json").read_text())["eyas"]
    return found
