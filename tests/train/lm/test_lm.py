"""A target from text alone, grown deeper without changing its function, loaded the stock way."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eyas.data.chats.stdlib import library_modules
from eyas.errors import ConfigError
from eyas.targets.fingerprint import fingerprint
from eyas.train.lm import lm as corpus
from eyas.train.lm.lm import (
    LmConfig,
    LmModelConfig,
    build_lm,
    cut_depth,
    grow_depth,
    repeat_a_span,
    repetition_loss,
    train_lm,
)

SHAPE = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 48, "context": 128}


def recipe(chats: Path, output: Path, **more: Any) -> LmConfig:
    return LmConfig.model_validate(
        {
            "output": output,
            "batch": 2,
            "short_length": 16,
            "short_share": 0.5,
            "validation_blocks": 2,
            "model": SHAPE,
            "corpus": {"chats": chats, "vocab_size": 512, "length": 32, "held_out_share": 0.2},
            "loop": {"steps": 4, "optimizer": {"kind": "muon"}},
            **more,
        }
    )


@pytest.mark.slow
def test_target_trains_grows_and_loads(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = list(itertools.islice(library_modules(), 40))
    monkeypatch.setattr(corpus, "library_modules", lambda: few)
    train_lm(recipe(chats, tmp_path / "shallow"))
    shallow = tmp_path / "shallow" / "model"
    train_lm(recipe(chats, tmp_path / "deep", model={**SHAPE, "layers": 6}, start_from=shallow))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "deep" / "model")
    assert model.config.num_hidden_layers == 6
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(shallow).get_vocab()


def test_growing_keeps_the_function() -> None:
    shallow = build_lm(LmModelConfig.model_validate(SHAPE), 60, 1, 0)
    tokens = torch.randint(60, (2, 9))
    grown = grow_depth(shallow, 6)
    assert grown.config.num_hidden_layers == 6
    torch.testing.assert_close(grown(tokens).logits, shallow(tokens).logits)
    with pytest.raises(ConfigError, match="multiple"):
        grow_depth(shallow, 5)


def test_cutting_keeps_layers_at_equal_distances() -> None:
    deep = build_lm(LmModelConfig.model_validate({**SHAPE, "layers": 7}), 60, 1, 0)
    for layers, kept in ((2, [0, 6]), (3, [0, 3, 6]), (1, [0])):
        short = cut_depth(deep, layers)
        assert short.config.num_hidden_layers == layers
        for mine, source in enumerate(kept):
            theirs = deep.model.layers[source].state_dict()
            assert all(torch.equal(part, theirs[name]) for name, part in short.model.layers[mine].state_dict().items())
        assert torch.equal(short.lm_head.weight, deep.lm_head.weight)


def test_a_fingerprint_knows_weights_not_how_they_were_loaded() -> None:
    model = build_lm(LmModelConfig.model_validate(SHAPE), 60, 1, 0).to(torch.bfloat16)
    name = fingerprint(model)
    assert fingerprint(model.float()) == name
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert fingerprint(model) != name


@pytest.mark.parametrize("seed", range(30))
def test_a_span_is_repeated_to_the_end(seed: int) -> None:
    block = torch.arange(64)
    repeated, start, span = repeat_a_span(block, seed)
    assert repeated.shape == block.shape
    assert 2 <= span < start <= 32
    assert torch.equal(repeated[:start], block[:start])
    assert torch.equal(repeated[start:], repeated[start - span : len(block) - span])
    assert torch.equal(repeat_a_span(block, seed)[0], repeated)


def test_the_loss_against_repetition_is_least_where_probabilities_decay() -> None:
    start = 4
    span = 2
    decay = 0.5
    p = torch.tensor([0.3, 0.9, 0.4, 0.8, 0.2, 0.4, 0.1, 0.2])  # of tokens 1 .. 8; those from 4 on repeat 2 and 3
    p[3:] = torch.tensor([0.45, 0.2, 0.225, 0.1, 0.1125])  # half of what they were, each time
    assert repetition_loss(-p.log(), start, span, decay).abs().max() < 1e-6
    certain = torch.full((8,), 0.999).log().neg().requires_grad_()
    loss = repetition_loss(certain, start, span, decay)
    assert loss.shape == (5,)
    torch.testing.assert_close(loss, -torch.log(1 - (torch.full((5,), 0.999) * 0.5)))
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert certain.grad is not None
    assert (certain.grad[:3] == 0).all()  # nothing is learned at what is repeated, p' is detached
    assert (certain.grad[3:] < 0).all()  # a step down the gradient makes repetition less probable


@pytest.mark.slow
def test_training_against_repetition_learns_both(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = list(itertools.islice(library_modules(), 40))
    monkeypatch.setattr(corpus, "library_modules", lambda: few)
    train_lm(recipe(chats, tmp_path / "run", repetition={"share": 0.5, "decay": 0.5}))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "loss" in record]
    assert trained
    assert all(record["text_loss"] > 0 and record["repetition_loss"] > 0 for record in trained)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
