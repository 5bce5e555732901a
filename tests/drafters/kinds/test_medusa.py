"""Medusa heads against their definition, in the layouts in which they are published, and in the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.drafters.checkpoint import load_network, open_checkpoint, save_network
from eyas.drafters.decoding import NetworkDrafter, NetworkPairs, Proposer
from eyas.drafters.kinds.medusa import MedusaNetwork
from eyas.drafters.loading import load_drafter
from eyas.engine import Engine, Speculation
from eyas.engine.controller import make_controller
from eyas.engine.default_tree import tree_for
from eyas.errors import CheckpointError, ConfigError, DrafterMismatchError, UsageError
from eyas.tree import TreeSpec, parse_tree
from eyas.types import Limits, Request, SamplingParams

from ... import tiny

HEADS, LAYERS = 5, 2
PUBLISHED = {"base_model_name_or_path": "someone/model", "medusa_num_heads": 2, "medusa_num_layers": LAYERS}
"""As FasterDecoding's config.json: no sizes, and fewer heads than there are in the file."""


def published(seed: int = 0, hidden: int = tiny.HIDDEN) -> dict[str, Tensor]:
    """FasterDecoding's tensors: `{head}.{layer}.linear.*`, and each head's matrix after its layers."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = 0.3 * torch.randn(hidden, hidden, generator=draw)
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(hidden, generator=draw)
        tensors[f"{head}.{LAYERS}.weight"] = torch.randn(tiny.VOCAB, hidden, generator=draw)
    return tensors


def restated(tensors: dict[str, Tensor], state: Tensor) -> Tensor:
    """Logits [D, V] of all heads after one final state [H], written out."""
    found = []
    for head in range(HEADS):
        x = state
        for layer in range(LAYERS):
            y = tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"]
            x = x + y / (1 + torch.exp(-y))
        found.append(tensors[f"{head}.{LAYERS}.weight"] @ x)
    return torch.stack(found)


def in_vllm_names(tensors: dict[str, Tensor], ids: Tensor | None = None) -> dict[str, Tensor]:
    named = {}
    for name, tensor in tensors.items():
        head, at, *rest = name.split(".")
        if rest == ["weight"]:
            named[f"lm_heads.{head}.weight"] = tensor if ids is None else tensor[ids]
        else:
            named[f"blocks.{head}.layers.{at}.{rest[1]}"] = tensor
    return named if ids is None else {**named, "token_map": ids}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


VLLM = {
    "model_type": "medusa",
    "architectures": ["MedusaModel"],
    "num_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "hidden_size": tiny.HIDDEN,
    "vocab_size": tiny.VOCAB,
    "medusa_fc_bias": True,
    "max_paths": 64,
    "topk": 10,
}


@pytest.mark.parametrize("layout", ["FasterDecoding", "vLLM", "vLLM, reduced"])
def test_published_layouts_compute_what_is_written_out(tmp_path: Path, layout: str) -> None:
    tensors = published()
    ids = torch.tensor([70, 3, 4, 9, 11, 50, 33, 20, 12, 90])
    if layout == "FasterDecoding":
        folder = write(tmp_path / "one", PUBLISHED, tensors)
        ids = torch.arange(tiny.VOCAB)
    elif layout == "vLLM":
        folder = write(tmp_path / "one", VLLM, in_vllm_names(tensors))
        ids = torch.arange(tiny.VOCAB)
    else:
        folder = write(tmp_path / "one", VLLM | {"truncated_vocab_size": len(ids)}, in_vllm_names(tensors, ids))
    network = load_network(folder)
    assert isinstance(network, MedusaNetwork)
    assert (network.config.num_heads, network.config.num_hidden_layers) == (HEADS, LAYERS)
    assert torch.equal(network.target_ids, ids)
    states = torch.randn(3, tiny.HIDDEN)
    expected = torch.stack([restated(tensors, state) for state in states])[:, :, ids]
    guessed = torch.stack([network.guess(states, head) for head in range(HEADS)], dim=1)
    torch.testing.assert_close(network.logits(guessed), expected, rtol=1e-5, atol=1e-5)
    for head in range(HEADS):
        followed = network.follow(network.block(states, HEADS), head, None)
        torch.testing.assert_close(followed[:, 0], expected[:, head], rtol=1e-5, atol=1e-5)
    save_network(network, tmp_path / "two")
    again = load_network(tmp_path / "two")
    assert again.config == network.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in network.state_dict().items())


def test_the_tensors_are_trusted_more_than_the_counts(tmp_path: Path) -> None:
    doubts = open_checkpoint(write(tmp_path, PUBLISHED, published())).report.doubts
    assert doubts == ["medusa_num_heads says 2 heads, the file has tensors of 5: all 5 are read"]
    assert not open_checkpoint(write(tmp_path, {**PUBLISHED, "medusa_num_heads": 5}, published())).report.doubts


def test_a_pickle_is_read_only_if_it_is_named(tmp_path: Path) -> None:
    tensors = published()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    with pytest.raises(CheckpointError, match=r"`draft_weights=medusa_lm_head\.pt"):
        load_network(tmp_path)
    network = load_network(tmp_path, weights="medusa_lm_head.pt")
    state = torch.randn(tiny.HIDDEN)
    assert isinstance(network, MedusaNetwork)
    found = torch.stack([network.logits_at(network.guess(state, head), head) for head in range(HEADS)])
    torch.testing.assert_close(found, restated(tensors, state), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "removed", "words"),
    [
        ({}, "3.1.linear.bias", r"missing: blocks\.3\.layers\.1\.bias"),
        ({}, "1.2.weight", r"missing: lm_heads\.1\.weight"),
        ({"5.0.linear.weight": torch.ones(32, 32)}, "", r"missing: blocks\.5\.layers\.0\.bias"),
        ({"0.7.weight": torch.ones(96, 32)}, "", r"extra: 0\.7\.weight"),
        ({"2.0.linear.weight": torch.ones(16, 32)}, "", r"blocks\.2\.layers\.0\.weight is \[16, 32\]"),
    ],
)
def test_loading_is_strict(tmp_path: Path, changes: dict[str, Tensor], removed: str, words: str) -> None:
    tensors = {name: tensor for name, tensor in published().items() if name != removed}
    with pytest.raises(CheckpointError, match=words):
        load_network(write(tmp_path, PUBLISHED, {**tensors, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taps": [3]}, "reads the target's state after its final norm"),
        ({"original_lm_head": True}, "matrices of their own"),
        ({"logit_scale": 0.5}, "aren't scaled"),
        ({"medusa_choices": "best"}, "unknown key medusa_choices"),
    ],
)
def test_variants_that_compute_something_else_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_network(write(tmp_path, {**PUBLISHED, **changes}, published()))


def test_heads_for_another_base_are_refused_by_shape(tmp_path: Path) -> None:
    with pytest.raises(DrafterMismatchError, match="it reads states 24 wide, the target's are 32"):
        load_drafter(write(tmp_path, PUBLISHED, published(hidden=24)), tiny.target())


def test_a_level_is_a_head_on_the_last_state() -> None:
    """In the engine's terms: after the pair (state at i, token i + 1), head 0 guesses token i + 2, the root's child."""
    target = tiny.target()
    tensors = published()
    prompt = tiny.prompts(9)[0]
    depth = 4
    offered = []

    class Spy(NetworkDrafter):
        def draft(self, rows: range, spec: TreeSpec, *more: Any) -> Any:
            tree = super().draft(rows, spec, *more)
            offered.append(tree)
            return tree

    network = load_network_from(tensors)
    spy = Spy(Proposer(network), (tiny.LAYERS + 1,), NetworkPairs(network))
    engine = Engine(target, None, Speculation(spy, parse_tree(f"chain:{depth}")))
    engine.generate([Request(tuple(prompt), SamplingParams(max_tokens=4))])
    emitted = tiny.continuation(target.model, prompt, 1)[0]
    states = tiny.full_forward(target.model, [*prompt, emitted]).hidden_states[-1]  # normed: transformers' last one is
    hidden = states[0, -2]
    expected = restated(tensors, hidden).log_softmax(-1)[:depth]
    assert offered[0].tokens[0].tolist() == expected.argmax(-1).tolist()
    torch.testing.assert_close(offered[0].logprob[0], expected.max(-1).values.cumsum(0), rtol=1e-3, atol=1e-3)


def load_network_from(tensors: dict[str, Tensor]) -> MedusaNetwork:
    network = tiny.network("medusa", num_heads=HEADS, num_hidden_layers=LAYERS, draft_vocab_size=tiny.VOCAB)
    assert isinstance(network, MedusaNetwork)
    maps = {name: network.state_dict()[name] for name in ("d2t", "t2d")}
    network.fill({**in_vllm_names(tensors), **maps})
    return network


TREES = ["chain:5", "static:mc_sim_7b_63", "dynamic:4,4,12", "dynamic:4,3,8,0.1", "shared:4,3,20"]


@pytest.mark.every(2)
@pytest.mark.parametrize(("temperature", "tree", "batch"), tiny.sample([0.0, 0.7, 1.0], TREES, [1, 4]))
def test_output_is_that_of_plain_decoding(temperature: float, tree: str, batch: int) -> None:
    target = tiny.quick_target()
    requests = [
        Request(prompt, SamplingParams(max_tokens=16, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(1, 4, 15, 7, 6))
    ]
    plain = [done.token_ids for done in Engine(target, batch_size=batch).generate(requests)]
    engine = Engine(
        target,
        None,
        Speculation(tiny.drafter("medusa"), parse_tree(tree)),
        limits=Limits(max_running=batch, prefix_tokens=256),
    )
    for _ in range(2):  # the second time with prefixes from the cache
        assert [one.token_ids for one in engine.generate(requests)] == plain
        engine.check_invariants()


@pytest.mark.parametrize("heads", [1, 3])
def test_auto_never_asks_for_more_than_the_heads_guess(heads: int) -> None:
    target = tiny.target()
    drafter = tiny.drafter("medusa", num_heads=heads)
    controller = make_controller(target, drafter, "auto", 4)
    requests = [Request(prompt, SamplingParams(max_tokens=40, ignore_eos=True)) for prompt in tiny.prompts(5, 9, 7, 3)]
    plain = [done.token_ids for done in Engine(target, batch_size=4).generate(requests)]
    engine = Engine(target, None, Speculation(drafter, None), batch_size=4, controller=controller)
    done = engine.generate(requests)
    assert [one.token_ids for one in done] == plain
    assert all(len(one.stats.offered_by_depth) <= heads for one in done)
    assert controller.snapshot().plain_rounds < controller.snapshot().rounds  # some drafted


def test_a_tree_deeper_than_the_heads_is_refused_and_the_default_is_not() -> None:
    drafter = tiny.drafter("medusa", num_heads=3)
    with pytest.raises(UsageError, match="the tree is 4 deep, the drafter guesses 3 tokens at most"):
        tree_for(drafter, parse_tree("chain:4"))
    assert tree_for(drafter, None) == parse_tree("dynamic:3,6,24")
    assert tree_for(tiny.drafter("medusa"), None) == parse_tree("dynamic:5,6,24")
