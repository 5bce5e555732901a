"""Drafters on their way into other engines: read as they lie there, exported first, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.drafters.checkpoint import save_network
from eyas.errors import DrafterMismatchError, ExportError, ModelError, UsageError
from eyas.interop.export.export import export
from eyas.interop.export.subject import Serving
from eyas.interop.serving.engines import ENGINES
from eyas.interop.serving.speculation import Wish, drafting

from ..export.test_table import build

IDS = "eagle_aux_hidden_state_layer_ids"
CONSUMER = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "gguf"}


def drafter(path: Path, serving: Serving, name: str = "eagle3, full") -> Path:
    network = build(name)
    if "shared" in (network.config.embedding, network.config.head):
        network.borrow(serving.ends)
    save_network(network, path)
    return path


def wish(path: Path, serving: Serving, **more: Any) -> Wish:
    return Wish(path, str(path), serving.name, lambda: serving, **more)


def reasons(engine: str, path: Path, serving: Serving) -> set[str]:
    """What stands in the way, by the first word."""
    try:
        drafting(ENGINES[engine], wish(path, serving))
    except ExportError as error:
        text = str(error)
        assert f"eyas export {path} --to {CONSUMER[engine]} --output DIR --target {serving.name}" in text
        return {
            line.strip().split(":")[0]
            for line in text.splitlines()
            if line.startswith("  ") and "eyas export" not in line
        }
    return set()


@pytest.fixture
def edited(serving: Serving, tmp_path: Path) -> Callable[..., Path]:
    """A drafter in vLLM's form whose config.json or tensors were changed afterwards."""

    def make(change: Callable[[dict[str, Any]], Any], consumer: str = "vllm", name: str = "eagle3, full") -> Path:
        place = tmp_path / "edited"
        export(drafter(tmp_path / "original", serving, name), consumer, place, serving)
        config = json.loads((place / "config.json").read_text())
        change(config)
        (place / "config.json").write_text(json.dumps(config))
        return place

    return make


@pytest.mark.parametrize(
    "name", ["eagle3, full", "eagle3, theta", "eagle3, llama3", "eagle3", "mla", "eagle1, no bias"]
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_was_exported_is_read(name: str, engine: str, serving: Serving, tmp_path: Path) -> None:
    if (name, engine) == ("eagle1, no bias", "sglang"):
        name = "eagle1"
    export(drafter(tmp_path / "d", serving, name), engine, tmp_path / "out", serving)
    found = drafting(ENGINES[engine], wish(tmp_path / "out", serving))
    assert (found.place, found.plan) == (str(tmp_path / "out"), (3, 1, 3))


def test_speculators_form_is_vllms_too(serving: Serving, tmp_path: Path) -> None:
    export(drafter(tmp_path / "d", serving), "speculators", tmp_path / "out", serving)
    assert reasons("vllm", tmp_path / "out", serving) == set()
    assert "architectures" in reasons("sglang", tmp_path / "out", serving)


def test_our_own_form_is_vllms_but_not_sglangs(serving: Serving, tmp_path: Path) -> None:
    path = drafter(tmp_path / "d", serving)
    if reasons("vllm", path, serving):  # only a table of positions that is too short for the target
        assert reasons("vllm", path, serving) == {"max_position_embeddings"}
    assert IDS in reasons("sglang", path, serving)  # boundaries, which it would take for outputs


# what is done to a config.json in vLLM's form -> what is told
EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nested layer numbers only": (lambda c: c.pop(IDS), IDS),
    "no layer numbers at all": (lambda c: [c.pop(key) for key in (IDS, "taps", "eagle_config")], ""),
    "an architecture of another engine": (lambda c: c.update(architectures=["Eagle3Speculator"]), "architectures"),
    "too few positions": (lambda c: c.update(max_position_embeddings=64), "max_position_embeddings"),
    "positions not said": (lambda c: c.pop("max_position_embeddings"), ""),
}


@pytest.mark.parametrize("name", EDITS)
def test_files_that_vllm_would_misread(name: str, edited: Callable[..., Path], serving: Serving) -> None:
    change, told = EDITS[name]
    assert reasons("vllm", edited(change), serving) == ({told} if told else set())


def test_a_missing_draft_vocabulary_and_scaling_are_told_for_sglang(
    edited: Callable[..., Path], serving: Serving
) -> None:
    def change(config: dict[str, Any]) -> None:
        del config["draft_vocab_size"], config["rope_theta"], config["rope_scaling"]

    assert reasons("sglang", edited(change, "sglang", "eagle3, llama3"), serving) == {
        "draft_vocab_size", "rope_theta", "rope_scaling",
    }  # fmt: skip


def test_absolute_vocabulary_ids_are_told(serving: Serving, tmp_path: Path) -> None:
    place = tmp_path / "out"
    export(drafter(tmp_path / "d", serving, "eagle3"), "vllm", place, serving)
    tensors = load_file(place / "model.safetensors")
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    save_file(tensors, place / "model.safetensors")
    assert reasons("vllm", place, serving) == {"d2t"}


def test_what_no_export_mends_is_refused_by_field(serving: Serving, tmp_path: Path) -> None:
    path = drafter(tmp_path / "d", serving, "eagle3, norm_before_residual")
    with pytest.raises(ExportError, match=r"SGLang can't represent(.|\n)*norm_before_residual"):
        drafting(ENGINES["sglang"], wish(path, serving, export_to=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_exported_first_and_found_again(serving: Serving, tmp_path: Path) -> None:
    path, place = drafter(tmp_path / "d", serving), tmp_path / "out"
    first = drafting(ENGINES["sglang"], wish(path, serving, export_to=place))
    written = (place / "model.safetensors").stat().st_mtime_ns
    assert first.place == str(place)
    assert reasons("sglang", place, serving) == set()
    again = drafting(ENGINES["sglang"], wish(path, serving, export_to=place))
    assert (again, (place / "model.safetensors").stat().st_mtime_ns) == (first, written)
    other = drafter(tmp_path / "other", serving, "eagle3")
    with pytest.raises(UsageError, match="holds something else"):
        drafting(ENGINES["sglang"], wish(other, serving, export_to=place))


def test_what_is_read_already_is_not_exported(serving: Serving, tmp_path: Path) -> None:
    export(drafter(tmp_path / "d", serving), "vllm", tmp_path / "form", serving)
    found = drafting(ENGINES["vllm"], wish(tmp_path / "form", serving, export_to=tmp_path / "out", tree="chain:7"))
    assert (found.place, found.plan) == (str(tmp_path / "form"), (7, 1, 7))
    assert not (tmp_path / "out").exists()


def test_the_method_must_be_the_drafters(serving: Serving, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="eagle3 drafter, not mla"):
        drafting(ENGINES["vllm"], wish(drafter(tmp_path / "d", serving), serving, method="mla"))


def gguf_target(path: Path, **values: Any) -> str:
    """A file with what llama.cpp's converter says of a target, without weights."""
    gguf = pytest.importorskip("gguf")
    file = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 8, "embedding_length": 32, "vocab_size": 0} | values
    for key, value in sizes.items():
        if value is not None:
            file.add_uint32(f"llama.{key}", value)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return str(path)


def test_llama_cpp(serving: Serving, tmp_path: Path) -> None:
    vocab = serving.ends.vocab_size
    target = gguf_target(tmp_path / "t.gguf", vocab_size=vocab)
    path, place, engine = drafter(tmp_path / "d", serving), tmp_path / "out", ENGINES["llama.cpp"]

    def asked(drafter: Path, target: str = target, **more: Any) -> Any:
        return drafting(engine, Wish(drafter, str(drafter), target, lambda: serving, **more))

    with pytest.raises(ExportError, match=r"not a GGUF file\n(.|\n)*--to gguf --output DIR --target TARGET"):
        asked(path)
    first = asked(path, export_to=place)
    assert first.place == str(place / "drafter.gguf")
    assert asked(place) == asked(place / "drafter.gguf") == asked(path, export_to=place) == first
    with pytest.raises(ExportError, match=r"llama\.cpp can't represent(.|\n)*fc_norm: it has no fc_norm"):
        asked(drafter(tmp_path / "norm", serving, "eagle3, fc_norm"))
    with pytest.raises(DrafterMismatchError, match="vocabulary has"):
        asked(place, gguf_target(tmp_path / "u.gguf", vocab_size=vocab + 1))
    with pytest.raises(DrafterMismatchError, match=r"outside the target's boundaries 0\.\.4"):
        asked(place, gguf_target(tmp_path / "v.gguf", vocab_size=vocab, block_count=4))
    with pytest.raises(ModelError, match=r"convert_hf_to_gguf\.py"):
        asked(place, serving.name)
    with pytest.raises(ModelError, match="doesn't say how many"):
        asked(place, gguf_target(tmp_path / "w.gguf", block_count=None))
    with pytest.raises(ModelError, match="is a drafter"):
        asked(place, str(place / "drafter.gguf"))
    assert reasons("vllm", place, serving) == {"it is a GGUF file, not a directory with config.json"}
