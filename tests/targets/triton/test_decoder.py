"""Passes in Triton: which models have them, and that speculation has the bits of plain decoding in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.drafters.base import Drafter
from eyas.engine import Engine, Speculation
from eyas.errors import UnsupportedModelError
from eyas.targets import Target, load_target, loading
from eyas.targets.graphs import Outputs, Recording
from eyas.targets.triton.choice import HeadLogits
from eyas.targets.triton.decoder import TritonDecoder, triton_decoder
from eyas.tree import DraftTree, parse_tree
from eyas.types import Request, SamplingParams
from tests import recording, tiny

FAMILIES = [
    "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "phi3", "neox", "granite", "smollm3", "phi", "stablelm",
    "starcoder2",
]  # fmt: skip
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
TOKENS = 5


def _model(name: str, **changes: Any) -> Any:
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if name in ("gemma2", "gemma3", "smollm3") else {}
    heads = {"num_key_value_heads": 2} if name in ("neox", "phi") else {}
    skipped = {"no_rope_layers": [1, 0]} if name == "smollm3" else {}
    return tiny.build_model(name, **{**SMALL, **layers, **heads, **skipped, **changes})


@cache
def _target(layers: int = 1) -> Target:
    model = _model("llama", num_hidden_layers=layers)
    return Target(model, decoder=triton_decoder(model))


@pytest.mark.parametrize(
    "name", tiny.sample(FAMILIES[2::5]) + [pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_families_pass_the_trial(name: str) -> None:
    model = _model(name)
    found = triton_decoder(model)
    assert Target(model, decoder=found).decoder is found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_half_precision_passes_the_trial(name: str) -> None:
    model = _model(name).half()
    assert Target(model, decoder=triton_decoder(model)).decoder is not None


@pytest.mark.parametrize("name", ["mixtral", "deepseek3", "gpt2"])
def test_other_models_are_left_as_they_are(name: str) -> None:
    model = tiny.build_model(name, **({} if name != "deepseek3" else tiny.fitting(name)))
    before = {key: value.data_ptr() for key, value in model.named_parameters()}
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__} has no passes in Triton"):
        triton_decoder(model)
    assert before == {key: value.data_ptr() for key, value in model.named_parameters()}


def test_loading_with_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "why_unusable", lambda _: None)
    for name in ("llama", "mixtral"):
        _model(name, num_hidden_layers=1).save_pretrained(tmp_path / name)
    target = load_target(tmp_path / "llama", device="cpu", kernels="triton")
    assert isinstance(target.decoder, TritonDecoder)
    assert target.native is None
    with pytest.raises(UnsupportedModelError, match="MixtralForCausalLM has no passes in Triton"):
        load_target(tmp_path / "mixtral", device="cpu", kernels="triton")
    monkeypatch.setattr(TritonDecoder, "_run_mlp", lambda _self, _layer, x, *_: x)
    with pytest.raises(UnsupportedModelError, match="don't compute what the modules of LlamaForCausalLM do"):
        load_target(tmp_path / "llama", device="cpu", kernels="triton")


@pytest.mark.parametrize(
    ("name", "quantize", "dtype"),
    [
        ("llama", "int4", torch.float32),
        ("phi3", "int8", torch.float16),  # whose queries, keys and values, gates and ups are one weight
        pytest.param("gemma3", "int4", torch.float16, marks=pytest.mark.slow),
    ],
)
def test_quantized_weights(
    name: str, quantize: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass the trial, and speculation has the bits of plain decoding."""
    monkeypatch.setattr(loading, "why_unusable", lambda _: None)
    model = _model(name, num_hidden_layers=1, hidden_size=64, head_dim=32, intermediate_size=128).to(dtype)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, device="cpu", dtype=dtype, kernels="triton", quantize=quantize)
    assert target.decoder is not None
    assert target.precision["weights"] == ", ".join(sorted({"int8", quantize}))
    plain = _answers(None, 1, 0.0, target)
    sequences = [[*prompt, *answer] for prompt, answer in zip(_prompts(), plain, strict=True)]
    assert _answers(Speculation(tiny.OracleDrafter(sequences, (0, 1)), parse_tree("chain:2")), 2, 0.0, target) == plain


def test_weights_are_not_copied() -> None:
    model = _model("qwen2")
    expected = {key: value.clone() for key, value in model.named_parameters()}
    found = triton_decoder(model)
    for key, value in model.named_parameters():
        assert value.equal(expected[key])
    attention = model.model.layers[0].self_attn
    whole = found._layers[0].qkv.values
    assert attention.q_proj.weight.data_ptr() == whole.data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_wrong_layer_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = _model("llama", num_hidden_layers=1)
    found = triton_decoder(model)
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    target = Target(model, decoder=found)
    assert target.decoder is None
    assert "layer 0 is" in caplog.text


def _answers(
    speculation: Speculation | None,
    batch: int,
    temperature: float,
    target: Target | None = None,
    tokens: int = TOKENS,
) -> list[list[int]]:
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=5)
    engine = Engine(target or _target(), None, speculation, batch_size=batch)
    requests = [Request(tuple(prompt), params) for prompt in _prompts()]
    return [done.token_ids for done in engine.generate(requests)]


def _prompts() -> list[list[int]]:
    return tiny.prompts(7, 1)


@pytest.mark.parametrize(
    ("temperature", "tree", "batch"),
    [
        (0.0, "dynamic:3,2,5", 1), (0.8, "dynamic:3,2,5,0.1", 4), (0.8, "chain:3", 1),
        pytest.param(0.0, "chain:3", 4, marks=pytest.mark.slow),
        pytest.param(0.0, "dynamic:4,3,8,0.1", 4, marks=pytest.mark.slow),
        pytest.param(0.8, "dynamic:4,3,8", 4, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_speculation_has_the_bits_of_plain_decoding(temperature: float, tree: str, batch: int) -> None:
    """With a drafter that is often right, anywhere in its trees."""
    plain = _plain(temperature)
    sequences = [[*prompt, *answer] for prompt, answer in zip(_prompts(), plain, strict=True)]
    drafter: Drafter = tiny.OracleDrafter(sequences, (0, 2))
    assert _answers(Speculation(drafter, parse_tree(tree)), batch, temperature) == plain


@cache
def _plain(temperature: float) -> list[list[int]]:
    """Plain answers, one by one."""
    return _answers(None, 1, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_rounds_have_the_same_bits(temperature: float) -> None:
    """Plain ones and drafted ones, in batches whose rows come and go."""
    replays = 0

    def record(compute: Callable[[], Outputs]) -> Recording:
        made = recording.record(compute)

        def replay() -> None:
            nonlocal replays
            replays += 1
            made.replay()

        return Recording(replay, made.outputs)

    model = _model("llama", num_hidden_layers=1)
    target = Target(model, decoder=triton_decoder(model), record=record)
    assert target.decoder is not None
    assert target.record is not None
    plain = _answers(None, 1, temperature, tokens=9)
    sequences = [[*prompt, *answer] for prompt, answer in zip(_prompts(), plain, strict=True)]
    for speculation in (None, Speculation(tiny.OracleDrafter(sequences, (0, 2)), parse_tree("chain:1"))):
        before = replays
        assert _answers(speculation, 2, temperature, target, tokens=9) == plain
        assert replays > before


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_network_and_batches_change_nothing(temperature: float) -> None:
    assert _answers(None, 4, temperature) == _plain(temperature)
    model = tiny.build_model("llama", num_attention_heads=2, num_key_value_heads=1)
    target = Target(model, decoder=triton_decoder(model))
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=5)
    requests = [Request(tuple(prompt), params) for prompt in _prompts()]
    speculation = Speculation(tiny.eagle3_drafter(), parse_tree("dynamic:3,2,5"))
    plain, drafted = (Engine(target, None, each, batch_size=2).generate(requests) for each in (None, speculation))
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]


def test_logits_states_and_taps_of_a_tree_are_those_of_its_paths_in_bits() -> None:
    """Also of a prompt read in two pieces, of rows of other lengths, and of padded columns."""
    target, prompts = _target(2), [[5, 6, 7, 8, 9], [11, 12]]
    tokens, parents = torch.tensor([[20, 21, 22, 23]] * 2), torch.tensor([[-1, 0, -1, 2]] * 2)
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    tree = DraftTree(tokens, parents, valid.float(), valid, 2, counted=6)
    cache = target.allocate(2)
    for _ in target.prefill(cache, range(2), prompts, (), 2):
        pass
    done = target.verify(cache, range(2), torch.tensor([9, 12]), tree, (0, 1, 3))
    assert isinstance(done.logits, HeadLogits)
    alone = target.allocate(1)
    for _ in target.prefill(alone, range(1), prompts[:1], ()):
        pass
    for token, node in ((9, 0), (22, 3), (23, 4)):
        found = target.verify(alone, range(1), torch.tensor([token]), DraftTree.empty(1, tokens.device), (0, 1, 3))
        at = done.logits.index[0, node]
        assert found.logits.rows[0].equal(done.logits.rows[at])
        assert found.taps[0].equal(done.taps[at])
        alone.commit(range(1), [[0]])
