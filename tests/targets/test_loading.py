"""Loading targets: what works, and refusals that come before any weight is read."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError, ModelError, RequestError, UnsupportedModelError, UsageError
from eyas.targets import Target, load_target, load_tokenizer
from eyas.targets.architecture import attention_plan, context_limit
from eyas.targets.loading import load_embedding_and_head, resolve_device, resolve_dtype
from eyas.targets.native.library import kernels
from eyas.targets.taps import default_taps
from eyas.targets.transformers_names import cache_argument

from .. import tiny
from ..toy.pair import TOY_TARGET


def test_a_saved_model_loads_and_computes_the_same(tmp_path: Path) -> None:
    model = tiny.build_model("llama")
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, device="cpu")
    tokens = tiny.prompts(9)[0]
    torch.testing.assert_close(tiny.full_forward(target.model, tokens).logits, tiny.full_forward(model, tokens).logits)
    assert (target.dtype, target.vocab_size, target.hidden_size, target.num_layers) == (
        torch.float32,
        tiny.VOCAB,
        tiny.HIDDEN,
        tiny.LAYERS,
    )
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())


def test_dtype_and_attention_are_taken(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    target = load_target(tmp_path, device="cpu", dtype="bfloat16", attention="eager")
    assert target.dtype == torch.bfloat16
    assert target.model.config._attn_implementation == "eyas_eager"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("xLSTMConfig", {}, "xlstm keeps a recurrent state in a way of its own"),
    ("RwkvConfig", {}, "rwkv has no key-value cache"),
    ("Llama4TextConfig", {}, "llama4_text has chunked_attention layers"),
    ("BloomConfig", {}, r"bloom takes no position ids but biases attention by distance \(ALiBi\)"),
    ("MptConfig", {}, r"mpt takes no position ids but biases attention by distance \(ALiBi\)"),
    ("FalconConfig", {"alibi": True}, r"falcon takes no position ids .* \(ALiBi\)"),
    ("BartConfig", {}, "bart is an encoder-decoder model"),
    ("MarianConfig", {}, "marian is an encoder-decoder model"),
    ("WhisperConfig", {}, "whisper is an encoder-decoder model"),
    ("T5Config", {}, "t5 is an encoder-decoder model"),
    ("BartConfig", {"is_encoder_decoder": False, "is_decoder": True}, "bart takes no position ids, it counts"),
    ("XLNetConfig", {}, "xlnet has no key-value cache"),
    ("RoFormerConfig", {}, "roformer is an encoder here"),
    ("RoFormerConfig", {"is_decoder": True}, "roformer takes no position ids, it counts its tokens itself"),
    ("BertConfig", {}, "bert is an encoder here"),
    ("ViTConfig", {}, "neither a causal language model of type vit nor a multimodal one"),
    ("PaliGemmaConfig", {}, "paligemma reads its prompt in both directions"),
    ("BlipConfig", {}, "blip has no key-value cache"),
    ("GPTNeoConfig", {}, "gpt_neo masks its local attention layers itself"),
]


@pytest.mark.parametrize(("config", "settings", "reason"), REFUSED, ids=[f"{r[0]}{len(r[1])}" for r in REFUSED])
def test_what_cannot_be_rolled_back_is_refused_before_its_weights_are_read(
    tmp_path: Path, config: str, settings: dict[str, Any], reason: str
) -> None:
    """The weight file is no weight file: reading it would be another error."""
    getattr(tf, config)(**settings).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UnsupportedModelError, match=reason):
        load_target(tmp_path)


def test_a_target_made_of_a_model_is_checked_too() -> None:
    config = tf.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(UnsupportedModelError, match="bloom takes no position ids"):
        Target(tf.AutoModelForCausalLM.from_config(config))


def test_layers_that_bypass_the_cache_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build_model("llama")
    attention = type(model.model.layers[0].self_attn)
    plain = attention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **{**kwargs, cache_argument(plain): None})

    monkeypatch.setattr(attention, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="only 0 of 4 layers use the key-value cache"):
        Target(model)


def test_a_head_that_is_not_understood_is_refused_for_training_only() -> None:
    model = tiny.build_model("llama")
    assert Target(model).head(torch.zeros(1, tiny.HIDDEN)).shape == (1, tiny.VOCAB)
    forward = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return type(out)(logits=out.logits * 2)

    model.forward = doubled
    target = Target(model)
    with pytest.raises(UnsupportedModelError, match="decoding is not affected"):
        target.head(torch.zeros(1, tiny.HIDDEN))


def test_errors_name_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="can't load the target"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(ModelError, match="can't read a model config at"):
        load_target(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="can't load the tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="can't mask a tree: use sdpa or eager"):
        load_target(tmp_path, attention="flash_attention_2")


def test_a_damaged_weight_file_is_a_model_error(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0 broken ")
    with pytest.raises(ModelError, match="can't load the target"):
        load_target(tmp_path)


def test_names_of_dtypes_and_devices() -> None:
    assert resolve_dtype("bfloat16") == resolve_dtype(torch.bfloat16) == torch.bfloat16
    with pytest.raises(UsageError, match="write one of float32, bfloat16, float16"):
        resolve_dtype("int8")
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(UsageError, match="write cpu, cuda or cuda:N"):
        resolve_device("toaster")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="sees no CUDA device"):
            resolve_device("cuda")


def _write(folder: Path, stored: torch.dtype, **config: Any) -> Path:
    """A checkpoint with tensors in `stored` and one in float32, its config naming what `config` names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file({"a": torch.zeros(3, 3).to(stored), "b": torch.zeros(2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("half_is_fast", [True, False])
def test_dtype_auto_is_the_checkpoints(tmp_path: Path, half_is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config's, else its tensors'; in float32 on a CPU that is slow in anything less."""
    monkeypatch.setattr("eyas.targets.loading.cpu_computes_in", lambda dtype: half_is_fast or dtype == torch.float32)
    cpu = torch.device("cpu")
    gpu = torch.device("cuda")
    found = {
        "named": (_write(tmp_path / "named", torch.float32, dtype="bfloat16"), torch.bfloat16),
        "named before": (_write(tmp_path / "before", torch.float32, torch_dtype="float16"), torch.float16),
        "in tensors": (_write(tmp_path / "tensors", torch.bfloat16), torch.bfloat16),
        "float32": (_write(tmp_path / "float32", torch.float32), torch.float32),
    }
    for folder, stored in found.values():
        assert resolve_dtype("auto", folder, gpu) == stored
        assert resolve_dtype("auto", folder, cpu) == (stored if half_is_fast else torch.float32)
        assert resolve_dtype("float16", folder, cpu) == torch.float16
    assert resolve_dtype("auto", TOY_TARGET, gpu) == torch.bfloat16


def test_dtype_auto_of_shards_is_the_first_ones(tmp_path: Path) -> None:
    folder = _write(tmp_path / "shards", torch.float16)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "z": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert resolve_dtype("auto", folder, torch.device("cuda")) == torch.float16


def test_dtype_auto_needs_a_checkpoint_that_says_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown dtype 'auto': write one of float32, bfloat16, float16$"):
        resolve_dtype("auto")
    for folder in (_write(tmp_path / "a", torch.float8_e4m3fn), _write(tmp_path / "b", torch.float32, dtype="float64")):
        with pytest.raises(UsageError, match=r"is stored in .*: choose a dtype among float32, bfloat16, float16"):
            resolve_dtype("auto", folder)
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="names no dtype, and its weights can't be read"):
        resolve_dtype("auto", tmp_path / "a")


def test_targets_load_in_dtype_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.build_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("eyas.targets.loading.cpu_computes_in", lambda _, fast=fast: fast)
        assert load_target(tmp_path, device="cpu", dtype="auto", prepacked=False).dtype == dtype
        assert load_embedding_and_head(tmp_path, device="cpu", dtype="auto").dtype == dtype


def test_attention_plans() -> None:
    plans = {name: attention_plan(tiny.target(name).config).windows for name in tiny.ARCHITECTURES}
    full, sliding = {"full_attention": None}, {"sliding_attention": tiny.WINDOW}
    hybrid = {**full, **sliding}
    assert plans == {
        name: hybrid if name in ("gemma2", "gemma3", "olmo3", "gptoss") else sliding if name == "mistral" else full
        for name in tiny.ARCHITECTURES
    }


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(32, (2, 16, 29)), (7, (2, 3, 4)), (6, (2, 4, 6)), (4, (1, 3, 4)), (2, (1, 2)), (1, (0, 1))],
)
def test_default_taps_are_eagle3s_and_distinct(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps


def _phi3(rope: dict[str, Any]) -> Any:
    return tf.Phi3Config(
        max_position_embeddings=256,
        hidden_size=32,
        num_attention_heads=4,
        rope_parameters=rope,
        original_max_position_embeddings=16,
    )


def test_the_context_ends_where_rope_would_change() -> None:
    """Stale keys and trees that reach over the edge would break equality there."""
    assert context_limit(tf.LlamaConfig(max_position_embeddings=64)) == 64
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    assert context_limit(_phi3(rope)) == 16
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    assert context_limit(tf.LlamaConfig(max_position_embeddings=64, rope_parameters=dynamic)) == 64
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    assert context_limit(tf.LlamaConfig(max_position_embeddings=256, rope_parameters=yarn)) == 256


@pytest.mark.parametrize("taps", [(0, 6), (-1,), (1, 1)])
def test_taps_must_exist_and_differ(taps: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="distinct boundaries between 0 and 5"):
        tiny.target().check_taps(taps)


def test_a_target_with_missing_tensors_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "holes"
    tiny.build_model("llama").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the target's tensors .*layers\.1\.mlp\.up_proj"):
        load_target(folder)


@pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gptoss"])
def test_the_checkpoints_file_is_not_kept_in_memory(
    tmp_path: Path, name: str, dtype: torch.dtype, quantize: str | None
) -> None:
    """While one tensor is a view of the mapped file, all its pages stay resident, beside the native layers' copies."""
    tiny.build_model(name).to(dtype).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype=dtype, device="cpu", quantize=quantize)
    assert target.dtype == dtype
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    del target


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_called_that(tmp_path: Path, number: float) -> None:
    model = tiny.build_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = number
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"compute no numbers \(NaN or infinity\): the checkpoint is damaged"):
        load_target(tmp_path)
    with pytest.raises(ModelError, match="compute no numbers"):
        load_target(tmp_path, prepacked=False)


ABSURD = {
    "no heads": {"num_attention_heads": 0}, "negative": {"hidden_size": -32}, "text": {"hidden_size": "wide"},
    "null": {"num_hidden_layers": None}, "list": {"vocab_size": [97]}, "huge": {"vocab_size": 10**15},
    "odd": {"head_dim": -8}, "activation": {"hidden_act": "nothing"},
    "rope": {"rope_parameters": {"rope_type": "none"}},
}  # fmt: skip


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_config_is_a_model_that_cannot_be_loaded(tmp_path: Path, name: str) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | ABSURD[name]))
    with pytest.raises(EyasError):
        load_target(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_config_of_a_billion_layers_is_refused_before_anything_is_made_of_it(tmp_path: Path, kind: str) -> None:
    config = {"model_type": kind, "num_hidden_layers": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="num_hidden_layers 1000000000, but at most 10000"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": config}))
    with pytest.raises(ModelError, match="num_hidden_layers 1000000000, but at most 10000"):
        load_target(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"model": {}}', '{"version": "1.0", "model": 3}', "\x00"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    """The tokenizers library raises plain exceptions."""
    shutil.copytree(TOY_TARGET, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
