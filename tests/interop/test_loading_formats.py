"""Each format on checkpoints written by hand, every optional key and tensor both ways."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafters.checkpoint import ABSOLUTE, Checkpoint, open_checkpoint
from eyas.errors import CheckpointError, EyasError

from . import restated as re

IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = {"embed_tokens.weight": (re.V, re.H)}


def read(path: Path, **options: Any) -> tuple[Checkpoint, dict[str, Tensor]]:
    """The checkpoint and its weights; one that needs a target to borrow from is checked up to there."""
    checkpoint = open_checkpoint(path, **options)
    if "shared" in (checkpoint.config.embedding, checkpoint.config.head):
        with pytest.raises(CheckpointError, match="no target was given"):
            checkpoint.network()
        return checkpoint, checkpoint.raw.load()
    return checkpoint, checkpoint.network().state_dict()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(expected) <= set(found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("bias", "qkv", "layers", "head", "pickled"),
    list(product((True, False), (True, False), (1, 2), (True, False), (False, True))),
)
def test_safeailab_eagle1(bias: bool, qkv: bool, layers: int, head: bool, pickled: bool, tmp_path: Path) -> None:
    """The target's own keys, and `bias`, which is true where it isn't written."""
    size = re.H // re.N
    shapes: dict[str, Any] = {"fc.weight": (re.H, 2 * re.H), **EMBEDDING}
    for i in range(layers):
        at = f"layers.{i}.self_attn"
        shapes |= {
            f"{at}.{p}_proj.weight": (rows, re.H)
            for p, rows in (("q", re.H), ("k", re.KV * size), ("v", re.KV * size), ("o", re.H))
        }
        shapes |= {
            f"{at}.{p}_proj.bias": (rows,) for p, rows in (("q", re.H), ("k", re.KV * size), ("v", re.KV * size)) if qkv
        }
        shapes |= re.mlp(f"layers.{i}") | ({f"layers.{i}.input_layernorm.weight": (re.H,)} if i else {})
    shapes |= {"fc.bias": (re.H,)} if bias else {}
    shapes |= {"lm_head.weight": (re.V, re.H)} if head else {}
    tensors = re.numbers(shapes)
    config = re.llama_config(
        architectures=["LlamaForCausalLM"],
        draft_vocab_size=...,
        head_dim=...,
        attention_bias=...,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
    )
    config |= ({} if bias else {"bias": False}) | ({"qkv_bias": True} if qkv else {})
    re.directory(tmp_path, config, tensors, pickled=pickled)
    if pickled:
        with pytest.raises(CheckpointError, match="`draft_weights="):
            open_checkpoint(tmp_path)
    checkpoint, found = read(tmp_path, weights="pytorch_model.bin" if pickled else None)
    same(found, tensors)
    assert checkpoint.kind.name == "eagle1"
    assert checkpoint.config.head == ("own" if head else "shared")
    assert (checkpoint.config.bias, checkpoint.config.qkv_bias, checkpoint.config.head_dim) == (bias, qkv, size)
    assert ("bias" in checkpoint.report.defaulted) == bias


@pytest.mark.parametrize(("reduced", "embedding", "wide", "mid", "t2d"), list(product((True, False), repeat=5)))
def test_safeailab_eagle3(reduced: bool, embedding: bool, wide: bool, mid: bool, t2d: bool, tmp_path: Path) -> None:
    """No layer numbers anywhere: the taps are the reader's default. The map is dropped where it maps nothing."""
    ht, vd = (re.HT, re.VD) if wide else (re.H, re.VD)
    vd = vd if reduced else re.V
    tensors = re.numbers(
        {**re.third(re.grouped(2 * re.H, "layers.0"), ht=ht, vd=vd), **(EMBEDDING if embedding else {})}
    )
    d2t, covered = re.offsets()
    maps = ({"d2t": d2t} | ({"t2d": covered} if t2d else {})) if reduced else {}
    config = re.llama_config(draft_vocab_size=vd, **({"target_hidden_size": re.HT} if wide else {}))
    written = re.midlayer(tensors) if mid else tensors
    checkpoint, found = read(re.directory(tmp_path, config, {**written, **maps}))
    if embedding:
        same(found, tensors | ({"d2t": d2t, "t2d": covered} if reduced else {}))
    assert checkpoint.config.taps is None
    assert checkpoint.config.target_hidden_size == ht
    assert ("target_hidden_size" in checkpoint.report.defaulted) == (not wide)
    assert checkpoint.config.embedding == ("own" if embedding else "shared")
    assert checkpoint.report.convention == ""
    assert checkpoint.report.doubts == []


TOGGLES = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")


def toggled(chosen: dict[str, bool], ht: int = re.H, taps: int = 3) -> dict[str, Any]:
    """The tensors that toggles add or take away."""
    shapes: dict[str, Any] = {f"fc_norm.{i}.weight": (ht,) for i in range(taps)} if chosen.get("fc_norm") else {}
    return shapes | ({"input_norm.weight": (taps * ht,)} if chosen.get("norm_before_fc") else {})


@pytest.mark.parametrize("values", list(product((None, False, True), repeat=2)))
@pytest.mark.parametrize("numbers", ["none", "nested", "taps"])
def test_specforge(values: tuple[bool | None, bool | None], numbers: str, tmp_path: Path) -> None:
    """Numbers are layer outputs, nested; multimodal targets leave an mrope section."""
    chosen = {key: value for key, value in zip(TOGGLES, values, strict=False) if value is not None}
    tensors = re.numbers({**re.third(re.grouped(2 * re.H, "layers.0")), **EMBEDDING, **toggled(chosen)})
    d2t, covered = re.offsets()
    config = re.llama_config(**chosen, target_model_type="qwen3_vl", max_window_layers=48, sliding_window=None,
                             use_sliding_window=False, rope_scaling={"rope_type": "default", "mrope_section": [2,
                             1]})  # fmt: skip
    config |= {
        "nested": {"eagle_config": {IDS: [1, 15, 28], "use_aux_hidden_state": True}},
        "taps": {"taps": [3, 4, 9]},
    }.get(numbers, {})
    checkpoint, found = read(re.directory(tmp_path, config, {**re.midlayer(tensors), "d2t": d2t, "t2d": covered}))
    same(found, tensors | {"d2t": d2t})
    assert checkpoint.config.taps == {"none": None, "nested": (2, 16, 29), "taps": (3, 4, 9)}[numbers]
    assert ("layer outputs" in checkpoint.report.convention) == (numbers == "nested")
    assert "mrope_section" in checkpoint.report.ignored
    assert checkpoint.config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    for key, value in chosen.items():
        assert getattr(checkpoint.config, key) is value
        assert key in checkpoint.report.used
    for key in set(TOGGLES) - set(chosen):
        assert checkpoint.report.defaulted[key] is False


@pytest.mark.parametrize(("queries", "vllm_names", "yarn", "pruned"), list(product((True, False), repeat=4)))
def test_torchspec_mla(queries: bool, vllm_names: bool, yarn: bool, pruned: bool, tmp_path: Path) -> None:
    """`midlayer.*` for SGLang, `layers.0.*` for vLLM; its version among the keys; toggles of ModelOpt spelled out."""
    vd = re.VD if pruned else re.V
    tensors = re.numbers({**re.third(re.latent("layers.0", queries=queries), vd=vd), **EMBEDDING})
    d2t, covered = re.offsets()
    config = re.llama_config(
        architectures=["Eagle3DeepseekV2ForCausalLM"],
        model_type="kimi_k2",
        head_dim=...,
        draft_vocab_size=vd,
        num_key_value_heads=re.N,
        q_lora_rank=re.Q_RANK if queries else None,
        kv_lora_rank=re.KV_RANK,
        qk_nope_head_dim=re.NOPE,
        qk_rope_head_dim=re.ROT,
        v_head_dim=re.VALUE,
        _torchspec_version="0.2",
        n_group=1,
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        }
        if yarn
        else None,
        eagle_config={
            IDS: [2, 30, 58],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    )
    written = tensors if vllm_names else re.midlayer(tensors)
    checkpoint, found = read(
        re.directory(tmp_path, config, {**written, **({"d2t": d2t, "t2d": covered} if pruned else {})})
    )
    same(found, tensors)
    assert checkpoint.kind.name == "mla"
    assert checkpoint.config.taps == (2, 30, 58)
    assert checkpoint.report.doubts == []  # EAGLE-3's default boundaries of 61 layers
    assert checkpoint.config.rope_parameters["rope_type"] == ("yarn" if yarn else "default")
    assert (checkpoint.config.q_lora_rank is None) == (not queries)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("bias", [None, False])
def test_sglang(head: bool, bias: bool | None, tmp_path: Path) -> None:
    """`draft_vocab_size: null` stands for the target's head; numbers that fit no default leave two readings."""
    shapes = re.third(re.grouped(2 * re.H, "layers.0"), vd=re.V)
    if not head:
        del shapes["lm_head.weight"]
    tensors = re.numbers(shapes)
    config = re.llama_config(draft_vocab_size=None if not head else re.V, eagle_config={IDS: [3, 7, 20]})
    config |= {} if bias is None else {"bias": bias}
    checkpoint, found = read(re.directory(tmp_path, config, re.midlayer(tensors)))
    assert set(found) == set(re.midlayer(tensors))
    assert (checkpoint.config.head, checkpoint.config.draft_vocab_size) == ("own" if head else "shared", re.V)
    assert checkpoint.config.taps == (3, 7, 20)
    (doubt,) = checkpoint.report.doubts
    assert "[3, 7, 20]" in doubt
    assert "[4, 8, 21]" in doubt


@pytest.mark.parametrize(
    "chosen", [dict(zip(TOGGLES, values, strict=True)) for values in product((False, True), repeat=4)]
)
@pytest.mark.parametrize("qwen3", [False, True])
def test_vllm(chosen: dict[str, bool], qwen3: bool, tmp_path: Path) -> None:
    """Boundaries at the top level; Llama's attention and Qwen3's, several layers, biases, RoPE in its new place."""
    extra = (
        {}
        if qwen3
        else re.grouped(re.H, "layers.1", qkv=True, out=True)
        | re.mlp("layers.1", bias=True)
        | {"layers.1.input_layernorm.weight": (re.H,)}
    )
    first = re.grouped(2 * re.H, "layers.0", qkv=not qwen3, out=not qwen3, norms=qwen3)
    tensors = re.numbers(
        {**re.third(first, ht=re.HT, taps=4, bias=not qwen3), **extra, **EMBEDDING, **toggled(chosen, re.HT, 4)}
    )
    d2t, _ = re.offsets()
    config = re.llama_config(
        architectures=["Eagle3Qwen3ForCausalLM" if qwen3 else "Eagle3LlamaForCausalLM"],
        model_type="qwen3" if qwen3 else "llama",
        target_hidden_size=re.HT,
        num_aux_hidden_states=4,
        num_hidden_layers=1 if qwen3 else 2,
        attention_bias=not qwen3,
        mlp_bias=not qwen3,
        rope_theta=...,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        layer_types=["full_attention"] * (1 if qwen3 else 2),
        **{IDS: [0, 5, 9, 31]},
        **chosen,
    )
    checkpoint, found = read(re.directory(tmp_path, config, {**tensors, "d2t": d2t}))
    same(found, tensors | {"d2t": d2t})
    assert checkpoint.config.taps == (0, 5, 9, 31)
    assert checkpoint.config.qk_norm is qwen3
    assert all(getattr(checkpoint.config, key) is value for key, value in chosen.items())
    assert checkpoint.report.convention.startswith("boundaries")
    assert checkpoint.report.doubts == []


def test_norms_of_queries_must_be_announced(tmp_path: Path) -> None:
    tensors = re.numbers({**re.third(re.grouped(2 * re.H, "layers.0", norms=True), vd=re.V), **EMBEDDING})
    re.directory(tmp_path, re.llama_config(draft_vocab_size=re.V), tensors)
    with pytest.raises(CheckpointError, match=r"extra: .*q_norm"):
        open_checkpoint(tmp_path).network()


@pytest.mark.parametrize("values", list(product((None, False, True), repeat=2)))
@pytest.mark.parametrize("qwen3", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
def test_speculators(values: tuple[bool | None, ...], qwen3: bool, explicit: bool, tmp_path: Path) -> None:
    """Nested sizes, transformers' defaults left out; norm_before_residual is true where it isn't written."""
    chosen = {
        key: value
        for key, value in zip(("norm_before_residual", "norm_before_fc"), values, strict=True)
        if value is not None
    }
    tensors = re.numbers({**re.third(re.grouped(2 * re.H, "layers.0", norms=qwen3)), **EMBEDDING, **toggled(chosen)})
    d2t, covered = re.offsets()
    training = re.numbers({"verifier_norm.weight": (re.H,), "verifier_lm_head.weight": (re.VD, re.H)}, 9)
    standard = {"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6}
    layer = {"model_type": "qwen3" if qwen3 else "llama", "hidden_size": re.H, "intermediate_size": re.MLP,
    "head_dim": re.D,
             "num_attention_heads": re.N, "num_key_value_heads": re.KV, "num_hidden_layers": 1, "vocab_size": re.V,
             "max_position_embeddings": 512, "rope_theta": 5000.0, **(standard if explicit else {})}  # fmt: skip
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "transformer_layer_config": layer, "draft_vocab_size": re.VD, IDS: [2, 5, 9], "torch_dtype": "float32",
        **chosen,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "x"},
                               "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
    }  # fmt: skip
    checkpoint, found = read(re.directory(tmp_path, config, {**tensors, **training, "d2t": d2t, "t2d": covered}))
    same(found, tensors | {"d2t": d2t, "t2d": covered})
    assert not set(training) & set(found)
    assert set(training) <= set(checkpoint.report.ignored)
    assert checkpoint.report.format == "speculators"
    assert checkpoint.config.norm_before_residual is chosen.get("norm_before_residual", True)
    assert checkpoint.config.norm_before_fc is chosen.get("norm_before_fc", False)
    assert (checkpoint.config.qk_norm, checkpoint.config.taps) == (qwen3, (2, 5, 9))
    assert len(checkpoint.report.doubts) == ("norm_before_residual" not in chosen)
    assert ("transformer_layer_config.hidden_act" in checkpoint.report.defaulted) == (not explicit)
    assert "transformer_layer_config.hidden_size" in checkpoint.report.used


@pytest.mark.parametrize(("latent", "fc_norm", "norm_output"), list(product((True, False), repeat=3)))
def test_atom(latent: bool, fc_norm: bool, norm_output: bool, tmp_path: Path) -> None:
    """Full vocabulary, own embedding and head, boundaries nested only."""
    attention = re.latent("layers.0") if latent else re.grouped(2 * re.H, "layers.0")
    chosen = {"fc_norm": fc_norm, "norm_output": norm_output}
    tensors = re.numbers({**re.third(attention, ht=re.HT, taps=2, vd=re.V), **EMBEDDING, **toggled(chosen, re.HT, 2)})
    sizes = {"q_lora_rank": re.Q_RANK, "kv_lora_rank": re.KV_RANK, "qk_nope_head_dim": re.NOPE,
             "qk_rope_head_dim": re.ROT, "v_head_dim": re.VALUE, "head_dim": ...}  # fmt: skip
    config = re.llama_config(
        draft_vocab_size=re.V,
        target_hidden_size=re.HT,
        **chosen,
        **(sizes if latent else {}),
        architectures=["Eagle3DeepseekV2ForCausalLM" if latent else "LlamaForCausalLMEagle3"],
        eagle_config={IDS: [3, 8], "use_aux_hidden_state": True},
    )
    checkpoint, found = read(re.directory(tmp_path, config, tensors if latent else re.midlayer(tensors)))
    same(found, tensors)
    assert checkpoint.kind.name == ("mla" if latent else "eagle3")
    assert (checkpoint.config.taps, checkpoint.config.num_aux_hidden_states) == ((3, 8), 2)


def test_absolute_ids_in_d2t_are_reported(tmp_path: Path) -> None:
    tensors = re.numbers({**re.third(re.grouped(2 * re.H, "layers.0")), **EMBEDDING})
    d2t, covered = re.offsets()
    absolute = d2t + torch.arange(re.VD)
    for maps in ({"d2t": absolute, "t2d": covered}, {"d2t": absolute}):
        checkpoint, found = read(re.directory(tmp_path, re.llama_config(), {**tensors, **maps}))
        same(found, {"d2t": d2t, "t2d": covered})
        assert checkpoint.report.notes == [ABSOLUTE]


def test_t2d_decides_what_d2t_means_where_it_could_be_ids_or_offsets(tmp_path: Path) -> None:
    tensors = re.numbers({**re.third(re.grouped(2 * re.H, "layers.0")), **EMBEDDING})
    first = torch.arange(re.VD)  # as ids the first tokens, as offsets every other token
    for ids, notes in ((first, [ABSOLUTE]), (2 * first, [])):
        covered = torch.zeros(re.V, dtype=torch.bool)
        covered[ids] = True
        checkpoint, found = read(re.directory(tmp_path, re.llama_config(), {**tensors, "d2t": first, "t2d": covered}))
        same(found, {"d2t": ids - first, "t2d": covered})
        assert checkpoint.report.notes == notes
    path = re.directory(tmp_path, re.llama_config(), {**tensors, "d2t": first})
    with pytest.raises(CheckpointError, match="could hold offsets or target ids, and there is no t2d"):
        read(path)


@pytest.mark.parametrize("layers", [None, 32, 40])
def test_numbers_are_judged_by_the_target_s_layers(layers: int | None, tmp_path: Path) -> None:
    tensors = re.numbers(re.third(re.grouped(2 * re.H, "layers.0")))
    d2t, _ = re.offsets()
    for ids, taps, doubted in (
        ([1, 15, 28], (2, 16, 29) if layers in (None, 32) else (1, 15, 28), layers == 40),
        ([2, 16, 29], (2, 16, 29), layers == 40),
        ([2, 20, 37], (2, 20, 37), layers == 32),
    ):
        config = re.llama_config(eagle_config={IDS: ids})
        checkpoint = open_checkpoint(re.directory(tmp_path, config, {**tensors, "d2t": d2t}), layers=layers)
        assert (checkpoint.config.taps, bool(checkpoint.report.doubts)) == (taps, doubted), ids


def test_code_that_comes_along_is_named_and_not_run(tmp_path: Path) -> None:
    tensors = re.numbers({**re.third(re.grouped(2 * re.H, "layers.0"), vd=re.V), **EMBEDDING})
    config = re.llama_config(draft_vocab_size=re.V, auto_map={"AutoModel": "evil.Evil"})
    re.directory(tmp_path, config, tensors)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    checkpoint, found = read(tmp_path)
    same(found, tensors)
    assert "runs no code" in checkpoint.report.ignored["auto_map"]


@pytest.mark.parametrize("name", ["PEagleDraftModel", "PeagleLlamaForCausalLM"])
def test_parallel_drafters_are_recognized_by_name_key_or_tensor(name: str, tmp_path: Path) -> None:
    plain = re.numbers(re.third(re.grouped(2 * re.H, "layers.0")))
    tensors = {**plain, **re.numbers({"mask_hidden": (1, 1, 3 * re.H)})}
    d2t, _ = re.offsets()
    for config in (
        re.llama_config(architectures=[name], mask_token_id=5),
        re.llama_config(parallel_drafting=True, pard_token=5),
        re.llama_config(ptd_token_id=5),
    ):
        opened = open_checkpoint(re.directory(tmp_path, config, {**tensors, "d2t": d2t}))
        assert (opened.kind.name, opened.config.mask_token_id) == ("peagle", 5)  # type: ignore[attr-defined]
    with pytest.raises(EyasError, match="mask_token_id"):
        open_checkpoint(re.directory(tmp_path, re.llama_config(), {**tensors, "d2t": d2t}))
