"""P-EAGLE against its published forward, restated; its trees; losslessness; training rows; its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.decoding import ParallelProposer
from eyas.drafters.checkpoint import load_network, open_checkpoint, save_network
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.kinds.peagle import PEagleConfig, PEagleNetwork
from eyas.drafters.loading import drafter_of
from eyas.engine import Engine, Speculation
from eyas.engine.controller import make_controller
from eyas.errors import ConfigError
from eyas.train.loss.ttt import chain_rows, unrolled
from eyas.tree import parse_tree
from eyas.types import Limits, Request, SamplingParams
from eyas.verify import Sampler

from ... import tiny

CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"fc_norm": True, "norm_before_residual": True, "norm_before_fc": True},
    "qwen3": {"qk_norm": True, "num_hidden_layers": 3},
}


def build(name: str, **changes: Any) -> PEagleNetwork:
    made = tiny.network("peagle", 3, **{"taps": [1, 2, 4], "num_depths": 5, **VARIANTS[name], **changes})
    assert isinstance(made, PEagleNetwork)
    return made


def restated(network: PEagleNetwork, tokens: Tensor, taps: Tensor) -> Tensor:
    """Log-probabilities [D, Vd] of all slots after the true pairs of tokens [n] and taps [n, A, Ht], in one pass.

    A masked slot has the mask token's embedding and `mask_hidden` for taps; everything is causal.
    """
    weights = network.state_dict()
    config = network.config

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def rotated_by(x: Tensor) -> Tensor:  # [n, heads, D]
        half = config.head_dim // 2
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos = angles.cos()[:, None]
        sin = angles.sin()[:, None]
        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    more = config.num_depths - 1
    ids = torch.cat((tokens, torch.full((more,), config.mask_token_id)))
    wide = torch.cat((taps.flatten(1), weights["mask_hidden"][0].expand(more, -1)))
    if config.fc_norm:
        parts = wide.chunk(config.tap_count, dim=1)
        wide = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=1)
    if config.norm_before_fc:
        wide = norm(wide, "input_norm")
    hidden = wide @ weights["fc.weight"].T
    count = len(ids)
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}"
        if i:
            x = norm(hidden, f"{at}.input_layernorm")
        else:
            normed = norm(hidden, f"{at}.hidden_norm")
            x = torch.cat((norm(weights["embed_tokens.weight"][ids], f"{at}.input_layernorm"), normed), dim=1)
            hidden = normed if config.norm_before_residual else hidden
        q, k, v = (
            (x @ weights[f"{at}.self_attn.{part}_proj.weight"].T).unflatten(1, (-1, config.head_dim)) for part in "qkv"
        )
        if config.qk_norm:
            q = norm(q, f"{at}.self_attn.q_norm")
            k = norm(k, f"{at}.self_attn.k_norm")
        q = rotated_by(q)
        k = rotated_by(k)
        k, v = (each.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        hidden = hidden + mixed @ weights[f"{at}.self_attn.o_proj.weight"].T
        x = norm(hidden, f"{at}.post_attention_layernorm")
        gate, up = (x @ weights[f"{at}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ weights[f"{at}.mlp.down_proj.weight"].T
    return (norm(hidden, "norm")[-config.num_depths :] @ weights["lm_head.weight"].T).log_softmax(-1)


def filled(network: PEagleNetwork, counts: list[int], native: bool) -> tuple[NetworkDrafter, Tensor, Tensor]:
    """A drafter whose slots have read so many pairs, about half of them deferred; their tokens and taps."""
    drafter = drafter_of(network, (1, 2, 4))
    if not native:
        drafter.proposer.decoder = None
    drafter.pairs.resize(len(counts))
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(tiny.VOCAB, (len(counts), max(counts)), generator=draw)
    taps = torch.randn(len(counts), max(counts), 3, tiny.HIDDEN, generator=draw)
    first = [(count + 1) // 2 for count in counts]
    rows = range(len(counts))
    drafter.observe(rows, tokens, taps, first)
    rest = [count - early for count, early in zip(counts, first, strict=True)]
    late_tokens = torch.zeros_like(tokens)
    late_taps = torch.zeros_like(taps)
    for row, early in enumerate(first):
        late_tokens[row, : rest[row]] = tokens[row, early : counts[row]]
        late_taps[row, : rest[row]] = taps[row, early : counts[row]]
    drafter.defer(rows, late_tokens, late_taps, rest)
    return drafter, tokens, taps


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("name", "tree"), tiny.sample([*VARIANTS], ["chain:5", "dynamic:5,3,14", "chain:1"]))
def test_every_node_s_value_is_that_of_the_published_forward(name: str, tree: str, native: bool) -> None:
    network = build(name)
    counts = [6, 1, 9]
    drafter, tokens, taps = filled(network, counts, native)
    sampler = Sampler(3, tiny.VOCAB, CPU)
    for slot in range(3):
        sampler.admit(slot, SamplingParams(), [3] * 8, ())
    ids = network.target_ids.tolist()
    for _ in range(2):  # the second draft is the same: the first left nothing behind
        grown = drafter.draft(range(3), parse_tree(tree), sampler.coupling(range(3), True))
        for row, count in enumerate(counts):
            slots = restated(network, tokens[row, :count], taps[row, :count])
            values = [0.0]
            for token, parent, depth in zip(
                grown.tokens[row].tolist(), grown.parents[row].tolist(), grown.depth[row, 1:].tolist(), strict=True
            ):
                values.append(values[parent + 1] + float(slots[depth - 1][ids.index(token)]))
            assert grown.valid[row].all()
            torch.testing.assert_close(grown.logprob[row], torch.tensor(values[1:]), rtol=1e-5, atol=1e-5)


def test_a_draft_is_as_deep_as_it_has_slots() -> None:
    drafter, _, _ = filled(build("plain"), [4], True)
    sampler = Sampler(1, tiny.VOCAB, CPU)
    sampler.admit(0, SamplingParams(), [3] * 8, ())
    assert drafter.max_depth == 5
    grown = drafter.draft(range(1), parse_tree("dynamic:9,2,30"), sampler.coupling(range(1), True))
    assert int(grown.depth.max()) == 5


@pytest.mark.parametrize(
    ("name", "temperature", "tree"),
    [
        ("plain", 0.7, "dynamic:4,3,9"),
        ("norms", 0.0, "shared:4,3,20"),
        *(
            pytest.param(name, temperature, tree, marks=pytest.mark.slow)
            for name, temperature, tree in [
                ("plain", 0.0, "chain:5"), ("plain", 1.0, "dynamic:5,3,14"), ("norms", 0.7, "chain:4"),
                ("qwen3", 0.0, "dynamic:5,3,14"), ("qwen3", 1.0, "shared:4,3,20"), ("plain", 0.0, "shared:4,3,20"),
            ]
        ),
    ],
)  # fmt: skip
def test_output_is_that_of_plain_decoding(name: str, temperature: float, tree: str) -> None:
    target = tiny.quick_target()
    requests = [
        Request(prompt, SamplingParams(max_tokens=14, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(1, 5, 40, 6))
    ]
    plain = [done.token_ids for done in Engine(target, batch_size=4).generate(requests)]
    speculation = Speculation(drafter_of(build(name), (1, 2, 4)), parse_tree(tree))
    for limits in (Limits(max_running=1, prefix_tokens=256), Limits(max_running=4, prefix_tokens=256)):
        engine = Engine(target, None, speculation, limits=limits)
        for _ in range(2):  # the second time with prefixes from the cache
            assert [done.token_ids for done in engine.generate(requests)] == plain
            engine.check_invariants()


@pytest.mark.slow
def test_auto_drafts_no_deeper_than_there_are_slots() -> None:
    target = tiny.target()
    drafter = drafter_of(build("plain"), (1, 2, 4))
    controller = make_controller(target, drafter, "auto", 4)
    requests = [Request(prompt, SamplingParams(max_tokens=40, ignore_eos=True)) for prompt in tiny.prompts(5, 9, 7, 3)]
    plain = [done.token_ids for done in Engine(target, batch_size=4).generate(requests)]
    engine = Engine(target, None, Speculation(drafter, None), batch_size=4, controller=controller)
    done = engine.generate(requests)
    assert [one.token_ids for one in done] == plain
    assert all(len(one.stats.offered_by_depth) <= 5 for one in done)


def test_training_rows_are_what_decoding_computes() -> None:
    network = build("norms").requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, tiny.VOCAB, (2, 12), generator=draw)
    taps = torch.randn(2, 12, 3, tiny.HIDDEN, generator=draw)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, :3] = mask[1, 7:9] = False
    rows = chain_rows(mask, 5)
    steps = list(unrolled(network, tokens, taps, rows))
    compared = 0
    for step, (_, normed) in enumerate(steps):
        for answer, index in zip(rows.answers.tolist(), rows.guesses[step].tolist(), strict=True):
            if index < 0:
                continue
            chat, last = divmod(answer - 1 - step, 12)
            drafter = drafter_of(network, (1, 2, 4))
            drafter.pairs.resize(1)
            drafter.observe(range(1), tokens[chat : chat + 1, 1:], taps[chat : chat + 1], [last + 1])
            with torch.inference_mode():
                assert isinstance(drafter.proposer, ParallelProposer)
                decoded = drafter.proposer.masked_states(drafter.pairs, range(1), 5)[0, step]
            torch.testing.assert_close(normed[index], decoded, rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared > 40


def saved(path: Path, **changes: Any) -> PEagleNetwork:
    """A drafter written by eyas, whose config.json has changes; None takes a key out."""
    made = build("plain", head_dim=8)
    save_network(made, path)
    config = json.loads((path / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_the_mask_token_has_any_of_vllm_s_names(tmp_path: Path, key: str) -> None:
    changes = {"architectures": ["LlamaForCausalLMEagle3"], "num_depths": None, "mask_token_id": None, key: 7}
    made = saved(tmp_path, **changes)
    opened = open_checkpoint(tmp_path)
    assert opened.kind.name == "peagle"
    assert isinstance(opened.config, PEagleConfig)
    assert (opened.config.mask_token_id, opened.config.guesses) == (7, 8)
    assert opened.report.defaulted["num_depths"] == 8
    assert torch.equal(opened.network().state_dict()["mask_hidden"], made.mask_hidden)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask_token_id": None}, "mask_token_id"),
        ({"pard_token": 9}, "different mask tokens"),
        ({"mask_token_id": 10**6}, "not in the vocabulary"),
    ],
)
def test_a_mask_token_that_is_none_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    saved(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason):
        load_network(tmp_path)


@pytest.mark.parametrize("qwen3", [False, True])
def test_speculators_files(tmp_path: Path, qwen3: bool) -> None:
    made = build("qwen3" if qwen3 else "plain", head_dim=8)
    save_network(made, tmp_path)
    config = made.config
    layer = {
        "model_type": "qwen3" if qwen3 else "llama", "hidden_size": tiny.HIDDEN, "vocab_size": tiny.VOCAB,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_hidden_layers": config.num_hidden_layers, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    written = {
        "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "speculators_version": "0.4.0",
        "draft_vocab_size": 60, "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "mask_token_id": 1,
        "embed_requires_grad": True, "fc_norm": False, "norm_output": False, "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "peagle", "default_proposal_method": "greedy", "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 5}], "verifier": {"name_or_path": "x"}},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(written))
    opened = open_checkpoint(tmp_path)
    assert (opened.kind.name, opened.report.format, opened.report.doubts) == ("peagle", "speculators", [])
    loaded = opened.network()
    assert loaded.config == config
    same = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in same.items())
    del written["mask_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="mask_token_id"):
        open_checkpoint(tmp_path)
