"""Models whose layers pass on something else than one state for each token: Gemma 3n's streams and shared keys."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf

from eyas.engine import Engine, Speculation
from eyas.errors import UnsupportedModelError
from eyas.targets import Target
from eyas.targets.architecture import logits_agree
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams

from .. import tiny

PROMPTS = tiny.prompts(13, 1, 20, 5)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@cache
def gemma3n(shared: int) -> Any:
    """A random Gemma 3n whose last `shared` layers attend to the keys of earlier ones."""
    torch.manual_seed(0)
    config = tf.Gemma3nTextConfig(
        **{
            **tiny._COMMON,
            "head_dim": 8,
            "vocab_size_per_layer_input": tiny.VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "sliding_window": tiny.WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": shared,
            "activation_sparsity_pattern": None,
        }
    )
    model = tf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(14.0)
    return model


@pytest.mark.every(3)
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize(("tree", "batch"), [("dynamic:4,3,8", 1), ("chain:4", 4)])
def test_gemma3n_speculates_and_equals_transformers(shared: int, tree: str, batch: int) -> None:
    model = gemma3n(shared)
    expected = [tiny.continuation(model, prompt, 12) for prompt in PROMPTS]
    assert all(len(set(said)) > 3 for said in expected)
    target = Target(model)
    for drafter in (
        tiny.eagle3_drafter(),
        tiny.OracleDrafter([p + s for p, s in zip(PROMPTS, expected, strict=True)], (0, 2, 4), device=target.device),
    ):
        engine = Engine(target, speculation=Speculation(drafter, parse_tree(tree)), batch_size=batch)
        done = engine.generate([Request(tuple(prompt), PARAMS) for prompt in PROMPTS])
        assert [one.token_ids for one in done] == expected


def test_the_tap_is_the_stream_that_the_layers_compute_with() -> None:
    model = gemma3n(0)
    states: list[torch.Tensor] = []
    handle = model.model.layers[2].register_forward_pre_hook(lambda _, args: states.append(args[0]))
    full = tiny.full_forward(model, PROMPTS[0])
    handle.remove()
    assert states[0].dim() == 4
    tokens = torch.tensor([PROMPTS[0]])
    target = Target(model)
    trace = target.trace(tokens, torch.tensor([len(PROMPTS[0])]), (2, 5))
    active = states[0][model.config.altup_active_idx]
    assert logits_agree(trace.taps[:, :, 0], active, torch.float32)
    assert logits_agree(target.head(trace.taps[:, :, 1]), full.logits, torch.float32)


def doubled() -> Any:
    """A Llama whose layers hand on their states twice, one above the other."""
    model = tiny.build_model("llama")
    last = len(model.model.layers) - 1
    for index, layer in enumerate(model.model.layers):

        def forward(states: Any, *args: Any, _inner: Any = layer.forward, _index: int = index, **kwargs: Any) -> Any:
            out = _inner(states if _index == 0 else states[0], *args, **kwargs)
            return out if _index == last else torch.stack([out, out])

        layer.forward = forward
    return model


def test_boundaries_without_one_state_for_a_token_are_refused_for_drafters_only() -> None:
    model = doubled()
    target = Target(model)
    target.check_taps((0, 4, 5))
    with pytest.raises(
        UnsupportedModelError, match=r"at taps \[1, 4\]: .* shapes \[2, 1, 1, 32\] at 1, not the shape of"
    ):
        target.check_taps((1, 4))
    with pytest.raises(UnsupportedModelError, match="a drafter can't read this model's states"):
        Engine(target, speculation=Speculation(tiny.eagle3_drafter((1, 2, 4)), parse_tree("chain:2")))
    done = Engine(target).generate([Request(tuple(PROMPTS[0]), PARAMS)])
    assert done[0].token_ids == tiny.continuation(model, PROMPTS[0], 12)


def test_an_encoder_is_refused_by_name() -> None:
    config = tf.BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(UnsupportedModelError, match="bert is an encoder"):
        Target(tf.AutoModelForCausalLM.from_config(config).eval())


def test_a_model_that_fails_in_such_a_pass_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("could not create a primitive descriptor")

    model = tiny.build_model("llama")
    monkeypatch.setattr(model.model.layers[1], "forward", fail)
    with pytest.raises(UnsupportedModelError, match=r"llama can't run a pass with eyas's .* primitive descriptor"):
        Target(model)
