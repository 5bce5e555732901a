"""MTP modules in target checkpoints: found, computed as others compute them, and used without changing a token."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import eyas
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine, Speculation
from eyas.errors import CheckpointError, UnsupportedModelError, UsageError
from eyas.targets import Target, load_target
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams

from ... import tiny
from ..cacheless import causal
from . import checkpoints
from .equality import equal_to_plain

CASES = {
    "deepseek": ("deepseek3", "deepseek"),
    "glm": ("glm4moe", "deepseek"),
    "qwen": ("qwen3", "qwen"),
    "qwen_next": ("qwen3_next", "qwen"),
    "qwen3_5": ("qwen3_5", "qwen"),
    "mimo": ("qwen2", "mimo"),
    "nemotron": ("nemotron_h", "nemotron"),
}
THEIRS = ("deepseek", "glm")


class Case:
    """A checkpoint with a module, loaded."""

    def __init__(self, path: Path, name: str) -> None:
        architecture, layout = CASES[name]
        self.path = path
        self.tensors = checkpoints.save(path, architecture, layout)
        self.target = load_target(path, dtype="float32")
        drafter = make_drafter(DrafterOptions(method="mtp", quantize="off"), self.target, model=path)
        assert isinstance(drafter, NetworkDrafter)
        self.drafter = drafter


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes each case once."""
    return cache(lambda name: Case(tmp_path_factory.mktemp(name), name))


def inputs(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Nine tokens and states."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(tiny.VOCAB, (1, 9), generator=draw), torch.randn(1, 9, tiny.HIDDEN, generator=draw)


def two_steps(drafter: NetworkDrafter) -> tuple[Tensor, Tensor]:
    """The logits [9, V] of a pass, and those of another in which its states are fed back."""
    network, (tokens, states) = drafter.network, inputs()
    with torch.inference_mode():
        fed, one = network.step(tokens, states, torch.arange(9)[None], causal)
        _, two = network.step(tokens.flip(1), fed, 1 + torch.arange(9)[None], causal)
        return network.logits(one)[0], network.logits(two)[0]


@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="this transformers can't run a module alone")
@pytest.mark.parametrize("name", THEIRS)
def test_logits_are_those_of_transformers_module(case: Any, name: str) -> None:
    made = case(name)
    model = checkpoints.model(CASES[name][0]).from_pretrained(made.path)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{tiny.LAYERS}\..*"]  # published sizes have their own
    theirs = MtpModel.from_pretrained(model).eval()
    tokens, states = inputs()

    def layer(states: Tensor, tokens: Tensor, start: int) -> Tensor:
        embedded = model.get_input_embeddings()(tokens)
        if start == 0:
            embedded[:, 0] = 0  # as vLLM; transformers itself leaves it
        cache_ = MtpCache(config=model.config.get_mtp_config())
        at = start + torch.arange(9)[None]
        return theirs.forward_layer(0, states, at, cache_, inputs_embeds=embedded)

    with torch.inference_mode():
        one = layer(states, tokens, 0)
        two = layer(one, tokens.flip(1), 1)
        expected = model.lm_head(one)[0], model.lm_head(two)[0]
    for ours, other in zip(two_steps(made.drafter), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def by_hand(case: Case, layout: str, states: Tensor, tokens: Tensor, start: int) -> Tensor:
    """A module on a dense decoder layer, in the words of its family's file: [9, H] from states [9, H]."""
    held = case.tensors
    if layout == "qwen":
        outer = "mtp.pre_fc_norm_embedding mtp.pre_fc_norm_hidden mtp.fc mtp.norm"
        prefix = "mtp.layers.0."
        plus = 1.0
    else:
        stem = prefix = "model.mtp_layers.0."
        outer = " ".join(stem + n for n in "token_layernorm hidden_layernorm input_proj final_layernorm".split())
        plus = 0.0
    of_tokens, of_states, project, last = (held[f"{name}.weight"] for name in outer.split())
    weights = {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
    embedded = case.target.model.get_input_embeddings().weight[tokens]
    if layout == "mimo" and start == 0:
        embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
    both = norm(embedded, of_tokens + plus), norm(states, of_states + plus)
    x = torch.cat(both if layout == "qwen" else both[::-1], dim=1) @ project.T

    y = norm(x, weights["input_layernorm.weight"] + plus)
    heads = {}
    for part, count in (("q", 4), ("k", 2), ("v", 2)):
        out = y @ weights[f"self_attn.{part}_proj.weight"].T + weights.get(
            f"self_attn.{part}_proj.bias", torch.zeros(1)
        )
        heads[part] = out.view(9, count, 8)
        if f"self_attn.{part}_norm.weight" in weights:
            heads[part] = norm(heads[part], weights[f"self_attn.{part}_norm.weight"] + plus)
    angles = (start + torch.arange(9.0))[:, None] / 10000 ** (torch.arange(4.0) / 4)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    for part in "qk":
        a, b = heads[part].chunk(2, dim=2)
        heads[part] = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=2)
    mixed = torch.empty(9, 4, 8)
    for head in range(4):
        scores = heads["q"][:, head] @ heads["k"][:, head // 2].T / 8**0.5
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
        mixed[:, head] = scores.softmax(1) @ heads["v"][:, head // 2]
    x = x + mixed.flatten(1) @ weights["self_attn.o_proj.weight"].T
    y = norm(x, weights["post_attention_layernorm.weight"] + plus)
    gate, up, down = (weights[f"mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    return norm(x + (F.silu(y @ gate) * (y @ up)) @ down, last + plus)


@pytest.mark.parametrize("name", ["qwen", "mimo"])
def test_logits_are_those_written_out_by_hand(case: Any, name: str) -> None:
    made = case(name)
    tokens, states = inputs()
    head = load_file(made.path / "model.safetensors")["lm_head.weight"]
    one = by_hand(made, name, states[0], tokens[0], 0)
    two = by_hand(made, name, one, tokens[0].flip(0), 1)
    for ours, other in zip(two_steps(made.drafter), (one @ head.T, two @ head.T), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_logits_are_those_of_nemotron_s_own_layers(case: Any) -> None:
    made = case("nemotron")
    held, (tokens, states) = dict(made.tensors), inputs()
    for part in ("up_proj", "down_proj"):
        names = [f"mtp.layers.1.mixer.experts.{expert}.{part}.weight" for expert in range(4)]
        held[f"mtp.layers.1.mixer.experts.{part}"] = torch.stack([held.pop(name) for name in names])
    config = copy.deepcopy(made.target.config)
    config.layers_block_type = config.mtp_layers_block_type
    embedded = made.target.model.get_input_embeddings()(tokens)
    both = norm(embedded, held["mtp.layers.0.enorm.weight"]), norm(states, held["mtp.layers.0.hnorm.weight"])
    x = torch.cat(both, dim=-1) @ held["mtp.layers.0.eh_proj.weight"].T
    for index in range(2):
        layer = type(made.target.layers[0])(config, index)
        layer.load_state_dict({name: held[f"mtp.layers.{index}.{name}"] for name in layer.state_dict()})
        with torch.inference_mode():
            x = layer(x)
    head = load_file(made.path / "model.safetensors")["lm_head.weight"]
    expected = norm(x, held["mtp.layers.1.final_layernorm.weight"]) @ head.T
    torch.testing.assert_close(two_steps(made.drafter)[0], expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "temperature", "tree"),
    tiny.sample([*CASES], [0.0, 0.7, 1.0], ["chain:3", "dynamic:3,3,7", "shared:3,3,7"]),
)
def test_output_is_that_of_plain_decoding(case: Any, name: str, temperature: float, tree: str) -> None:
    made = case(name)
    equal_to_plain(made.target, made.drafter, temperature, tree)


@pytest.mark.parametrize("name", CASES)
def test_a_draft_in_the_engine_is_the_module_s_chain(case: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's final states and the next tokens in one causal pass, then its own output: greedy guesses."""
    made = case(name)
    network, target = made.drafter.network, made.target
    prompt = tiny.prompts(12)[0]
    speculation = Speculation(made.drafter, parse_tree("chain:3"))
    engine = Engine(target, None, speculation, batch_size=1)
    drafted: list[list[int]] = []
    assert engine.speculation is not None
    drafter = engine.speculation.drafter
    draft = drafter.draft

    def recorded(*args: Any, **options: Any) -> Any:
        tree = draft(*args, **options)
        drafted.append(tree.tokens[0].tolist())
        return tree

    monkeypatch.setattr(drafter, "draft", recorded)
    first = engine.generate([Request(prompt, SamplingParams(max_tokens=4))])[0].token_ids[0]
    tokens = torch.tensor([[*prompt[1:], first]])
    guesses: list[int] = []
    with torch.inference_mode():
        states = target.trace(torch.tensor([prompt]), torch.tensor([len(prompt)]), ()).final
        for _ in range(3):
            fed, normed = network.step(tokens, states, torch.arange(states.shape[1])[None], causal)
            guesses.append(int(network.logits(normed[0, -1]).argmax()))
            tokens = torch.cat((tokens, torch.tensor([guesses[-1:]])), dim=1)
            states = torch.cat((states, fed[:, -1:]), dim=1)
    assert drafted[0] == guesses


def test_copies_of_the_target_s_embedding_and_head_are_shared(case: Any, tmp_path: Path) -> None:
    config = case("deepseek").drafter.network.config
    assert (config.embedding, config.head) == ("shared", "shared")
    held = load_file(case("deepseek").path / "model.safetensors")
    for file in case("deepseek").path.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    held[f"model.layers.{tiny.LAYERS}.shared_head.head.weight"] *= 2
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    own = make_drafter(DrafterOptions(method="mtp", quantize="off"), case("deepseek").target, model=tmp_path)
    assert isinstance(own, NetworkDrafter)
    assert (own.network.config.embedding, own.network.config.head) == ("shared", "own")
    for ours, other in zip(two_steps(own), two_steps(case("deepseek").drafter), strict=True):
        torch.testing.assert_close(ours, 2 * other)


def test_a_target_without_modules_is_named_with_what_there_is(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, "llama", None)
    with pytest.raises(CheckpointError, match=r"no MTP modules \(.*DeepSeek-V3.*ngram"):
        eyas.load(tmp_path, method="mtp")
    with pytest.raises(UsageError, match="needs a drafter"):
        eyas.load(tmp_path, method="eagle3")


def _damaged(case: Any, path: Path, **changes: Tensor | None) -> Target:
    """A copy of the DeepSeek-V3 case with tensors of the module replaced, or left out."""
    made = case("deepseek")
    for file in made.path.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    held = load_file(made.path / "model.safetensors")
    for name, tensor in changes.items():
        full = f"model.layers.{tiny.LAYERS}.{name}"
        held.pop(full)
        if tensor is not None:
            held[full] = tensor
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    target: Target = made.target
    return target


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("hnorm.weight", None, "missing: hnorm.weight"),
        ("eh_proj.weight", torch.zeros(tiny.HIDDEN, 63), r"eh_proj.weight is \[32, 63\]"),
        ("mlp.experts.2.up_proj.weight", None, "missing: .*experts.gate_up_proj"),
        ("eh_proj.weight", torch.full((tiny.HIDDEN, 2 * tiny.HIDDEN), float("nan")), "NaN"),
        ("eh_proj.weight", torch.zeros(tiny.HIDDEN, 2 * tiny.HIDDEN, dtype=torch.float8_e4m3fn), "float8"),
    ],
)
def test_damage_is_named(case: Any, tmp_path: Path, name: str, tensor: Tensor | None, reason: str) -> None:
    target = _damaged(case, tmp_path, **{name: tensor})
    with pytest.raises(CheckpointError, match=reason):
        make_drafter(DrafterOptions(method="mtp"), target, model=tmp_path)


def test_a_block_that_drafters_do_not_compute_is_named(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, "mistral", "mimo")
    with pytest.raises(UnsupportedModelError, match=r"MistralDecoderLayer.*sliding_window"):
        eyas.load(tmp_path, method="mtp")
