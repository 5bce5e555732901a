"""Multimodal checkpoints run as text models: the same tokens as the whole model generates from text, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from eyas.engine import Engine, Speculation
from eyas.errors import UnsupportedModelError
from eyas.session import load
from eyas.targets import Target, load_target
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams

from .. import tiny

LENGTHS = (9, 5, 13)
TOKENS = 12
_TEXT: dict[str, Any] = {**tiny._COMMON, "num_key_value_heads": 2}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_CLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_TOWER = {"depth": 2, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": tiny.HIDDEN}
_QWEN = {"vision_start_token_id": 91, "vision_end_token_id": 92, "image_token_id": 93, "video_token_id": 94}
FEW: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": tf.LlamaConfig(**_TEXT), "vision_config": tf.CLIPVisionConfig(**_CLIP), "image_token_index": 93,
    },
    "mistral3": {
        "text_config": tf.MistralConfig(**_TEXT, head_dim=8), "image_token_index": 93,
        "vision_config": tf.PixtralVisionConfig(**_CLIP),
    },
    "qwen2_vl": {
        **_QWEN, "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {"depth": 2, "num_heads": 2, "embed_dim": 16, "hidden_size": tiny.HIDDEN},
    },
    "gemma3": {
        "text_config": tf.Gemma3TextConfig(**_TEXT, head_dim=8, sliding_window=6, layer_types=tiny._HYBRID),
        "vision_config": tf.SiglipVisionConfig(**_CLIP),
        "mm_tokens_per_image": 4, "image_token_index": 93, "tie_word_embeddings": False,
    },
}  # fmt: skip
MANY: dict[str, dict[str, Any]] = {
    "llava_next": FEW["llava"],
    "llava_onevision": {
        "text_config": tf.Qwen2Config(**_TEXT), "vision_config": tf.SiglipVisionConfig(**_CLIP),
        "image_token_index": 93, "video_token_index": 94,
    },
    "vipllava": {**FEW["llava"], "vision_feature_layers": [-1, -2]},
    "aya_vision": {"text_config": tf.Cohere2Config(**_TEXT), "vision_config": tf.SiglipVisionConfig(**_CLIP)},
    "idefics3": {"text_config": tf.LlamaConfig(**_TEXT), "vision_config": _CLIP, "image_token_id": 93},
    "qwen2_5_vl": {
        **_QWEN, "text_config": {**_TEXT, "rope_parameters": _SECTIONS}, "vision_config": {**_TOWER, "hidden_size": 16},
    },
    "qwen3_vl": {
        **_QWEN, "text_config": {**_TEXT, "head_dim": 8, "rope_parameters": _SECTIONS},
        "vision_config": {**_TOWER, "hidden_size": 16, "deepstack_visual_indexes": [0, 1]},
    },
}  # fmt: skip


def save(name: str, path: Path) -> Any:
    """A random model of a multimodal class, saved and read again."""
    torch.manual_seed(0)
    model = tf.AutoModelForImageTextToText.from_config(tf.CONFIG_MAPPING[name](**(FEW | MANY)[name])).eval()
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.mul_(14.0)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path)
    return tf.AutoModelForImageTextToText.from_pretrained(path).eval()


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)])
def test_text_is_generated_as_the_whole_model_generates_it(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    prompts = tiny.prompts(*LENGTHS)
    expected = [tiny.continuation(model, prompt, TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    requests = [Request(tuple(prompt), SamplingParams(max_tokens=TOKENS)) for prompt in prompts]
    engine = load(tmp_path, dtype="float32", device="cpu", batch_size=2)
    assert [done.token_ids for done in engine.generate(requests)] == expected
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    oracle = tiny.OracleDrafter(sequences, (0, 2, tiny.LAYERS), device=torch.device("cpu"))
    drafting = Engine(engine.target, None, Speculation(oracle, parse_tree("dynamic:4,3,8,0.1")), batch_size=2)
    done = drafting.generate(requests)
    assert [each.token_ids for each in done] == expected
    assert sum(each.stats.walked for each in done) > 0


def test_taps_are_those_of_the_text_decoder_where_the_other_has_as_many_layers(tmp_path: Path) -> None:
    model = save("llava", tmp_path)
    assert load_target(tmp_path, device="cpu").layers[0].self_attn.q_proj.in_features == tiny.HIDDEN
    lists = [part for part in model.model.vision_tower.modules() if isinstance(part, nn.ModuleList)]
    assert [len(part) for part in lists] == [tiny.LAYERS]


def test_a_llama_inside_has_native_passes(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path / "llama")
    save("llava", tmp_path / "llava")
    alone, inside = (load_target(tmp_path / name, device="cpu") for name in ("llama", "llava"))
    assert (inside.native is None) == (alone.native is None)


def test_a_model_that_reads_text_otherwise_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it put its text at other positions."""
    save("llava", tmp_path)
    verify = Target.verify

    def shifted(self: Target, cache: Any, rows: Any, roots: Any, tree: Any, taps: Any) -> Any:
        return verify(self, cache, rows, (roots + 1) % self.vocab_size, tree, taps)

    monkeypatch.setattr(Target, "verify", shifted)
    with pytest.raises(
        UnsupportedModelError,
        match="LlavaForConditionalGeneration is multimodal and runs text in another way than its decoder",
    ):
        load_target(tmp_path, device="cpu")


def test_one_that_cannot_run_text_alone_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save("llava", tmp_path)

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("pixel_values are needed")

    monkeypatch.setattr(type(model), "generate", broken)
    with pytest.raises(UnsupportedModelError, match="can't run text alone: pixel_values are needed"):
        load_target(tmp_path, device="cpu")
