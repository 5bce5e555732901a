"""Verdicts of load trials: the same model isn't tried twice, and any other one is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eyas.cache.folder import cache_directory
from eyas.targets import Target, load_target, trials
from eyas.targets.native import verdicts
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.tree import DraftTree

from ...pairs import save_target

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of models whose layers were tried, in a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EYAS_KEEP", "1")
    found: list[str] = []
    whole = trials.refusal

    def counted(target: Target, native: object) -> str | None:
        found.append(target.config.model_type)
        return whole(target, native)  # type: ignore[arg-type]

    monkeypatch.setattr(trials, "refusal", counted)
    monkeypatch.setattr("eyas.targets.loading.best_layout", lambda *_: NativeLinear)
    return found


def save(path: Path, name: str = "llama") -> Path:
    return save_target(path, name, hidden_size=64, head_dim=16)


def load(path: Path) -> Target:
    return load_target(path, dtype="bfloat16", device="cpu")


@pytest.mark.parametrize(("name", "native"), [("llama", True), ("cohere", False)])
def test_the_same_model_is_tried_once(name: str, native: bool, tmp_path: Path, tried: list[str]) -> None:
    """Also one whose native passes are refused, and one with layers of several RoPE tables."""
    path = save(tmp_path / "model", name)
    first = load(path)
    second = load(path)
    assert tried == [name]
    assert (first.native is not None) == (second.native is not None) == native
    assert first.ragged == second.ragged
    assert torch.equal(logits_of(first), logits_of(second))


def test_which_rope_turns_each_layer_is_kept(tmp_path: Path, tried: list[str]) -> None:
    path = save(tmp_path / "model", "gemma3")
    first = load(path)
    second = load(path)
    assert tried == ["gemma3_text"]
    assert first.native is not None
    assert second.native is not None
    ropes = [layer.rope for layer in first.native._layers]
    assert len(set(ropes)) > 1
    assert [layer.rope for layer in second.native._layers] == ropes
    assert torch.equal(logits_of(first), logits_of(second))


def logits_of(target: Target) -> torch.Tensor:
    cache = target.allocate(2)
    rows = range(2)
    for _ in target.prefill(cache, rows, [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12]], ()):
        pass
    drafted = torch.tensor([[1, 2], [3, 4]])
    valid = torch.tensor([[True, True], [True, False]])
    tree = DraftTree(drafted, torch.tensor([[-1, 0], [-1, 0]]), valid.float(), valid, 2, counted=3)
    return target.verify(cache, rows, torch.tensor([10, 12]), tree, ()).logits.rows


def change_weight(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    from safetensors.torch import load_file, save_file

    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name][-1, -1] += 1.0
    save_file(tensors, file, {"format": "pt"})


def change_config(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    file = path / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def patched(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def change(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verdicts, name, lambda *_: "another")

    return change


def change_setting(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")


def change_threads(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "change",
    [
        change_weight, change_config, change_setting, change_threads,
        patched("source_hash"), patched("processor_model"), patched("processor_flags"), patched("describe_products"),
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_a_verdict_does_not_outlive_what_it_is_about(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    tmp_path: Path,
    tried: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save(tmp_path / "model")
    load(path)
    change(path, monkeypatch)
    load(path)
    assert len(tried) == 2


def test_versions_and_sources_are_part_of_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from eyas.cache import entries

    whole = entries.source_hash()
    entries.source_hash.cache_clear()
    monkeypatch.setattr(entries, "versions", lambda: {"torch": "1.0"})
    other = entries.source_hash()
    entries.source_hash.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(entries, "__file__", str(tmp_path / "entries.py"))
    (tmp_path / "kernel.h").write_text("// another")
    assert len({whole, other, entries.source_hash()}) == 3
    entries.source_hash.cache_clear()


@pytest.mark.parametrize("damage", ["", "null", '{"verdict": 3}', "flipped", "layers"])
def test_a_damaged_verdict_is_named_and_given_anew(
    damage: str, tmp_path: Path, tried: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path / "model")
    load(path)
    (file,) = (cache_directory() / "verdicts").iterdir()
    text = file.read_text()
    changed = {"flipped": text.replace("null", '"no"'), "layers": text.replace("[0, ", "[")}
    file.write_text(changed.get(damage, damage))
    assert load(path).native is not None
    assert len(tried) == 2
    assert str(file) in caplog.text
    assert file.read_text() == text


def test_on_request_every_model_is_tried(tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "model")
    load(path)
    monkeypatch.setenv("EYAS_KEEP", "0")
    load(path)
    assert len(tried) == 2
