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
from eyas.interop.export.drafter import ServedTarget
from eyas.interop.export.export import export
from eyas.interop.serving.engines import ENGINES
from eyas.interop.serving.speculation import SpeculationRequest, served_drafter

from ..export.test_table import build

IDS = "eagle_aux_hidden_state_layer_ids"
CONSUMER = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "gguf"}


def drafter(path: Path, served_target: ServedTarget, name: str = "eagle3, full") -> Path:
    network = build(name)
    if "shared" in (network.config.embedding, network.config.head):
        network.borrow(served_target.partial)
    save_network(network, path)
    return path


def request_for(path: Path, served_target: ServedTarget, **more: Any) -> SpeculationRequest:
    return SpeculationRequest(path, str(path), served_target.name, lambda: served_target, **more)


def reasons(engine: str, path: Path, served_target: ServedTarget) -> set[str]:
    """What stands in the way, by the first word."""
    try:
        served_drafter(ENGINES[engine], request_for(path, served_target))
    except ExportError as error:
        text = str(error)
        assert f"eyas export {path} --to {CONSUMER[engine]} --output DIR --model {served_target.name}" in text
        return {
            line.strip().split(":")[0]
            for line in text.splitlines()
            if line.startswith("  ") and "eyas export" not in line
        }
    return set()


@pytest.fixture
def edited(served_target: ServedTarget, tmp_path: Path) -> Callable[..., Path]:
    """A drafter in vLLM's form whose config.json or tensors were changed afterwards."""

    def make(change: Callable[[dict[str, Any]], Any], consumer: str = "vllm", name: str = "eagle3, full") -> Path:
        output = tmp_path / "edited"
        export(drafter(tmp_path / "original", served_target, name), consumer, output, served_target)
        config = json.loads((output / "config.json").read_text())
        change(config)
        (output / "config.json").write_text(json.dumps(config))
        return output

    return make


@pytest.mark.parametrize(
    "name", ["eagle3, full", "eagle3, theta", "eagle3, llama3", "eagle3", "mla", "eagle1, no bias"]
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_was_exported_is_read(name: str, engine: str, served_target: ServedTarget, tmp_path: Path) -> None:
    if (name, engine) == ("eagle1, no bias", "sglang"):
        name = "eagle1"
    export(drafter(tmp_path / "d", served_target, name), engine, tmp_path / "out", served_target)
    found = served_drafter(ENGINES[engine], request_for(tmp_path / "out", served_target))
    assert (found.path, found.plan) == (str(tmp_path / "out"), (3, 1, 3))


def test_speculators_form_is_vllms_too(served_target: ServedTarget, tmp_path: Path) -> None:
    export(drafter(tmp_path / "d", served_target), "speculators", tmp_path / "out", served_target)
    assert reasons("vllm", tmp_path / "out", served_target) == set()
    assert "architectures" in reasons("sglang", tmp_path / "out", served_target)


def test_our_own_form_is_vllms_but_not_sglangs(served_target: ServedTarget, tmp_path: Path) -> None:
    path = drafter(tmp_path / "d", served_target)
    if reasons("vllm", path, served_target):  # only a table of positions that is too short for the target
        assert reasons("vllm", path, served_target) == {"max_position_embeddings"}
    assert IDS in reasons("sglang", path, served_target)  # boundaries, which it would take for outputs


# what is done to a config.json in vLLM's form -> what is told
EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nested layer numbers only": (lambda c: c.pop(IDS), IDS),
    "no layer numbers at all": (lambda c: [c.pop(key) for key in (IDS, "taps", "eagle_config")], ""),
    "an architecture of another engine": (lambda c: c.update(architectures=["Eagle3Speculator"]), "architectures"),
    "too few positions": (lambda c: c.update(max_position_embeddings=64), "max_position_embeddings"),
    "positions not said": (lambda c: c.pop("max_position_embeddings"), ""),
}


@pytest.mark.parametrize("name", EDITS)
def test_files_that_vllm_would_misread(name: str, edited: Callable[..., Path], served_target: ServedTarget) -> None:
    change, reason = EDITS[name]
    assert reasons("vllm", edited(change), served_target) == ({reason} if reason else set())


def test_a_missing_draft_vocabulary_and_scaling_are_reported_for_sglang(
    edited: Callable[..., Path], served_target: ServedTarget
) -> None:
    def change(config: dict[str, Any]) -> None:
        del config["draft_vocab_size"], config["rope_theta"], config["rope_scaling"]

    assert reasons("sglang", edited(change, "sglang", "eagle3, llama3"), served_target) == {
        "draft_vocab_size", "rope_theta", "rope_scaling",
    }  # fmt: skip


def test_absolute_vocabulary_ids_are_reported(served_target: ServedTarget, tmp_path: Path) -> None:
    output = tmp_path / "out"
    export(drafter(tmp_path / "d", served_target, "eagle3"), "vllm", output, served_target)
    tensors = load_file(output / "model.safetensors")
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    save_file(tensors, output / "model.safetensors")
    assert reasons("vllm", output, served_target) == {"d2t"}


def test_what_no_export_mends_is_refused_by_field(served_target: ServedTarget, tmp_path: Path) -> None:
    path = drafter(tmp_path / "d", served_target, "eagle3, norm_before_residual")
    with pytest.raises(ExportError, match=r"SGLang can't represent(.|\n)*norm_before_residual"):
        served_drafter(ENGINES["sglang"], request_for(path, served_target, export_to=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_exported_first_and_found_again(served_target: ServedTarget, tmp_path: Path) -> None:
    path = drafter(tmp_path / "d", served_target)
    output = tmp_path / "out"
    first = served_drafter(ENGINES["sglang"], request_for(path, served_target, export_to=output))
    written = (output / "model.safetensors").stat().st_mtime_ns
    assert first.path == str(output)
    assert reasons("sglang", output, served_target) == set()
    again = served_drafter(ENGINES["sglang"], request_for(path, served_target, export_to=output))
    assert (again, (output / "model.safetensors").stat().st_mtime_ns) == (first, written)
    other = drafter(tmp_path / "other", served_target, "eagle3")
    with pytest.raises(UsageError, match="doesn't hold"):
        served_drafter(ENGINES["sglang"], request_for(other, served_target, export_to=output))


def test_what_is_read_already_is_not_exported(served_target: ServedTarget, tmp_path: Path) -> None:
    export(drafter(tmp_path / "d", served_target), "vllm", tmp_path / "form", served_target)
    found = served_drafter(
        ENGINES["vllm"], request_for(tmp_path / "form", served_target, export_to=tmp_path / "out", tree="chain:7")
    )
    assert (found.path, found.plan) == (str(tmp_path / "form"), (7, 1, 7))
    assert not (tmp_path / "out").exists()


def test_the_method_must_be_the_drafters(served_target: ServedTarget, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="of the kind eagle3, not mla"):
        served_drafter(
            ENGINES["vllm"], request_for(drafter(tmp_path / "d", served_target), served_target, method="mla")
        )


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


def test_llama_cpp(served_target: ServedTarget, tmp_path: Path) -> None:
    vocab = served_target.partial.vocab_size
    target = gguf_target(tmp_path / "t.gguf", vocab_size=vocab)
    path = drafter(tmp_path / "d", served_target)
    output = tmp_path / "out"
    engine = ENGINES["llama.cpp"]

    def serve(drafter: Path, target: str = target, **more: Any) -> Any:
        return served_drafter(engine, SpeculationRequest(drafter, str(drafter), target, lambda: served_target, **more))

    with pytest.raises(ExportError, match=r"not a GGUF file\n(.|\n)*--to gguf --output DIR --model TARGET"):
        serve(path)
    first = serve(path, export_to=output)
    assert first.path == str(output / "drafter.gguf")
    assert serve(output) == serve(output / "drafter.gguf") == serve(path, export_to=output) == first
    with pytest.raises(ExportError, match=r"llama\.cpp can't represent(.|\n)*fc_norm: it has no fc_norm"):
        serve(drafter(tmp_path / "norm", served_target, "eagle3, fc_norm"))
    with pytest.raises(DrafterMismatchError, match="vocabulary has"):
        serve(output, gguf_target(tmp_path / "u.gguf", vocab_size=vocab + 1))
    with pytest.raises(DrafterMismatchError, match=r"outside the target's boundaries 0\.\.4"):
        serve(output, gguf_target(tmp_path / "v.gguf", vocab_size=vocab, block_count=4))
    with pytest.raises(ModelError, match=r"convert_hf_to_gguf\.py"):
        serve(output, served_target.name)
    with pytest.raises(ModelError, match="lacks the target's number of"):
        serve(output, gguf_target(tmp_path / "w.gguf", block_count=None))
    with pytest.raises(ModelError, match="is a drafter"):
        serve(output, str(output / "drafter.gguf"))
    assert reasons("vllm", output, served_target) == {"it is a GGUF file, not a directory with config.json"}
