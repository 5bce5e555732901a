"""Windows by layer in files of EAGLE-3 and P-EAGLE: as speculators and vLLM write them, and files that lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.drafters.checkpoint import load_network, open_checkpoint, save_network
from eyas.drafters.files import read_json
from eyas.drafters.network import set_vocabulary
from eyas.drafters.window.layers import SlidingWindow
from eyas.errors import ExportError, EyasError
from eyas.interop.export.drafter import ServedTarget
from eyas.interop.export.export import export
from eyas.interop.inspect.report import report_drafter

from .. import tiny
from ..pairs import tokenizer
from . import restated as re

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW: dict[str, Any] = {"sliding_window": 16, "use_sliding_window": True, "layer_types": [SLIDING]}


def tensors(kind: str, layers: int = 1, norms: bool = False) -> re.Tensors:
    shapes = re.third(re.grouped(2 * re.H, "layers.0", norms=norms))
    for i in range(1, layers):
        at = f"layers.{i}"
        shapes |= re.grouped(re.H, at, norms=norms) | re.mlp(at) | {f"{at}.input_layernorm.weight": (re.H,)}
    shapes["embed_tokens.weight"] = (re.V, re.H)
    if kind == "peagle":
        shapes["mask_hidden"] = (1, 1, 3 * re.H)
    d2t, covered = re.offsets()
    return re.numbers(shapes) | {"d2t": d2t, "t2d": covered}


def library(kind: str, layers: int = 1, model_type: str = "llama", **layer: Any) -> dict[str, Any]:
    """A config.json of speculators, whose training script writes windows into the layer's section."""
    shape = {
        "model_type": model_type, "hidden_size": re.H, "intermediate_size": re.MLP, "num_attention_heads": re.N,
        "num_key_value_heads": re.KV, "head_dim": re.D, "num_hidden_layers": layers, "vocab_size": re.V,
        "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, **layer,
    }  # fmt: skip
    return {
        "architectures": ["x"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "transformer_layer_config": {key: value for key, value in shape.items() if value is not ...},
        "draft_vocab_size": re.VD, "eagle_aux_hidden_state_layer_ids": [2, 4, 6], "norm_before_residual": False,
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": 4}]},
        **({"mask_token_id": 7} if kind == "peagle" else {}),
    }  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_speculators(kind: str, model_type: str, tmp_path: Path) -> None:
    """It trains EAGLE-3 with windows from where a draft begins, P-EAGLE with windows from each guess."""
    config = library(kind, 2, model_type, **{**WINDOW, "layer_types": [SLIDING, FULL]})
    opened = open_checkpoint(re.directory(tmp_path, config, tensors(kind, 2, model_type == "qwen3")))
    assert opened.kind.name == kind
    assert opened.config.layer_windows == (SlidingWindow(16, kind == "eagle3", whole_draft=True), None)
    assert opened.report.doubts == []
    assert {f"transformer_layer_config.{key}" for key in WINDOW} <= set(opened.report.used)
    reach = "16 positions before the draft" if kind == "eagle3" else "16 positions"
    assert report_drafter(tmp_path).windows == [f"layer 0: {reach}", "layer 1: all positions"]


@pytest.mark.parametrize("written", [True, ...])
def test_llama_layers_need_no_switch(written: Any, tmp_path: Path) -> None:
    """A LlamaConfig has no `use_sliding_window`: vLLM and speculators go by `layer_types` alone."""
    config = library("eagle3", **{**WINDOW, "use_sliding_window": written})
    assert open_checkpoint(re.directory(tmp_path, config, tensors("eagle3"))).config.sliding_window == 16


NATIVE: dict[str, tuple[int, dict[str, Any], Any]] = {
    # layers, keys -> the windows, or why the file is refused
    "all": (1, WINDOW, [16]),
    "by layer": (2, {**WINDOW, "layer_types": [FULL, SLIDING]}, [None, 16]),
    "off": (1, {"sliding_window": 16, "use_sliding_window": False}, [None]),
    "the target's list": (1, {"layer_types": [FULL] * 9}, [None]),
    "no window": (1, {**WINDOW, "sliding_window": ...}, "sliding_window is missing"),
    "no types": (1, {"sliding_window": 16}, "which layers have it"),
    "no types, switched on": (1, {**WINDOW, "layer_types": ...}, "which layers have it"),
    "switched off": (1, {**WINDOW, "use_sliding_window": False}, "use_sliding_window is false"),
    "too many types": (1, {**WINDOW, "layer_types": [SLIDING] * 2}, "layer_types names 2 layers"),
    "too few types": (2, WINDOW, "layer_types names 1 layers"),
    "too few, all full": (2, {"layer_types": [FULL]}, "layer_types names 1 layers"),
    "unknown type": (1, {**WINDOW, "layer_types": ["chunked_attention"]}, "chunked_attention"),
    "no list": (1, {**WINDOW, "layer_types": 5}, "layer_types"),
    "a list of lists": (1, {**WINDOW, "layer_types": [[SLIDING]]}, "layer_types"),
    "negative": (1, {**WINDOW, "sliding_window": -1}, "sliding_window"),
    "a fraction": (1, {**WINDOW, "sliding_window": 16.5}, "sliding_window"),
    "true": (1, {**WINDOW, "sliding_window": True}, "sliding_window"),
    "vast": (1, {**WINDOW, "sliding_window": 2**62}, "sliding_window"),
    "no number of layers": (1, {**WINDOW, "num_hidden_layers": "many"}, "num_hidden_layers"),
    "two windows": (1, {**WINDOW, "draft_window": 8}, "sliding windows of their own"),
    "anchored nowhere": (1, {"sliding_anchored": True}, "no layer has a window"),
    "another's key": (1, {**WINDOW, "sliding_causal": True}, "unknown key sliding_causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_vllm(name: str, tmp_path: Path) -> None:
    layers, keys, expected = NATIVE[name]
    config = re.llama_config(**{"num_hidden_layers": layers, **keys})
    path = re.directory(tmp_path, config, tensors("eagle3", layers))
    if isinstance(expected, str):
        with pytest.raises(EyasError, match=expected):
            load_network(path)
        return
    found = open_checkpoint(path).config.layer_windows
    assert [None if window is None else window.size for window in found] == expected
    assert not any(window.anchored for window in found if window is not None)
    load_network(path)


@pytest.mark.parametrize("kind", ["eagle1", "mla", "mtp"])
def test_kinds_without_windows_by_layer(kind: str, tmp_path: Path) -> None:
    save_network(tiny.network(kind), tmp_path)
    config = read_json(tmp_path / "config.json") | WINDOW
    re.directory(tmp_path / "b", config, {"x": torch.ones(1)})
    with pytest.raises(EyasError, match="no sliding-window drafter of this kind"):
        open_checkpoint(tmp_path / "b")


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_what_was_read_is_written_in_the_same_form(kind: str, served_target: ServedTarget, tmp_path: Path) -> None:
    """An export of a file of speculators for speculators; its windows are named where another form can't have them."""
    size = len(tokenizer())
    windows = {**WINDOW, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    made = tiny.network(
        kind,
        vocab_size=size,
        draft_vocab_size=size,
        taps=[2, 4, 5],
        embedding="shared",
        head="shared",
        **windows,
        **({"sliding_anchored": True} if kind == "eagle3" else {"num_depths": 4}),
    )
    set_vocabulary(made, torch.arange(size))
    save_network(made, tmp_path / "own")
    assert open_checkpoint(tmp_path / "own").config == made.config
    done = export(tmp_path / "own", "speculators", tmp_path / "library", served_target)
    config = read_json(done.path / "config.json")
    layer = config["transformer_layer_config"]
    assert {key: layer[key] for key in WINDOW} == {key: windows[key] for key in WINDOW}
    assert not {"sliding_anchored", "sliding_window_non_causal"} & config.keys()
    assert open_checkpoint(done.path).config.layer_windows == made.config.layer_windows
    if kind == "eagle3":
        with pytest.raises(ExportError, match=r"sliding_window: .*from each guess"):
            export(tmp_path / "own", "vllm", tmp_path / "vllm", served_target)
        return
    config = read_json(export(tmp_path / "own", "vllm", tmp_path / "vllm", served_target).path / "config.json")
    assert {key: config[key] for key in WINDOW} == {key: windows[key] for key in WINDOW}
