"""Adapters are merged at load as `peft` merges them, or refused by name; never ignored."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import eyas
from eyas.errors import ModelError, UnsupportedModelError
from eyas.hub import find_adapter, find_target
from eyas.interop.inspect.report import locate, report_target
from eyas.targets import load_target
from eyas.targets.fingerprint import embedding_head_fingerprint, fingerprint
from eyas.targets.loading import load_embedding_and_head, read_config
from eyas.targets.tokenizers import load_tokenizer

from .. import pairs, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own doing
TOKENS = tiny.prompts(9)[0]


def save_base(folder: Path) -> Path:
    return pairs.save_target(folder)


def save_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """A random LoRA adapter of a saved model, written by `peft`."""
    peft = pytest.importorskip("peft")
    model = tf.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], **settings})
    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.3)
    wrapped.save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    import peft

    model = tf.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().eval()


def pretend_adapter(folder: Path, base: str | None) -> Path:
    """What a LoRA folder looks like; enough for what is said without `peft`."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.usefixtures("own_cache")
def test_a_folder_as_peft_writes_it_is_a_target_whatever_its_base_is(tmp_path: Path, gguf_file: Path) -> None:
    folder = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", folder)
    assert not (adapter / "config.json").exists()
    engine = eyas.load(adapter, dtype="float32")
    prompt = torch.tensor([TOKENS])
    params = eyas.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    expected = merged_by_peft(folder, adapter).generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    found = engine.generate([eyas.Request(tuple(TOKENS), params)])[0].token_ids
    assert found == expected[0, len(TOKENS) :].tolist()

    of_a_file = pretend_adapter(tmp_path / "of-a-file", str(gguf_file))
    assert find_target(of_a_file).source == str(of_a_file)
    assert read_config(find_target(of_a_file)).num_hidden_layers == tiny.LAYERS
    assert find_target(of_a_file).base.gguf == gguf_file
    assert load_tokenizer(of_a_file)("ab").input_ids == [tiny.VOCAB - 3]


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=str)
def test_an_adapter_alone_is_its_base_with_the_adapter_merged(
    tmp_path: Path, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, **settings)
    target = load_target(adapter, device="cpu", dtype=dtype, prepacked=False)
    expected = merged_by_peft(base, adapter, dtype)
    ours = dict(target.model.named_parameters())
    theirs = dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(
        tiny.full_forward(target.model, TOKENS).logits,
        tiny.full_forward(load_target(base, device="cpu", dtype=dtype, prepacked=False).model, TOKENS).logits,
    )
    assert load_tokenizer(adapter).chat_template == pairs.tokenizer().chat_template


def test_an_adapter_beside_full_weights_is_merged_too_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    expected = merged_by_peft(base, adapter)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / file, base / file)
    with caplog.at_level(logging.WARNING, logger="eyas"):
        target = load_target(base, device="cpu", dtype="float32", prepacked=False)
    assert f"the LORA adapter of rank 4 in {base}, for {base}: merged" in caplog.text
    assert torch.equal(tiny.full_forward(target.model, TOKENS).logits, tiny.full_forward(expected, TOKENS).logits)


def test_fingerprints_know_the_adapter_and_not_the_dtype(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    one = save_adapter(tmp_path / "one", base)
    other = save_adapter(tmp_path / "other", base, lora_alpha=16)
    found = {
        folder: {fingerprint(load_target(folder, device="cpu", dtype=dtype).model) for dtype in ("float32", "bfloat16")}
        for folder in (base, one, other)
    }
    assert all(len(prints) == 1 for prints in found.values())
    assert len(set.union(*found.values())) == 3
    whole = load_target(one, device="cpu")
    short = load_embedding_and_head(one, dtype="bfloat16", device="cpu")
    ends = embedding_head_fingerprint(whole.model, whole.layers)
    assert embedding_head_fingerprint(short.model, short.layers) == ends
    before = load_target(base, device="cpu")
    assert embedding_head_fingerprint(before.model, before.layers) != ends


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = sorted(tensors)[0]
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != first}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(ModelError, match=r"doesn't fit: 1 tensors \(.*lora_A"):
        load_target(adapter, device="cpu")
    save_file(
        tensors | {first.replace("layers.0", "layers.9"): tensors[first].clone()}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(ModelError, match=r"doesn't fit: 1 tensors \(.*layers\.9"):
        load_target(adapter, device="cpu")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors"):
        load_target(adapter, device="cpu")


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save_base(tmp_path / "base")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(tf.AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(ModelError, match=r"PROMPT_TUNING adapter .* can't be merged"):
        load_target(tmp_path / "prompt", device="cpu")


@pytest.mark.parametrize("alone", [False, True])
def test_without_peft_it_is_refused_by_name(tmp_path: Path, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    base = save_base(tmp_path / "base")
    folder = pretend_adapter(tmp_path / "adapter" if alone else base, str(base))
    with pytest.raises(UnsupportedModelError, match=r"has a LORA adapter, .* pip install 'eyas\[peft\]'"):
        load_target(folder, device="cpu")
    with pytest.raises(UnsupportedModelError, match="has a LORA adapter"):
        load_embedding_and_head(folder, dtype="float32", device="cpu")
    report = report_target(folder, None)
    assert report.adapter == f"LORA adapter of rank 4 in {folder}, for {base}"
    assert any("pip install 'eyas[peft]'" in problem for problem in report.problems)
    assert locate(str(folder)).path == base


def test_the_base_model_must_be_there(tmp_path: Path) -> None:
    missing = pretend_adapter(tmp_path / "adapter", str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match=r"the LORA adapter .* needs its base model: there is no .*nothing"):
        load_target(missing)
    with pytest.raises(ModelError, match="names no base model: put its directory"):
        find_adapter(pretend_adapter(tmp_path / "nameless", None))
    (missing / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="can't read the adapter's config"):
        load_target(missing)
