"""The field's config.json files, and refusal of what isn't understood."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.taps import IDS
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.drafters.kinds.eagle3 import Eagle3Config, write
from eyas.drafters.kinds.eagle3 import read as read_config
from eyas.errors import ConfigError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "draft_vocab_size": 60,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def read(**changes: Any) -> Eagle3Config:
    return config_from_dict({k: v for k, v in {**BASE, **changes}.items() if v is not ...}, "config.json")


def config_from_dict(raw: dict[str, Any], where: str, ignore: Collection[str] = ()) -> Eagle3Config:
    return read_config(Fields(raw, where, None, ignore))


def test_defaults_of_absent_keys() -> None:
    config = read(num_key_value_heads=..., draft_vocab_size=...)
    assert (config.head_dim, config.num_key_value_heads, config.draft_vocab_size) == (8, 4, 97)
    assert (config.target_hidden_size, config.num_aux_hidden_states, config.num_hidden_layers) == (32, 3, 1)
    assert not any((config.fc_norm, config.norm_output, config.norm_before_residual, config.norm_before_fc))
    assert config.taps is None
    assert read(draft_vocab_size=None, target_hidden_size=None, head_dim=None) == read(draft_vocab_size=...)


@pytest.mark.parametrize(
    ("written", "theta", "kind"),
    [
        ({}, 10000.0, "default"),
        ({"rope_theta": 5e5}, 5e5, "default"),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, "default"),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0, "default"),
        ({"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 9.0, "linear"),
        ({"rope_theta": 9.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 9.0, "linear"),
    ],
)
def test_rope_in_its_old_and_new_places(written: dict[str, Any], theta: float, kind: str) -> None:
    rope = read(**written).rope_parameters
    assert (rope["rope_theta"], rope["rope_type"]) == (theta, kind)
    assert "type" not in rope
    assert rope.get("factor") == (2.0 if kind == "linear" else None)


@pytest.mark.parametrize(
    "written",
    [
        {"taps": [1, 2]},
        {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2], "use_aux_hidden_state": True}},
        {"eagle_config": {"layer_ids": [1, 2]}, "eagle_aux_hidden_state_layer_ids": [1, 2]},
    ],
)
def test_taps_in_all_their_places(written: dict[str, Any]) -> None:
    config = read(**written)
    assert config.taps == (1, 2)
    assert config.num_aux_hidden_states == 2


def test_contradicting_taps_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradicting tap lists"):
        read(eagle_config={"layer_ids": [1, 2]}, eagle_aux_hidden_state_layer_ids=[1, 3])


def test_unknown_keys_are_refused_by_name_unless_ignored() -> None:
    raw = {**BASE, "mystery": 1, "other": 2}
    with pytest.raises(ConfigError, match=r"config.json: unknown keys mystery, other: .*`ignore_config_keys="):
        config_from_dict(raw, "config.json")
    with pytest.raises(ConfigError, match="unknown key other:"):
        config_from_dict(raw, "config.json", ignore=["mystery"])
    assert config_from_dict(raw, "config.json", ignore=["mystery", "other"]) == read()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"sliding_window": 512}, "which layers have it"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is missing"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ],
)
def test_what_eyas_cannot_compute_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(**change)


def test_a_tied_head_is_the_target_s_business_if_the_file_has_its_own() -> None:
    raw = {**BASE, "tie_word_embeddings": True}
    assert read_config(Fields(raw, "config.json", dict.fromkeys((EMBEDDING, HEAD)))).head == "own"
    with pytest.raises(ConfigError, match="tie_word_embeddings is true"):
        read_config(Fields(raw, "config.json", dict.fromkeys((EMBEDDING,))))


def test_an_empty_list_of_aux_layers_is_none() -> None:
    for change in ({IDS: []}, {"taps": []}, {"eagle_config": {IDS: []}}, {"eagle_config": {"layer_ids": []}}):
        assert read(**change) == read()


def test_transformers_generic_keys_change_nothing() -> None:
    generic = {
        "do_sample": False, "max_length": 20, "top_k": 50, "torchscript": False, "pruned_heads": {},
        "is_decoder": False, "add_cross_attention": False, "cross_attention_hidden_size": None,
        "task_specific_params": None,
    }  # fmt: skip
    assert read(**generic) == read()
    with pytest.raises(ConfigError, match="unknown key add_cross_attention"):
        read(add_cross_attention=True)


def test_harmless_forms_of_refused_keys_pass() -> None:
    assert read(sliding_window=None, use_sliding_window=False, layer_types=["full_attention"]) == read()
    assert read(sliding_window=512, use_sliding_window=False) == read()


@pytest.mark.parametrize("taps", [None, (1, 2, 3)])
def test_the_written_form_reads_back(taps: tuple[int, ...] | None) -> None:
    config = read(fc_norm=True, norm_output=True, taps=taps, rope_theta=5e5, default_tree="chain:4", head_dim=16)
    written = write(config)
    assert config_from_dict(written, "again") == config
    assert written["rope_theta"] == 5e5
    assert written["tie_word_embeddings"] is False
    if taps:
        assert written["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_toggles_nested_in_eagle_config_count() -> None:
    raw = BASE | {"eagle_config": {"norm_before_fc": True, "use_aux_hidden_state": True}}
    assert config_from_dict(raw, "c").norm_before_fc
    with pytest.raises(ConfigError, match="norm_before_fc is False at the top level and True"):
        config_from_dict(raw | {"norm_before_fc": False}, "c")


def test_a_drafter_without_taps_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_aux_hidden_state"):
        config_from_dict(BASE | {"eagle_config": {"use_aux_hidden_state": False}}, "c")


def test_unknown_nested_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="surprise"):
        config_from_dict(BASE | {"eagle_config": {"surprise": 1}}, "c")
