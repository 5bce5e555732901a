"""Damaged and hostile checkpoints: refused with a reason, before any weight is read; nothing in them is run."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eyas.drafters.checkpoint import open_checkpoint
from eyas.errors import CheckpointError, EyasError

from .. import restated as re

EMBEDDING = {"embed_tokens.weight": (re.V, re.H)}


def good(path: Path, **changes: Any) -> Path:
    tensors = re.numbers({**re.third(re.grouped(2 * re.H, "layers.0")), **EMBEDDING})
    d2t, covered = re.offsets()
    return re.directory(path, re.llama_config(**changes), {**tensors, "d2t": d2t, "t2d": covered})


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight may be read, and no network of real size made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were read before the checkpoint was checked")

    monkeypatch.setattr("eyas.drafters.files.load_file", refuse)
    monkeypatch.setattr("torch.load", refuse)


HUGE: dict[str, tuple[dict[str, Any], str]] = {
    "hidden_size": ({"hidden_size": 2**40}, "hidden_size"),
    "a plausible hidden_size": ({"hidden_size": 2**15}, r"fc\.weight is"),
    "vocab_size": ({"vocab_size": 2**40}, "vocab_size"),
    "draft_vocab_size": ({"draft_vocab_size": 2**40}, "draft_vocab_size"),
    "intermediate_size": ({"intermediate_size": 2**60}, "intermediate_size"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "heads": ({"num_attention_heads": 10**12, "num_key_value_heads": 10**12}, "num_attention_heads"),
    "head_dim": ({"head_dim": 2**62}, "head_dim"),
    "odd head_dim": ({"head_dim": 7}, "head_dim"),
    "taps": ({"num_aux_hidden_states": 10**9, "fc_norm": True}, "num_aux_hidden_states"),
    "a list of taps": ({"eagle_aux_hidden_state_layer_ids": list(range(10**5))}, "up to 64"),
    "negative taps": ({"taps": [-1, 2, 3]}, "layer numbers"),
    "true as a tap": ({"taps": [True, 2, 3]}, "layer numbers"),
    "factors": ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 10**5, "long_factor": [1.0],
                                  "original_max_position_embeddings": 8}}, "short_factor"),
    "negative factor": ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor"),
    "no factor": ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
    "logarithm of nothing": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "RoPE"),
    "text as a factor": ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
    "unknown rope": ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
    "rope is a list": ({"rope_scaling": [1, 2]}, "rope_scaling"),
    "two thetas": ({"rope_parameters": {"rope_theta": 7.0}}, "rope_theta"),
    "endless theta": ({"rope_theta": 1e400}, "rope_theta|NaN|Infinity"),
    "activation": ({"hidden_act": "__import__"}, "activation"),
    "uneven heads": ({"num_key_value_heads": 3}, "evenly"),
    "eagle_config": ({"eagle_config": [1]}, "eagle_config"),
    "quantized": ({"quantization_config": {"bits": 4}}, "unquantized"),
    "an unknown architecture": ({"architectures": ["Eagle3MambaForCausalLM"]}, "unknown architecture"),
    "another first layer": ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, "no EAGLE-3"),
    "target": ({"speculators_model_type": "mtp"}, "algorithms eyas loads"),
    "no layer config": ({"speculators_model_type": "eagle3"}, "transformer_layer_config"),
}  # fmt: skip


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("name", HUGE)
def test_a_hostile_configuration(name: str, tmp_path: Path) -> None:
    changes, reason = HUGE[name]
    with pytest.raises(EyasError, match=reason):
        open_checkpoint(good(tmp_path, **changes)).network()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_KEYS = (*re.llama_config(), "eagle_config", "eagle_aux_hidden_state_layer_ids", "taps", "rope_scaling", "fc_norm",
         "rope_parameters", "num_aux_hidden_states", "sliding_window", "layer_types", "eyas", "speculators_model_type",
         "transformer_layer_config", "quantization_config", "parallel_drafting", "kv_lora_rank")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good(tmp_path_factory.mktemp("fuzzed"))


_TYPES = st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope", "mrope", "x", 3])
_ROPE_KEYS = st.sampled_from("type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
                             "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor "
                             "long_factor partial_rotary_factor".split())  # fmt: skip
_NUMBERS = st.sampled_from([0, 1, -1, 2.5, 1e-30, 1e30, 10**400, True, None, "2", [1.0, 2.0, 3.0], [0.0] * 3])


@given(rope=st.dictionaries(_ROPE_KEYS, _NUMBERS, max_size=6), kind=_TYPES)
@settings(max_examples=150)
def test_whatever_the_rope_section_holds_it_is_computed_or_refused(rope: Any, kind: Any, folder: Path) -> None:
    section = {"rope_type": kind, "factor": 2.0, **rope}
    (folder / "config.json").write_text(json.dumps(re.llama_config(rope_scaling=section)))
    with suppress(EyasError):
        network = open_checkpoint(folder).network()
        cos, _ = network.rotary(torch.zeros(1), torch.tensor([[3]]))
        assert bool(cos.isfinite().all())


@given(changes=st.dictionaries(st.sampled_from(_KEYS), _JSON, min_size=1, max_size=3))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_a_key_holds_it_is_read_or_refused(changes: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(re.llama_config(**changes)))
    with suppress(EyasError):
        open_checkpoint(folder, layers=32).network()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("{" * 10**5, "not valid JSON"),
        ("[" * 10**6, "not valid JSON"),
        ('{"rms_norm_eps": NaN}', "NaN is not a number"),
        ('{"rope_theta": -Infinity}', "not a number"),
        ("[1]", "JSON object"),
        ("\ud800", "not valid JSON"),
        ('{"a": "' + "x" * 2**24 + '"}', "no configuration is that long"),
    ],
    ids=["empty", "deep", "deeper", "nan", "infinity", "a list", "no text", "endless"],
)
def test_a_config_that_is_no_config(text: str, reason: str, tmp_path: Path) -> None:
    good(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(tmp_path)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "sub/part.safetensors", "..\\part.safetensors",
             "pytorch_model.bin", "", ".", 7, None, ["a"]],
)  # fmt: skip
def test_an_index_that_leads_elsewhere(name: Any, tmp_path: Path) -> None:
    good(tmp_path)
    (tmp_path.parent / "secret.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin") if name == "pytorch_model.bin" else None
    index = {"weight_map": {"fc.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"only \.safetensors files next to it|weight_map"):
        open_checkpoint(tmp_path)


def test_truncated_and_damaged_safetensors(tmp_path: Path) -> None:
    whole = (good(tmp_path) / "model.safetensors").read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is the file complete"):
            open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    with pytest.raises(CheckpointError, match="is the file complete"):
        open_checkpoint(tmp_path)


def change(path: Path, **tensors: torch.Tensor) -> None:
    save_file({**load_file(path / "model.safetensors"), **tensors}, path / "model.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_none(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.zeros(re.MLP, re.H, dtype=dtype)
    weight[3, 5] = value
    change(good(tmp_path), **{"layers.0.mlp.up_proj.weight": weight})
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight holds NaN or infinite"):
        open_checkpoint(tmp_path).network()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_weights_of_other_types(dtype: torch.dtype, tmp_path: Path) -> None:
    change(good(tmp_path), **{"fc.weight": torch.zeros(re.H, 3 * re.H).to(dtype)})
    with pytest.raises(CheckpointError, match=r"fc\.weight holds .*: eyas loads float weights only"):
        open_checkpoint(tmp_path).network()


@pytest.mark.parametrize(
    ("d2t", "reason"),
    [
        (torch.zeros(re.VD), "holds float32, not whole numbers"),
        (torch.zeros(re.VD, dtype=torch.bool), "holds bool"),
        (torch.full((re.VD,), 2**62), "beyond the vocabulary"),
        (torch.full((re.VD,), -(2**63)), "beyond the vocabulary"),
        (torch.full((re.VD,), -1), "20 different tokens below 60"),
        (torch.tensor([5] * 10 + [3] * 10), "20 different tokens below 60"),
        (torch.zeros(re.VD - 1, dtype=torch.int64), r"d2t is \[19\]"),
        (torch.zeros(4, 5, dtype=torch.int64), r"d2t is \[4, 5\]"),
    ],
)
def test_a_bad_vocabulary_map(d2t: torch.Tensor, reason: str, tmp_path: Path) -> None:
    change(good(tmp_path), d2t=d2t)
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(tmp_path).network()


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    good(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    save_file(whole, tmp_path / "one.safetensors")
    save_file({"fc.weight": whole["fc.weight"]}, tmp_path / "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"norm.weight": "one.safetensors", "fc.weight": "two.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"fc\.weight is in one\.safetensors and in .*two\.safetensors"):
        open_checkpoint(tmp_path)
