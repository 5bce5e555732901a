"""Block drafters' files as SpecForge, speculators and llama.cpp write them, by hand; and what their exports hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.drafters.checkpoint import open_checkpoint, save_network
from eyas.drafters.files import read_json
from eyas.drafters.network import set_vocabulary
from eyas.drafters.window.layers import SlidingWindow
from eyas.errors import ExportError, EyasError, UsageError
from eyas.gguf import Gguf
from eyas.interop.export.drafter import ServedTarget
from eyas.interop.export.export import export
from eyas.interop.inspect.report import report_drafter
from eyas.interop.serving.engines import ENGINES
from eyas.interop.serving.speculation import SpeculationRequest, served_drafter

from .. import tiny
from ..pairs import tokenizer
from . import restated as re

RANK = 8
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output",
    "embed_tokens": "token_embd", "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}  # fmt: skip


def tensors(*, markov: bool = False, own: bool = True, layers: int = 2, vd: int = re.VD) -> re.Tensors:
    """A block drafter's, under native names."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (re.H, 3 * re.H), "hidden_norm.weight": (re.H,)}
    for i in range(layers):
        layer = f"layers.{i}"
        shapes |= re.grouped(re.H, layer, norms=True) | re.mlp(layer) | {f"{layer}.input_layernorm.weight": (re.H,)}
    shapes["norm.weight"] = (re.H,)
    shapes |= {"embed_tokens.weight": (re.V, re.H), "lm_head.weight": (vd, re.H)} if own else {}
    if markov:
        shapes |= {"markov_head.markov_w1.weight": (re.V, RANK), "markov_head.markov_w2.weight": (vd, RANK)}
        shapes |= {"confidence_head.proj.weight": (1, re.H + RANK), "confidence_head.proj.bias": (1,)}
    return re.numbers(shapes)


def specforge(**nested: Any) -> dict[str, Any]:
    """SpecForge's config.json, which keeps the target's `tie_word_embeddings`."""
    base = re.llama_config(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        draft_vocab_size=...,
        num_hidden_layers=2,
        block_size=5,
        num_target_layers=9,
        tie_word_embeddings=True,
        layer_types=["full_attention"] * 2,
        max_window_layers=2,
        use_sliding_window=False,
        sliding_window=None,
        rope_scaling=None,
    )
    return base | {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 5], **nested}}


DSPARK = {
    "attention_mode": "gqa", "projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "vanilla",
    "confidence_head_alpha": 1.0, "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip


def test_specforge(tmp_path: Path) -> None:
    opened = open_checkpoint(re.directory(tmp_path / "a", specforge(), tensors(own=False)), layers=9)
    assert (opened.kind.name, opened.config.taps, opened.config.block_size) == ("dflash", (2, 4, 6), 5)
    assert "tie_word_embeddings" in opened.report.ignored
    config = specforge(**DSPARK) | {"architectures": ["DSparkDraftModel"]}
    opened = open_checkpoint(re.directory(tmp_path / "b", config, tensors(own=False, markov=True, vd=re.V)), layers=9)
    assert (opened.kind.name, opened.config.markov_rank, opened.config.guesses) == ("dspark", RANK, 5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"dflash_config": {"projector_type": "domino"}}, "projector_type"),
     ({"dflash_config": {"use_swa": True}}, "use_swa"),
     ({"dflash_config": {"attention_value_scale": 0.5}}, "attention_value_scale"),
     ({"logit_scale": 2.0}, "logit_sc")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_other_networks_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = specforge(**change.get("dflash_config", {})) | {k: v for k, v in change.items() if k != "dflash_config"}
    with pytest.raises(EyasError, match=reason):
        open_checkpoint(re.directory(tmp_path, config, tensors(own=False)), layers=9)


_TYPES = ["sliding_attention", "full_attention"]
_QWEN36 = {"layer_types": _TYPES, "use_sliding_window": True, "sliding_window": 16}
WINDOWS: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[bool, int | None]] | str]] = {
    # keys at the top level, in dflash_config -> (causal, window) of each layer, or why the file is refused
    "qwen3.6": (_QWEN36, {}, [(True, 16), (False, None)]),
    "both ways": ({**_QWEN36, "is_causal": False}, {}, [(False, 16), (False, None)]),
    "all causal": (_QWEN36, {"causal": True}, [(True, 16), (True, None)]),
    "use_swa": ({"layer_types": None}, {"use_swa": True, "swa_window_size": 16}, [(False, 16)] * 2),
    "use_swa, types": ({"layer_types": _TYPES}, {"use_swa": True, "swa_window_size": 16}, [(True, 16), (False, None)]),
    "the last": ({**_QWEN36, "layer_types": None, "max_window_layers": 1}, {}, [(False, None), (True, 16)]),
    "none": ({**_QWEN36, "layer_types": None, "max_window_layers": 28}, {}, [(False, None)] * 2),
    "off": ({"sliding_window": 16}, {}, [(False, None)] * 2),
    "no window": ({**_QWEN36, "sliding_window": None}, {}, "sliding_window is missing"),
    "switched off": ({**_QWEN36, "use_sliding_window": False}, {}, "use_sliding_window is false"),
    "too few types": ({**_QWEN36, "layer_types": _TYPES[:1]}, {}, "names 1 layers"),
    "unknown type": ({**_QWEN36, "layer_types": ["chunked_attention"] * 2}, {}, "chunked_attention"),
    "no types": ({"sliding_window": 16, "use_sliding_window": None, "layer_types": None}, {}, "which layers"),
    "two answers": ({**_QWEN36, "is_causal": False}, {"causal": True}, "readers take different ones"),
    "no answer": ({**_QWEN36, "is_causal": "sometimes"}, {}, "is_causal"),
    "two windows": (_QWEN36, {"use_swa": True, "swa_window_size": 8}, "keep one"),
    "useless use_swa": ({}, {"use_swa": True, "swa_window_size": 8}, "use_swa is true"),
    "negative": ({**_QWEN36, "sliding_window": -1}, {}, "sliding_window"),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_by_layer(name: str, tmp_path: Path) -> None:
    top, nested, expected = WINDOWS[name]
    config = {key: value for key, value in (specforge(**nested) | top).items() if value is not None}
    path = re.directory(tmp_path, config, tensors(own=False))
    if isinstance(expected, str):
        with pytest.raises(EyasError, match=expected):
            open_checkpoint(path, layers=9)
        return
    opened = open_checkpoint(path, layers=9)
    found = [(view.causal, None if view.window is None else view.window.size) for view in opened.config.views]
    assert found == expected
    assert len(opened.report.doubts) == (name == "none")
    assert len(report_drafter(path).windows) == (0 if name in ("none", "off") else 2)


def test_a_mask_embedding_in_a_pickle_is_refused(tmp_path: Path) -> None:
    (re.directory(tmp_path, specforge(), tensors(own=False)) / "mask_embedding.pt").write_bytes(b"x")
    with pytest.raises(EyasError, match=r"mask_embedding\.pt"):
        open_checkpoint(tmp_path, layers=9)


def library(name: str, **changes: Any) -> dict[str, Any]:
    """A config.json of speculators; its layer leaves out what are Qwen3's defaults."""
    layer = {"model_type": "qwen3", "hidden_size": re.H, "intermediate_size": re.MLP, "num_attention_heads": re.N,
             "num_key_value_heads": re.KV, "head_dim": re.D, "num_hidden_layers": 2, "vocab_size": re.V}  # fmt: skip
    config = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": name, "speculators_version": "0.5.0",
        "transformer_layer_config": layer, "draft_vocab_size": re.VD, "block_size": 5, "mask_token_id": 7,
        "aux_hidden_state_layer_ids": [2, 4, 6], "sliding_window_non_causal": False, "target_hidden_size": None,
        "speculators_config": {"algorithm": name, "proposal_methods": [], "verifier": {"name_or_path": "x"}},
    }  # fmt: skip
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def test_speculators(tmp_path: Path) -> None:
    """Layer numbers are boundaries there; a DSpark file without `sample_from_anchor` can be read in two ways."""
    d2t, covered = re.offsets()
    mapped = {"d2t": d2t, "t2d": covered}
    opened = open_checkpoint(re.directory(tmp_path / "a", library("dflash"), tensors() | mapped))
    assert (opened.kind.name, opened.config.taps, opened.config.rms_norm_eps) == ("dflash", (2, 4, 6), 1e-6)
    assert opened.report.ignored["sliding_window_non_causal"]
    assert opened.report.doubts == []
    assert torch.equal(opened.network().state_dict()["d2t"], d2t)
    heads = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
    for written in (True, False, ...):
        config = library("dspark", **heads, sample_from_anchor=written)
        opened = open_checkpoint(re.directory(tmp_path / f"{written}", config, tensors(markov=True) | mapped))
        assert opened.kind.name == "dspark"
        assert opened.config.sample_from_anchor is (written is True)
        assert len(opened.report.doubts) == (written is ...)
    for key in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids"):
        with pytest.raises(EyasError, match=key):
            open_checkpoint(re.directory(tmp_path / key, library("dflash", **{key: ...}), tensors() | mapped))
    with pytest.raises(EyasError, match="unknown key swirl"):
        open_checkpoint(re.directory(tmp_path / "x", library("dflash", swirl=1), tensors() | mapped))


@pytest.mark.parametrize("written", [True, False, ...])
def test_windows_of_speculators_begin_at_the_anchor(written: Any, tmp_path: Path) -> None:
    """Layers with a window are causal unless the file says otherwise; vLLM takes a missing key the other way."""
    config = library("dflash", sliding_window_non_causal=written, draft_vocab_size=re.V)
    config["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "use_sliding_window": True,
    }  # fmt: skip
    opened = open_checkpoint(re.directory(tmp_path, config, tensors(vd=re.V)))
    assert [(view.causal, view.window) for view in opened.config.views] == [
        (written is not True, SlidingWindow(16, anchored=True)), (False, None),
    ]  # fmt: skip
    assert len(opened.report.doubts) == (written is ...)
    assert "sliding_window_non_causal" not in opened.report.ignored
    assert report_drafter(tmp_path).windows[0].startswith("layer 0: 16 positions before the draft")


def test_qwen3_layers_have_qwen3_s_numbers_of_heads(tmp_path: Path) -> None:
    config = library("dflash")
    del config["transformer_layer_config"]["num_key_value_heads"]
    with pytest.raises(EyasError, match="heads can't share 32 key-value heads"):
        open_checkpoint(re.directory(tmp_path, config, tensors()))


KEYS: dict[str, Any] = {
    "general.architecture": "dflash", "dflash.context_length": 512, "dflash.embedding_length": re.H,
    "dflash.block_count": 2, "dflash.feed_forward_length": re.MLP, "dflash.attention.head_count": re.N,
    "dflash.attention.head_count_kv": re.KV, "dflash.attention.key_length": re.D, "dflash.attention.value_length": re.D,
    "dflash.attention.layer_norm_rms_epsilon": 1e-5, "dflash.rope.freq_base": 5000.0, "dflash.block_size": 5,
    "dflash.target_layers": [2, 4, 6], "tokenizer.ggml.mask_token_id": 7,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(re.V)],
}  # fmt: skip


def gguf(path: Path, found: dict[str, Tensor], **keys: Any) -> Path:
    named = {}
    for name, tensor in found.items():
        stem, _, end = name.rpartition(".")
        if name.startswith("="):  # as it is
            named[name[1:]] = tensor
        elif name.startswith("layers."):
            _, number, part = stem.split(".", 2)
            named[f"blk.{number}.{NAMES[part]}.{end}"] = tensor
        else:
            named[f"{OUTER[stem]}.{end}" if stem else name] = tensor
    values = {key: value for key, value in {**KEYS, **keys}.items() if value is not ...}
    path.write_bytes(re.gguf_bytes(values, named))
    return path


def test_gguf(tmp_path: Path) -> None:
    """Rows of queries and keys stay as they are; `d2t` holds target ids."""
    d2t, _ = re.offsets()
    ids = {"d2t": d2t + torch.arange(re.VD)}
    sections = {"dflash.rope.dimension_sections": [re.D // 2, 0, 0, 0], "dflash.attention.causal": False}
    for markov in (False, True):
        ours = tensors(markov=markov)
        more = {"dflash.sample_from_anchor": False, "dflash.has_confidence_head": True} if markov else sections
        opened = open_checkpoint(gguf(tmp_path / f"{markov}.gguf", ours | ids, **more))
        assert opened.kind.name == ("dspark" if markov else "dflash")
        assert (opened.config.taps, opened.config.mask_token_id, opened.config.guesses) == ((2, 4, 6), 7, 4)
        found = opened.network().state_dict()
        assert torch.equal(found.pop("d2t"), d2t)
        assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())


_WINDOW = {"dflash.attention.sliding_window": 64, "dflash.attention.sliding_window_pattern": [True, False]}


@pytest.mark.parametrize("causal", [True, False, ...])
def test_a_gguf_file_with_windows(causal: Any, tmp_path: Path) -> None:
    """Without a word about causality it is as z-lab's code has it, with a doubt: llama.cpp reads it otherwise."""
    opened = open_checkpoint(
        gguf(tmp_path / "a.gguf", tensors(vd=re.V), **_WINDOW, **{"dflash.attention.causal": causal})
    )
    assert [(view.causal, view.window) for view in opened.config.views] == [
        (causal is not False, SlidingWindow(64)), (causal is True, None),
    ]  # fmt: skip
    assert len(opened.report.doubts) == (causal is ...)


def test_gguf_that_would_be_misread_is_refused(tmp_path: Path) -> None:
    plain = tensors(own=False)
    heads = tensors(markov=True, own=False, vd=re.V)
    tied = plain | {"embed_tokens.weight": torch.ones(re.V, re.H)}
    for number, (found, keys, reason) in enumerate(
        (
            (plain, {"dflash.attention.causal": 1}, "attention.causal"),
            (plain, {"dflash.rope.dimension_sections": [2, 1, 0, 0]}, "dimension_sections"),
            (plain, {"dflash.attention.sliding_window": 64}, "sliding_window_pattern need"),
            (plain, {"dflash.attention.sliding_window_pattern": [True, False]}, "sliding_window_pattern need"),
            (plain, {**_WINDOW, "dflash.attention.sliding_window_pattern": [True]}, "each of the 2 layers"),
            (
                plain,
                {**_WINDOW, "dflash.attention.sliding_window": 4, "dflash.attention.causal": False},
                "sees all later",
            ),
            (plain, {"dflash.sample_from_anchor": True}, "sample_from_anchor"),
            (plain, {"dflash.target_layers": ...}, "target_layers"),
            (plain, {"tokenizer.ggml.mask_token_id": ...}, "mask_token_id"),
            (plain, {"dflash.block_count": 1}, r"blk\.1"),
            (plain, {"dflash.block_count": 2**31}, "num_hidden_layers"),
            (tied, {}, "takes the embedding for the head"),
            (heads, {"dflash.has_confidence_head": False}, "has_confidence_head"),
        )
    ):
        with pytest.raises(EyasError, match=reason):
            open_checkpoint(gguf(tmp_path / f"{number}.gguf", found, **keys))


_DFLASH2 = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 3}


def dflash2_gguf(path: Path, foreign: dict[str, Tensor] | None = None, **keys: Any) -> tuple[Path, dict[str, Tensor]]:
    """A file as llama.cpp's converter writes it, and its tensors under z-lab's names."""
    taps = _DFLASH2["conv_kernel_size"]
    groups = re.H // _DFLASH2["conv_group_size"]
    names = {
        **{f"layers.{i}.{part}_conv.base_kernel": f"blk.{i}.{short}_conv_base"
           for i in range(2) for part, short in (("attention", "attn"), ("mlp", "ffn"))},
        **{f"layers.{i}.{part}_conv.kernel_projection.weight": f"blk.{i}.{short}_conv_proj.weight"
           for i in range(2) for part, short in (("attention", "attn"), ("mlp", "ffn"))},
        "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight",
        "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    }  # fmt: skip
    shapes = {
        name: (2, taps, re.H) if name.endswith("base_kernel") else
        (2 * taps * groups, re.H) if name.endswith("kernel_projection.weight") else
        (re.V, 5) if name.endswith("codebook") else (5, re.H)
        for name in names
    }  # fmt: skip
    more = re.numbers(shapes, 4)
    given = {f"dflash.{key}": value for key, value in _DFLASH2.items()} | {f"dflash.{k}": v for k, v in keys.items()}
    plain = tensors(vd=re.V)
    named = {names[name]: tensor for name, tensor in more.items()}
    return gguf(
        path, plain | {f"={name}": tensor for name, tensor in (named | (foreign or {})).items()}, **given
    ), plain | more


def test_a_gguf_file_of_dflash2(tmp_path: Path) -> None:
    path, ours = dflash2_gguf(tmp_path / "a.gguf")
    opened = open_checkpoint(path)
    assert (opened.kind.name, opened.config.conv_kernel_size, opened.config.selector_top_k) == ("dflash2", 3, 3)
    found = opened.network().state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())
    for number, (foreign, keys, reason) in enumerate(
        (
            ({}, {"selector_rank": ...}, "selector_rank is None"),
            ({}, {"selector_rank": 6}, "candidate_selector"),
            ({}, {"selector_top_k": True}, "selector_top_k is True"),
            ({}, {"selector_top_k": 2**31}, "selector_top_k"),
            ({}, {"conv_group_size": 5}, "conv_group_size 5 must divide"),
            ({}, {"conv_kernel_size": 2}, "attention_conv"),
            ({}, {"sample_from_anchor": True}, "sample_from_anchor"),
            ({"d2t": torch.arange(re.V)}, {}, "has d2t besides"),
            ({"markov_w1.weight": torch.ones(re.V, 3)}, {}, "has markov_w1.weight besides"),
        )
    ):
        with pytest.raises(EyasError, match=reason):
            open_checkpoint(dflash2_gguf(tmp_path / f"{number}.gguf", foreign, **keys)[0]).network()
    with pytest.raises(EyasError, match=r"selector_rank make it a DFlash 2 drafter, but selector_hidden"):
        open_checkpoint(gguf(tmp_path / "b.gguf", tensors(own=False), **{"dflash.selector_rank": 5}))


def drafter(path: Path, kind: str, **settings: Any) -> Path:
    size = len(tokenizer())
    shared = {"embedding": "shared", "head": "shared"}
    made = tiny.network(kind, vocab_size=size, draft_vocab_size=size, taps=[2, 4, 5], **shared | settings)
    set_vocabulary(made, torch.arange(size))
    save_network(made, path)
    return path


def test_what_the_exports_hold(served_target: ServedTarget, tmp_path: Path) -> None:
    for kind, name in (("dflash", "DFlashDraftModel"), ("dspark", "Qwen3DSparkModel")):
        saved = drafter(tmp_path / kind, kind)
        done = export(saved, "vllm", tmp_path / f"{kind}-vllm", served_target)
        config = read_json(done.path / "config.json")
        section = config["dflash_config"] if kind == "dflash" else config
        assert (section["target_layer_ids"], section["mask_token_id"]) == ([1, 3, 4], 1)
        assert (config["architectures"], config["model_type"], config["num_target_layers"]) == ([name], "qwen3", 8)
        guesses = 4 if kind == "dflash" else 5
        assert f'"method": "{kind}"' in done.command
        assert f'"num_speculative_tokens": {guesses}' in done.command
        tensors = load_file(done.path / "model.safetensors")
        assert not {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"} & set(tensors)
        done = export(saved, "sglang", tmp_path / f"{kind}-sglang", served_target)
        assert done.command.endswith(f"--speculative-num-draft-tokens {guesses + 1}")
        assert f"--speculative-algorithm {kind.upper()} " in done.command
        assert "num-steps" not in done.command
        done = export(saved, "speculators", tmp_path / f"{kind}-library", served_target)
        config = read_json(done.path / "config.json")
        assert (config["speculators_model_type"], config["aux_hidden_state_layer_ids"]) == (kind, [2, 4, 5])
        assert config["sliding_window_non_causal"] is True  # vLLM would run blocks causally
        assert config["sample_from_anchor"] is (kind == "dspark")
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == guesses
        assert "lm_head.weight" in load_file(done.path / "model.safetensors")
        done = export(saved, "gguf", tmp_path / f"{kind}-gguf", served_target)
        assert f"--spec-type draft-{kind} --spec-draft-n-max {guesses}" in done.command


_MIXED = {
    "num_hidden_layers": 2, "sliding_window": 16, "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def test_what_exports_hold_of_windows(served_target: ServedTarget, tmp_path: Path) -> None:
    """Only what the reader computes is written; the export itself reads the folder back and compares."""
    usual = drafter(tmp_path / "usual", "dflash", **_MIXED)
    for consumer in ("vllm", "sglang"):
        config = read_json(export(usual, consumer, tmp_path / consumer, served_target).path / "config.json")
        assert {key: config[key] for key in _MIXED} == _MIXED
        assert "is_causal" not in config
    for consumer in ("speculators", "gguf"):
        with pytest.raises(ExportError, match=r"sliding_window: .*all causal or none is"):
            export(usual, consumer, tmp_path / "no", served_target)
    both_ways = drafter(tmp_path / "both", "dspark", **_MIXED, is_causal=False)
    assert read_json(both_ways / "config.json")["is_causal"] is False
    config = read_json(export(both_ways, "vllm", tmp_path / "both-vllm", served_target).path / "config.json")
    assert config["is_causal"] is False
    done = export(both_ways, "gguf", tmp_path / "both-gguf", served_target)
    keys = Gguf(next(done.path.glob("*.gguf"))).metadata
    assert keys["dflash.attention.sliding_window_pattern"] == [True, False]
    assert (keys["dflash.attention.sliding_window"], keys["dflash.attention.causal"]) == (16, False)
    anchored = drafter(tmp_path / "anchored", "dflash", **_MIXED, is_causal=False, sliding_anchored=True)
    config = read_json(export(anchored, "speculators", tmp_path / "library", served_target).path / "config.json")
    assert config["transformer_layer_config"]["layer_types"] == _MIXED["layer_types"]
    assert config["sliding_window_non_causal"] is True
    with pytest.raises(ExportError, match="from each guess"):
        export(anchored, "vllm", tmp_path / "no", served_target)


def test_an_embedding_without_a_head_becomes_both_for_llama_cpp(served_target: ServedTarget, tmp_path: Path) -> None:
    saved = drafter(tmp_path / "d", "dflash", embedding="own")
    done = export(saved, "gguf", tmp_path / "out", served_target)
    assert done.changes[-1].startswith("the target's head copied into the file: ")


def test_serving(served_target: ServedTarget, tmp_path: Path) -> None:
    """What eyas writes is what vLLM and SGLang read; keys that a reader wouldn't find are named."""

    def served(engine: str, path: Path, tree: str | None = None) -> Any:
        request = SpeculationRequest(path, str(path), served_target.name, lambda: served_target, tree=tree)
        return served_drafter(ENGINES[engine], request)

    for kind in ("dflash", "dspark"):
        saved = drafter(tmp_path / kind, kind, max_position_embeddings=512)
        for engine in ("vllm", "sglang"):
            found = served(engine, saved)
            assert (found.method, found.path, found.plan.depth) == (kind, str(saved), 4 + (kind == "dspark"))
        for tree in ("chain:9", "dynamic:3,2,6"):
            with pytest.raises(UsageError, match="at once"):
                served("sglang", saved, tree)
        library = export(saved, "speculators", tmp_path / f"{kind}-library", served_target).path
        assert served("vllm", library).path == str(library)
    saved = tmp_path / "dspark"
    config = json.loads((saved / "config.json").read_text())
    moved = {key: config.pop(key) for key in ("markov_rank", "target_layer_ids", "mask_token_id")}
    (saved / "config.json").write_text(json.dumps(config | {"dflash_config": moved}))
    with pytest.raises(ExportError, match=r"(?s)markov_rank: .*target_layer_ids: .*mask_token_id: "):
        served("vllm", saved)
    library = tmp_path / "dflash-library"
    config = json.loads((library / "config.json").read_text())
    (library / "config.json").write_text(json.dumps(config | {"sliding_window_non_causal": False}))
    with pytest.raises(ExportError, match="sliding_window_non_causal"):
        served("vllm", library)
