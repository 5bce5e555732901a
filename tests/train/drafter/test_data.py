"""Offline, online and hybrid sources are told apart by the recipe only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.data.capture.capture import Capture, CaptureConfig
from eyas.data.capture.shard import read_rows
from eyas.errors import ConfigError, StoreError
from eyas.targets import load_target, load_tokenizer
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter

from ..conftest import save_target


def recipe(target: Path, output: Path, **source: Any) -> DrafterTrainConfig:
    return DrafterTrainConfig.model_validate(
        {
            "target": str(target),
            "output": output,
            "shape": {"draft_vocab_size": 64},
            "loss": {"unroll": 2},
            "target_dtype": "float32",
            "device": "cpu",
            "batch_tokens": 256,
            "max_length": 128,
            "validation": {"batches": 1, "decode": False},
            "loop": {"steps": 5, "log_every": 1, "bf16": False, "optimizer": {"lr": 0.01}},
            **source,
        }
    )


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line.get("loss", line.get("validation_loss")) for line in lines]


def test_recipes_name_what_their_source_reads(tmp_path: Path) -> None:
    for source, message in (
        ({"source": "offline"}, "offline source needs store"),
        ({"source": "offline", "store": "s", "chats": "c"}, "doesn't read chats"),
        ({"source": "online", "chats": "c", "store": "s"}, "doesn't read store"),
        ({"source": "hybrid", "store": "s"}, "hybrid source needs chats"),
        ({"source": "offline", "store": "s", "held_out_share": 0.1}, "held_out_share"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe(tmp_path, tmp_path, **source)


def test_what_the_loss_leaves_out_is_the_kinds_own(tmp_path: Path) -> None:
    given = recipe(tmp_path, tmp_path, chats="c")
    assert (given.loss.unroll, given.loss.decay, given.loss.token) == (2, 0.8, "ce")
    with pytest.raises(ValueError, match="typo"):
        recipe(tmp_path, tmp_path, chats="c", loss={"typo": 1})


@pytest.fixture(scope="module")
def store(sure_target: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of everything, in full precision."""
    return capture_store(sure_target, chats, tmp_path_factory.mktemp("store"), (1, 3, 4))


def capture_store(target: Path, chats: Path, folder: Path, taps: tuple[int, ...], rows: slice = slice(None)) -> Path:
    found = read_rows(load_tokenizer(target), chats, 0.2, 128, 512)
    found.rows["train"] = found.rows["train"][rows]
    config = CaptureConfig(taps=taps, states="float32")
    capture = Capture(load_target(target), found, config, folder, name="t", chats="c")
    with capture.begun():
        capture.run()
    return folder


def test_all_sources_train_alike(sure_target: Path, chats: Path, store: Path, tmp_path: Path) -> None:
    half = capture_store(sure_target, chats, tmp_path / "half", (1, 3, 4), slice(0, None, 2))
    share = {"chats": chats, "held_out_share": 0.2}
    runs: dict[str, dict[str, Any]] = {
        "online": share,
        "offline": {"store": store},
        "hybrid": {"store": half, **share},
    }
    for name, source in runs.items():
        train_drafter(recipe(sure_target, tmp_path / name, source=name, **source))
    for name in ("offline", "hybrid"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "online"), abs=1e-4)
    facts = [json.loads((tmp_path / name / "drafter" / "config.json").read_text())["eyas"] for name in runs]
    assert len({fact["data_hash"] for fact in facts}) == 1
    assert [fact["taps"] for fact in facts] == [[1, 3, 4]] * 3


def test_a_run_may_go_on_from_a_store(sure_target: Path, chats: Path, store: Path, tmp_path: Path) -> None:
    online = recipe(sure_target, tmp_path, chats=chats, held_out_share=0.2)
    train_drafter(online)
    longer = {**online.loop.model_dump(), "steps": 6}
    train_drafter(recipe(sure_target, tmp_path, source="offline", store=store, loop=longer))
    assert json.loads((tmp_path / "state" / "state.json").read_text())["step"] == 6


def test_a_share_of_the_data_is_its_beginning(sure_target: Path, chats: Path, store: Path, tmp_path: Path) -> None:
    rows = len(read_rows(load_tokenizer(sure_target), chats, 0.2, 128, 512).rows["train"])
    first = capture_store(sure_target, chats, tmp_path / "first", (1, 3, 4), slice(0, round(0.4 * rows)))
    share = recipe(sure_target, tmp_path / "share", source="offline", store=store, data_share=0.4)
    runs = [train_drafter(share), train_drafter(recipe(sure_target, tmp_path / "all", source="offline", store=first))]
    facts = [json.loads((drafter / "config.json").read_text())["eyas"] for drafter in runs]
    assert facts[0]["data_hash"] == facts[1]["data_hash"]
    assert losses(tmp_path / "share") == losses(tmp_path / "all")


def test_the_taps_of_a_store_are_used(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    folder = capture_store(sure_target, chats, tmp_path / "store", (0, 2))
    drafter = train_drafter(recipe(sure_target, tmp_path / "run", source="offline", store=folder))
    assert json.loads((drafter / "config.json").read_text())["eyas"]["taps"] == [0, 2]


def test_a_store_of_another_target_is_refused(target: Path, sure_target: Path, store: Path, tmp_path: Path) -> None:
    decoding = {"batches": 1, "prompts": 1, "max_tokens": 2}
    with pytest.raises(StoreError, match="another target"):
        train_drafter(recipe(target, tmp_path, source="offline", store=store, validation=decoding))
    deeper = save_target(tmp_path / "deeper", embedding=1, layers=6)
    with pytest.raises(StoreError, match=r"4 layers, .* this one has 6 layers"):
        train_drafter(recipe(deeper, tmp_path, source="offline", store=store))
    drafter = train_drafter(recipe(sure_target, tmp_path / "run", source="offline", store=store, validation=decoding))
    assert "decoded_accept_length" in json.loads((drafter / "config.json").read_text())["eyas"]["validation"]


@pytest.mark.parametrize("source", ["online", "offline"])
def test_it_says_how_much_of_the_chats_is_cut(
    source: str, sure_target: Path, chats: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [len(row.tokens) for row in read_rows(load_tokenizer(sure_target), chats, 0.2, None, 512).rows["train"]]
    longest = sorted(lengths)[len(lengths) // 2]
    beyond = [length - longest for length in lengths if length > longest]
    assert 0 < len(beyond) < len(lengths)
    data: dict[str, Any] = {"store": store} if source == "offline" else {"chats": chats, "held_out_share": 0.2}
    train_drafter(recipe(sure_target, tmp_path, source=source, max_length=longest, **data))
    words = (
        f"warning: {len(beyond)} training chats have more than {longest} tokens (max_length), "
        f"and the {sum(beyond)} tokens"
    )
    assert words in capsys.readouterr().err
    assert words in (tmp_path / "settings.txt").read_text()


def test_a_store_needs_no_more_than_the_ends_of_its_target(
    sure_target: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for name in ("ends", "whole"):
        with monkeypatch.context() as patch:
            if name == "ends":
                patch.setattr("eyas.train.drafter.target.load_target", None)
            else:
                patch.setattr("eyas.train.drafter.target.load_embedding_and_head", load_target)
            drafter = train_drafter(recipe(sure_target, tmp_path / name, source="offline", store=store))
            weights.append((drafter / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_no_share_of_a_folder_with_its_own_split(sure_target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split of its own"):
        train_drafter(recipe(sure_target, tmp_path / "run", chats=tmp_path, held_out_share=0.2))
