"""Every layer of a native decoder is tried alone: what is wrong in one is found in any dtype, at any scale."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as tf
from torch import Tensor

from eyas.targets import Target
from eyas.targets.linears import prepack_linears
from eyas.targets.native import layer_trials
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.decoder import NativeDecoder, Staged
from eyas.targets.native.experts import replace_experts
from eyas.targets.native.layer_trials import probed_positions
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear

from ... import tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
TYPES = (torch.float32, torch.bfloat16)
SCALES = (0.5, 20.0)
LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "pad_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def random_model(config: Any, scale: float, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(scale)
    return model.to(dtype)


def tried(model: Any, broken: Callable[[NativeDecoder], None] | None = None) -> Target:
    """A model as a target whose native passes are kept if they stand the trial.

    One that is `broken` first runs padded passes instead, so that they needn't be tried, too.
    """
    dtype = model.dtype
    prepack_linears(model, NativeLinear)
    replace_experts(model, NativeLinear, dtype)
    native = transformers_decoder(model)
    assert native is not None
    if broken is not None:
        broken(native)
    return Target(model, ragged=broken is None, decoder=native)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_queries_scaled_by_their_positions_are_refused(
    scale: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    config = tf.Ministral3Config(**SIZES, rope_parameters=YARN)
    assert tried(random_model(config, scale, dtype)).native is None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        "Ministral3ForCausalLM runs its modules, not native passes: layer 0 reads position ids for more than RoPE"
    ]


def test_latent_attention_that_looks_at_positions_is_refused() -> None:
    """Mistral 4 scales queries by their positions, from the eight thousandth on."""
    model = tiny.build_model("deepseek3", **tiny.fitting("deepseek3"))
    attention = model.model.layers[0].self_attn
    own = attention.forward

    def forward(
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        cache: Any = None,
        position_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        factor = 1.0 if position_ids is None else 1.0 + (position_ids > 200).unsqueeze(-1)
        held = past_key_values if cache is None else cache  # as releases of transformers call it
        return own(factor * hidden_states, position_embeddings, attention_mask, held, **kwargs)

    attention.forward = forward
    assert tried(model).native is None


@pytest.mark.parametrize(("experts", "scale", "dtype"), tiny.every_other([False, True], SCALES, TYPES))
def test_layers_without_rope_are_found(experts: bool, scale: float, dtype: torch.dtype) -> None:
    more = {"sliding_window": 16, "sliding_window_pattern": 4, "layer_types": LAYERS}
    if experts:
        config = tf.ExaoneMoeConfig(
            **SIZES,
            **more,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            mlp_layer_types=["dense"] + ["sparse"] * 3,
        )
    else:
        config = tf.Exaone4Config(**SIZES, **more)
    native = tried(random_model(config, scale, dtype)).native
    assert native is not None
    assert [layer.rope for layer in native._layers] == [1, 1, 1, -1] if len(native._ropes) > 1 else [0, 0, 0, -1]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_rope_that_turns_neighbors_is_refused_at_any_scale(scale: float, dtype: torch.dtype) -> None:
    assert tried(tiny.build_model("cohere", scale=scale, **tiny.fitting("llama")).to(dtype)).native is None


def without_rope(native: NativeDecoder) -> None:
    tables = native._ropes[0]

    def still(positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = tables(positions)
        return torch.ones_like(cosines), torch.zeros_like(sines)

    native._ropes = [still]


def of_other_scale(native: NativeDecoder) -> None:
    native._struct.scale *= 1.01


def of_other_epsilon(native: NativeDecoder) -> None:
    native._struct.eps *= 1.5


def with_a_window(native: NativeDecoder) -> None:
    native._layers[2].window = 100


def scaled_behind(native: NativeDecoder) -> None:
    ropes = list(native._ropes)

    def scaled(positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = ropes[0](positions)
        factor = 1 + 0.1 * (positions > 100).unsqueeze(-1).to(cosines.dtype)
        return cosines * factor, sines * factor

    native._ropes = [scaled]


def of_other_window(by: int) -> Callable[[NativeDecoder], None]:
    def break_it(native: NativeDecoder) -> None:
        native._layers[2].window += by

    return break_it


def without(norm: str) -> Callable[[NativeDecoder], None]:
    def break_it(native: NativeDecoder) -> None:
        for layer in native._layers:
            setattr(layer, norm, native._vector(torch.ones(tiny.HIDDEN)))

    return break_it


BROKEN = {
    "no RoPE": without_rope,
    "a wrong scale": of_other_scale,
    "a wrong epsilon": of_other_epsilon,
    "a window": with_a_window,
    "keys scaled behind a position": scaled_behind,
    "no factors of the first norm": without("input_norm"),
    "no factors of the second norm": without("mlp_norm"),
}


@pytest.mark.parametrize(("wrong", "scale", "dtype"), tiny.every_other([*BROKEN], SCALES, TYPES))
def test_what_is_broken_in_a_layer_is_found(wrong: str, scale: float, dtype: torch.dtype) -> None:
    model = tiny.build_model("llama", scale=scale, head_dim=16).to(dtype)
    assert tried(model, BROKEN[wrong]).native is None


@pytest.mark.parametrize(("by", "scale", "dtype"), tiny.every_other([-1, 0, 1], SCALES, TYPES))
def test_a_window_that_is_off_by_one_is_found(by: int, scale: float, dtype: torch.dtype) -> None:
    model = tiny.build_model("mistral", scale=scale, head_dim=16, sliding_window=100).to(dtype)
    assert (tried(model, of_other_window(by)).native is None) == bool(by)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "scale", "dtype"),
    tiny.every_other(["llama", "gemma2", "olmo2", "mixtral", "gptoss", "deepseek3", "neox", "gpt2"], SCALES, TYPES),
)
def test_what_is_right_stays_native_at_any_scale(name: str, scale: float, dtype: torch.dtype) -> None:
    assert tried(tiny.build_model(name, scale=scale, **tiny.fitting(name)).to(dtype)).native is not None


def test_a_soft_cap_far_above_the_scores_changes_nothing() -> None:
    """Its tanh keeps all digits of small ones: 1 - 2 / (e^2x + 1) would be off by 6e-8, which the cap multiplies."""
    model = tiny.build_model("gemma2", scale=0.5, attn_logit_softcapping=500.0, **tiny.fitting("gemma2"))
    target = tried(model)
    native = target.native
    assert native is not None
    tokens = torch.arange(16).unsqueeze(0)
    made = list[Tensor]()
    for cap in (500.0, 0.0):
        native._struct.softcap = cap
        made.append(native.run(target.allocate(1, 16), Staged(range(1), 16, None, [0], None), tokens).states)
    assert (made[0] - made[1]).abs().max() <= 8 * torch.finfo(torch.float32).eps * made[1].abs().max()


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama", [[0, 1, 2, 3]]),
        ("gemma2", [[0, 2], [1, 3]]),
        ("smollm3", [[0, 1, 3], [2]]),  # one without RoPE
        ("glm4moe", [[0], [1, 2, 3]]),  # the first one has no experts
        ("qwen2moe", [[0, 2, 3], [1]]),
    ],
)
def test_one_layer_of_each_kind_is_tried(name: str, groups: list[list[int]]) -> None:
    with patch.object(layer_trials, "_layer_refusal", wraps=layer_trials._layer_refusal) as refusals:
        assert tried(tiny.build_model(name, **tiny.fitting(name))).native is not None
    assert [call.args[2] for call in refusals.call_args_list] == [group[0] for group in groups for _ in range(2)]


@pytest.mark.parametrize("attribute", ["scaling", "forward"])
def test_a_layer_that_differs_in_anything_is_tried_itself(attribute: str) -> None:
    model = tiny.build_model("llama", head_dim=16)
    attention = model.model.layers[2].self_attn
    changed = 2.0 * attention.scaling if attribute == "scaling" else partial(_doubled, attention.forward)
    assert tried(model, lambda _: setattr(attention, attribute, changed)).native is None


def _doubled(forward: Any, **given: Any) -> Any:
    out, *rest = forward(**given)
    return (2.0 * out, *rest)


def test_a_layer_that_was_taken_for_one_without_rope_gets_it_back() -> None:
    def off(native: NativeDecoder) -> None:
        native._layers[1].rope = -1

    native = tried(tiny.build_model("llama", head_dim=16), off).native
    assert native is not None
    assert native._layers[1].rope == 0


def test_positions_are_near_at_numbers_of_the_config_and_far() -> None:
    config = tf.Ministral3Config(**SIZES, rope_parameters=YARN)
    found = probed_positions(config.to_dict(), 256).tolist()
    assert found == sorted(found)
    assert {*range(8), 32, 254, 255} <= set(found)
    assert len(found) < 40
    assert max(probed_positions(config.to_dict(), None).tolist()) >= 256


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3_next", "key", 0), ("qwen3_next", "gate", 0), ("qwen3_5", "factor_scale", 2.0),
        ("qwen3_5", "gates_first", 1), ("qwen3_5", "kernel", 3), ("bamba", "skip", None),
        ("bamba", "filter_bias", None), ("bamba", "norm_size", 16), ("bamba", "gates_first", 0),
        ("lfm2", "multiplier", 0), ("lfm2", "gate", 0), ("falcon_h1", "scales", None),
    ],
)  # fmt: skip
def test_a_recurrence_of_another_kind_is_refused(name: str, field: str, value: Any) -> None:
    """What differs in one of its numbers runs as modules. Layers are tried in float32, whatever the dtype is."""

    def breaks(native: NativeDecoder) -> None:
        layers = [layer for layer in native._layers if layer.recurrent.count]
        assert len(layers) >= 2
        setattr(layers[1].recurrent, field, value)

    assert tiny.as_loaded(name, "bfloat16").native is not None
    model = tiny.build_model(name, **tiny.fitting_recurrent(name)).to(torch.bfloat16)
    checks = ("check_states", "find_odd_steps")  # of the modules, which take seconds
    with patch.multiple("eyas.targets.target", **dict.fromkeys(checks, lambda _target: None)):
        assert tried(model, breaks).native is None


@pytest.mark.every(2)
@pytest.mark.parametrize("field", ["recurrent_scale", "attention_scale", "mlp_scale", "gate_scale"])
def test_a_layer_with_other_factors_is_refused(field: str) -> None:
    def breaks(native: NativeDecoder) -> None:
        assert getattr(native._layers[1], field) != 1.0
        setattr(native._layers[1], field, 1.0)

    model = tiny.build_model("falcon_h1", **tiny.fitting_recurrent("falcon_h1"))
    assert tried(model, breaks).native is None


def test_scans_that_limit_steps_are_taken_for_their_steps() -> None:
    """Nemotron-H's own single steps don't limit what its scans limit."""
    model = tiny.build_model("nemotron_h", **tiny.fitting_recurrent("nemotron_h"), time_step_min=0.1)
    target = tried(model)
    assert target.native is not None
    assert {part.time_step_limit[0] for part in target.layers.modules() if hasattr(part, "time_step_limit")} == {0.1}
