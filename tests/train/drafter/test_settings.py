"""What a run was resolved to is shown and kept, and settings of another model are warned of."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from eyas.data.tokens.batches import ChatBatches
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import ConfigError
from eyas.hub import ModelFiles
from eyas.train.drafter import settings as resolve
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.data import CutOff, DraftVocabulary
from eyas.train.drafter.settings import Outlook, announce, resolved_dtype, sized
from eyas.train.drafter.shape import fresh_network
from eyas.train.drafter.train import train_drafter
from eyas.train.loop.distributed import ProcessGroup
from eyas.train.loop.loop import resolved

from ... import tiny

FILES = ModelFiles("a-folder")
ALONE = ProcessGroup(0, 1, torch.device("cpu"), "none")


class Pretending:
    """A tiny target that says it is a large one."""

    def __init__(self, **sizes: Any) -> None:
        self._sizes = sizes

    def __getattr__(self, name: str) -> Any:
        return self._sizes.get(name, getattr(tiny.target(), name))


def written(folder: Path, **more: Any) -> DrafterTrainConfig:
    return DrafterTrainConfig.model_validate(
        {
            "target": "some/model",
            "chats": "chats.jsonl",
            "output": folder,
            **more,
            "loop": {"epochs": 3, "bf16": False, "optimizer": {"lr": 1e-4}, **more.pop("loop", {})},
        }
    )


def outlook(config: DrafterTrainConfig, covered: float = 0.5, **sizes: Any) -> Outlook:
    """Of a run on 20 rows of 10 tokens each."""
    target = tiny.target()
    draw = torch.Generator().manual_seed(0)
    rows = []
    for i in range(20):
        tokens = torch.randint(3, tiny.VOCAB, (10,), generator=draw).numpy()
        rows.append(TokenRow(tokens, tokens > 2, f"r{i}"))
    known = copy.copy(target)
    known.max_length = sizes.get("max_length", target.max_length)
    settled = sized(config, known, "float32")
    batches = ChatBatches(rows, settled.batch_tokens, settled.max_length, 0)
    loop = resolved(settled.loop, batches.per_epoch, target.hidden_size, config.output, ALONE)
    size = config.shape.draft_vocabulary(target.vocab_size)
    vocabulary = DraftVocabulary(torch.arange(size), covered, 60)
    network = fresh_network(settled.shape, target, vocabulary.ids)
    pretending: Any = Pretending(**sizes)
    return Outlook(config, settled, loop, pretending, network, vocabulary, batches)


def test_it_says_what_was_chosen_and_by_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path, batch_tokens=40, shape={"draft_vocab_size": 50, "kv_heads": 1})
    view = outlook(config)
    rows = {name: (value, origin) for name, value, origin in view.settings()}
    assert rows["target"] == ("some/model: 4 layers, 32 wide, 97 tokens, context 256", "recipe")
    assert rows["kind"] == ("eagle3", "default")
    assert rows["taps"] == ("1, 3, 4", "target and store")
    assert rows["layers"] == ("1 of 4 heads of 8 on 1, 32 wide", "target")
    assert rows["MLP"] == ("48 wide", "target")
    assert rows["draft vocabulary"] == ("50 tokens cover 50.00% of answers (60 different tokens)", "recipe")
    assert rows["max length"] == ("256 tokens", "context")
    assert rows["micro-batch"] == ("up to 40 tokens, 5 an epoch", "recipe")
    assert rows["data"] == ("20 chats, 200 tokens, 200 of them answers", "online")
    assert rows["steps"] == ("15 of 1 micro-batches = 3.00 epochs", "3 epochs")
    assert rows["optimizer"] == ("adamw, lr 0.0001, wsd", "recipe")
    assert rows["precision"] == ("float32", "recipe")
    announce(view)
    said = capsys.readouterr().err
    kept = (tmp_path / "settings.txt").read_text()
    for text in (said, kept):
        for name, (value, _) in rows.items():
            assert name in text
            assert value.split(",")[0].split()[0] in text
    assert "warning" not in said + kept


@pytest.mark.parametrize(
    ("more", "sizes", "words"),
    [
        ({"shape": {"intermediate_size": 23}}, {}, "an MLP 23 wide suits a small model: the target's is 48 wide"),
        ({"max_length": 1000}, {"max_length": 131_072}, "chats are cut to 1,000 tokens"),
        ({"max_length": 1000}, {"max_length": None}, "chats are cut to 1,000 tokens"),
        ({"shape": {"taps": (0, 1, 2)}}, {}, "the highest tap is boundary 2 of 4"),
        ({"loop": {"optimizer": {"lr": 1e-3}}}, {"hidden_size": 4096}, "loop.optimizer.lr is 0.001"),
        (
            {"loop": {"optimizer": {"kind": "muon", "lr": 1e-4, "matrix_lr": 0.08}}},
            {"hidden_size": 4096},
            "loop.optimizer.matrix_lr is 0.08",
        ),
        ({"batch_tokens": 20, "loop": {"epochs": None, "steps": 4}}, {}, "4 steps are 0.40 epochs"),
    ],
)
def test_settings_of_another_model_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], sizes: dict[str, Any], words: str
) -> None:
    view = outlook(written(tmp_path, **more), **sizes)
    [warning] = view.warnings()
    assert words in warning
    assert not list(outlook(written(tmp_path)).warnings())
    announce(view)
    assert f"warning: {warning}" in capsys.readouterr().err
    assert f"warning: {warning}" in (tmp_path / "settings.txt").read_text()


def test_a_draft_vocabulary_is_judged_by_what_it_covers_and_data_by_its_size(tmp_path: Path) -> None:
    """Of a real vocabulary 97 tokens may be enough; 200 answer tokens never are, and it is said what to expect."""
    covering, lacking = (outlook(written(tmp_path), share, vocab_size=128_256) for share in (1.0, 0.98))
    [little] = covering.warnings()
    assert "200 answer tokens are few: 60,000 gave" in little
    assert "the method ngram" in little
    again, vocabulary = lacking.warnings()
    assert again == little
    assert "a draft vocabulary of 97 tokens covers 98.00% of the answers" in vocabulary


def test_sizes_follow_the_data(tmp_path: Path) -> None:
    """Little data leaves steps enough, and no draft tokens that never occur; sizes of the recipe stay."""

    def row(length: int, tokens: range) -> TokenRow:
        made = np.resize(np.array(tokens), length)
        return TokenRow(made, np.arange(length) >= length // 2, "r")

    large: Any = Pretending(vocab_size=49_152, max_length=8192)
    few = [row(length, range(1500)) for length in (200, 300, 400)] * 100
    settled = sized(written(tmp_path), large, "float32", few)
    assert settled.batch_tokens == 90_000 // 160
    assert settled.shape.draft_vocab_size == 1024
    assert settled.max_length == 4096
    assert sized(written(tmp_path), large, "float32", few[:30]).batch_tokens == 400
    many = sized(written(tmp_path), large, "float32", [row(4000, range(40_000))] * 400)
    assert (many.batch_tokens, many.shape.draft_vocab_size) == (8192, 2048)
    assert sized(written(tmp_path), large, "float32").shape.draft_vocab_size == 32_000
    given = sized(written(tmp_path, batch_tokens=77, shape={"draft_vocab_size": 5000}), large, "float32", few)
    assert (given.batch_tokens, given.shape.draft_vocab_size) == (77, 5000)
    whole = sized(written(tmp_path, shape={"kind": "eagle1"}), large, "float32", few)
    assert whole.shape.draft_vocab_size is None


def test_a_loop_that_says_auto_is_judged_and_logged_often_enough(tmp_path: Path) -> None:
    loop = written(tmp_path, loop={"epochs": None, "steps": 33, "log_every": "auto", "validate_every": "auto"}).loop
    found = resolved(loop, 7, 48, tmp_path, ALONE)
    assert (found.log_every, found.validate_every) == (1, 7)
    long = resolved(loop.model_copy(update={"steps": 100_000}), 7, 48, tmp_path, ALONE)
    assert (long.log_every, long.validate_every) == (50, 1000)


def test_chats_that_are_cut_are_warned_of_with_what_helps(tmp_path: Path) -> None:
    shorter = outlook(written(tmp_path, max_length=200))
    longest = outlook(written(tmp_path))
    assert not list(shorter.warnings())
    [warning] = replace(shorter, cut=CutOff(3, 1200)).warnings()
    assert "3 training chats have more than 200 tokens (max_length), and the 1,200 tokens after that" in warning
    assert "raise max_length" in warning
    [warning] = replace(longest, cut=CutOff(1, 9)).warnings()
    assert "more than 256 tokens" in warning
    assert "the target's context: chats prepared with too_long cut" in warning
    [warning] = replace(shorter, left_out=("chat a: no answer", "chat b: no answer")).warnings()
    assert warning == "2 chats can't be used; the first of them: chat a: no answer"


def test_chats_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    outlook(written(tmp_path, max_length=256))
    with pytest.raises(ConfigError, match="max_length 257 is beyond the target's context of 256 tokens"):
        outlook(written(tmp_path, max_length=257))


def test_a_run_keeps_what_was_resolved(target: Path, chats: Path, tmp_path: Path) -> None:
    """config.yaml is a recipe with nothing open, which resumes the run."""
    values = {
        "target": str(target), "chats": chats, "output": tmp_path, "device": "cpu", "held_out_share": 0.2,
        "validation": {"decode": False}, "loop": {"epochs": 0.5, "accumulate": 2},
    }  # fmt: skip
    train_drafter(DrafterTrainConfig.model_validate(values))
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())["drafter"]
    assert kept["target_dtype"] in ("float32", "bfloat16")
    assert kept["max_length"] == 256
    assert kept["batch_tokens"] < 512  # the few chats are short
    assert kept["shape"]["draft_vocab_size"] is None
    assert kept["loop"]["steps"] == 16
    assert "epochs" not in kept["loop"]
    assert isinstance(kept["loop"]["bf16"], bool)
    kept["loop"]["steps"] = 17
    train_drafter(DrafterTrainConfig.model_validate(kept))
    train_drafter(DrafterTrainConfig.model_validate({**values, "loop": {"steps": 18, "accumulate": 2}}))


def test_a_resumed_run_keeps_the_targets_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "resolve_dtype", lambda *_: torch.float16)
    auto = written(tmp_path)
    assert resolved_dtype(auto, FILES, ALONE) == "float16"
    assert resolved_dtype(written(tmp_path, target_dtype="float32"), FILES, ALONE) == "float32"
    monkeypatch.setattr(resolve, "saved_identity", lambda _: {"target_dtype": "bfloat16"})
    assert resolved_dtype(auto, FILES, ALONE) == "bfloat16"
    assert resolved_dtype(written(tmp_path, target_dtype="float32"), FILES, ALONE) == "float32"


def test_rates_that_follow_the_width_are_no_one_else_s(tmp_path: Path) -> None:
    """What a target 1,024 wide gets is more than is published for larger ones, and is meant for it."""
    automatic = {"kind": "auto", "lr": "auto", "matrix_lr": "auto"}
    view = outlook(written(tmp_path, loop={"optimizer": automatic}), hidden_size=1024)
    assert view.loop.optimizer.lr > 5e-4
    assert not list(view.warnings())
    [optimizer] = [setting for setting in view.settings() if setting.name == "optimizer"]
    assert optimizer.value.startswith("muon, lr 0.001, 0.08 for matrices")
    assert optimizer.origin == "target's width"
