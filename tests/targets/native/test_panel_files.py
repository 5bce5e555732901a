"""Panels kept on disk: mapped by the next load, never trusted when damaged, and bounded."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eyas
from eyas.cache import entries
from eyas.errors import ModelError
from eyas.targets import Target, load_target
from eyas.targets.native import panel_files
from eyas.targets.native.library import kernels
from eyas.targets.native.packed_linears import PackedLinear
from eyas.targets.parameters import weight_formats

from ... import gguf_models
from ...pairs import save_drafter, save_target

pytestmark = [
    pytest.mark.usefixtures("_keeps"),
    pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512"),
]
SOURCES: dict[str, dict[str, Any]] = {"Q4_1": {"dtype": "auto"}, "int4": {"quantize": "int4"}}


@pytest.fixture
def _keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EYAS_KEEP", "1")


@pytest.fixture
def panels(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "eyas" / "panels"


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Outputs of the weights that are laid out, not mapped."""
    made: list[int] = []
    write = panel_files._WrittenPanels._write

    def counted(self: Any, kind: Any, out: int, panels: Any) -> None:
        made.append(out)
        write(self, kind, out, panels)

    monkeypatch.setattr(panel_files._WrittenPanels, "_write", counted)
    return made


def model_of(source: str, folder: Path) -> Path:
    if source == "int4":
        return save_target(folder / "model")
    path = folder / "model.gguf"
    if not path.exists():
        gguf_models.write_llama(path, source)
    return path


def weights_of(target: Target) -> list[torch.Tensor]:
    return [part.exact() for part in target.model.modules() if isinstance(part, PackedLinear)]


@pytest.mark.parametrize("source", SOURCES)
def test_the_second_load_maps_what_the_first_one_wrote(
    source: str, tmp_path: Path, panels: Path, laid_out: list[int]
) -> None:
    path = model_of(source, tmp_path)
    first = load_target(path, keep_panels=True, device="cpu", **SOURCES[source])
    count = len(laid_out)
    assert count >= len(weights_of(first)) > 0
    second = load_target(path, keep_panels=True, device="cpu", **SOURCES[source])
    assert len(laid_out) == count
    assert weight_formats(first.model) == weight_formats(second.model)
    for one, other in zip(weights_of(first), weights_of(second), strict=True):
        assert torch.equal(one, other)
    assert len(list(panels.iterdir())) == 1


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def bit_flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[777] ^= 4
    file.write_bytes(data)


def index_of_another(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b", ", b",1", 1))


@pytest.mark.parametrize("damage", [truncated, emptied, bit_flipped, index_of_another])
def test_a_damaged_file_is_named_and_made_anew(
    damage: Callable[[Path], None], tmp_path: Path, panels: Path, laid_out: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    path = model_of("Q4_1", tmp_path)
    expected = weights_of(load_target(path, keep_panels=True, dtype="auto", device="cpu"))
    (file,) = panels.iterdir()
    whole = file.read_bytes()
    damage(file)
    laid_out.clear()
    found = weights_of(load_target(path, keep_panels=True, dtype="auto", device="cpu"))
    assert laid_out
    assert str(file) in caplog.text
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert file.read_bytes() == whole


@pytest.mark.parametrize("change", ["file", "time", "source_hash", "format"])
def test_what_was_made_of_something_else_is_not_used(
    change: str, tmp_path: Path, panels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_of("int4" if change == "format" else "Q4_1", tmp_path)
    options: dict[str, Any] = SOURCES["int4"] if change == "format" else {"dtype": "auto"}
    load_target(path, keep_panels=True, device="cpu", **options)
    if change == "file":  # another value somewhere in the middle; the same size and time
        stat = path.stat()
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "source_hash":
        monkeypatch.setattr(panel_files, "source_hash", lambda: "another")
    else:
        options = {"quantize": "int8"}
    load_target(path, keep_panels=True, device="cpu", **options)
    assert len(list(panels.iterdir())) == 2


def test_the_files_used_last_stay(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "oldest")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "own").write_bytes(bytes(100))
    os.utime(tmp_path / "own", (1, 1))
    entries.prune(tmp_path, 350, tmp_path / "own")
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"own", "new", "old"}


def test_without_room_or_on_request_nothing_is_written(
    tmp_path: Path, panels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_of("Q4_1", tmp_path)
    monkeypatch.setattr(panel_files, "MAX_BYTES", 1000)
    expected = weights_of(load_target(path, keep_panels=True, dtype="auto", device="cpu"))
    monkeypatch.setattr(panel_files, "MAX_BYTES", 1 << 30)
    monkeypatch.setenv("EYAS_KEEP", "0")
    load_target(path, keep_panels=True, dtype="auto", device="cpu")
    assert not list(panels.iterdir())
    monkeypatch.setenv("EYAS_KEEP", "1")
    panels.rmdir()
    panels.write_text("not a folder", encoding="utf-8")
    found = weights_of(load_target(path, keep_panels=True, dtype="auto", device="cpu"))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("source", SOURCES)
def test_unless_asked_for_nothing_is_kept(source: str, tmp_path: Path, panels: Path) -> None:
    load_target(model_of(source, tmp_path), device="cpu", **SOURCES[source])
    assert not panels.exists()


def test_a_load_that_fails_leaves_no_file(tmp_path: Path, panels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ModelError("broken")

    monkeypatch.setattr("eyas.targets.loading.finish_dequantized", fail)
    with pytest.raises(ModelError, match="broken"):
        load_target(model_of("Q4_1", tmp_path), keep_panels=True, dtype="auto", device="cpu")
    assert not list(panels.iterdir())


def test_a_hash_of_contents_sees_every_change() -> None:
    data = torch.arange(3 * 8 * entries._CHUNK // 2 + 5, dtype=torch.int64).to(torch.uint8).numpy()
    whole = entries.content_hash(data)
    for at in (0, 9, 8 * entries._CHUNK, len(data) - 1):
        data[at] ^= 128
        assert entries.content_hash(data) != whole
        data[at] ^= 128
    data[:8], data[8:16] = data[8:16].copy(), data[:8].copy()  # words that change places
    assert entries.content_hash(data) != whole
    assert entries.content_hash(data[:-1]) != entries.content_hash(data)
    assert entries.content_hash(data[:0]) != entries.content_hash(data[:8] * 0)


def test_a_drafter_s_panels_are_kept_too(tmp_path: Path, panels: Path, laid_out: list[int]) -> None:
    model = save_target(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter")
    engines = [eyas.load(model, drafter, tree="chain:2", device="cpu", draft_quantize="int8") for _ in range(2)]
    assert len(list(panels.iterdir())) == 1
    networks = [engine.speculation.drafter.network for engine in engines if engine.speculation is not None]
    parts = [[part for part in network.modules() if isinstance(part, PackedLinear)] for network in networks]
    assert len(laid_out) == len(parts[0]) > 0
    for one, other in zip(*parts, strict=True):
        assert torch.equal(one.exact(), other.exact())


def test_another_layout_of_a_drafter_s_weights_is_another_file(tmp_path: Path, panels: Path) -> None:
    model = save_target(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter")
    for quantize in ("int8", "int4"):
        engine = eyas.load(model, drafter, tree="chain:2", device="cpu", draft_quantize=quantize)
        assert engine.speculation is not None
        parts = engine.speculation.drafter.network.modules()
        assert all(part.blocks().kind.bits == int(quantize[3:]) for part in parts if isinstance(part, PackedLinear))
    assert len(list(panels.iterdir())) == 2


def test_a_first_load_says_what_it_writes_and_a_later_one_nothing(
    tmp_path: Path, panels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write_llama(path, "Q4_1")
    with caplog.at_level(logging.INFO, "eyas.loading"):
        load_target(path, keep_panels=True, dtype="auto")
    said = [record.getMessage() for record in caplog.records if record.name == "eyas.loading"]
    (file,) = panels.glob("*.panels")
    assert said[0].startswith(f"reading the config and tokenizer of {path}")
    assert f"packing the weights for this processor, kept in {file} for later starts" in said
    assert any(
        re.fullmatch(rf"wrote \d+ MB of packed weights to {file} \(EYAS_KEEP=0 keeps nothing\)", one) for one in said
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "eyas.loading"):
        load_target(path, keep_panels=True, dtype="auto")
    assert not [record for record in caplog.records if record.name == "eyas.loading"]
