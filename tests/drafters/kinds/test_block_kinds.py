"""DFlash and DSpark against their published forward, restated; their trees; losslessness; their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.decoding import BlockConfig, BlockDrafter, BlockNetwork
from eyas.drafters.checkpoint import load_network, open_checkpoint, save_network
from eyas.drafters.kinds.dflash import DFlashConfig
from eyas.drafters.kinds.dspark import DSparkConfig, DSparkNetwork
from eyas.engine import Engine, Speculation
from eyas.errors import CheckpointError, ConfigError
from eyas.interop.inspect.report import report_drafter
from eyas.tree import DraftTree, parse_tree
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import BIN_CENTRES, BINS, ValueTable
from eyas.types import Limits, Request, SamplingParams
from eyas.verify import Sampler

from ... import tiny

CPU = torch.device("cpu")
TAPS = (2, 3)
SIZES: dict[str, Any] = {
    "hidden_size": tiny.HIDDEN, "target_hidden_size": tiny.HIDDEN, "vocab_size": tiny.VOCAB,
    "draft_vocab_size": tiny.VOCAB, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 2, "num_aux_hidden_states": len(TAPS), "block_size": 5, "mask_token_id": 1,
    "taps": TAPS,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "vanilla": {"markov_rank": 6},
    "gated": {"markov_rank": 6, "markov_head_type": "gated", "confidence_head_with_markov": False},
    "rnn": {"markov_rank": 6, "markov_head_type": "rnn", "enable_confidence_head": False},
}


def build(name: str, **changes: Any) -> BlockNetwork:
    """A random network of a variant."""
    torch.manual_seed(5)
    values = {**SIZES, **VARIANTS[name], **changes}
    made: BlockNetwork
    made = BlockNetwork(DFlashConfig(**values)) if name == "dflash" else DSparkNetwork(DSparkConfig(**values))
    for parameter in made.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.25)
    made.set_vocabulary(torch.randperm(tiny.VOCAB)[: made.config.draft_vocab_size].sort().values)
    return made.eval()


def restated(network: BlockNetwork, taps: Tensor, path: Sequence[int]) -> Tensor:
    """The logits [Vd] of what follows `path`: the anchor, then guesses; taps [n, A, Ht] of all positions before it."""
    weights, config = network.state_dict(), network.config

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def turned(x: Tensor, positions: Tensor) -> Tensor:  # [n, heads, D]
        half = config.head_dim // 2
        angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    count, size = len(taps), config.block_size
    context = norm(taps.flatten(1) @ weights["fc.weight"].T, "hidden_norm")
    hidden = weights["embed_tokens.weight"][[path[0]] + [config.mask_token_id] * (size - 1)]
    everywhere = torch.arange(count + size)
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}"
        x = norm(hidden, f"{at}.input_layernorm")
        both = torch.cat((context, x))
        q, k, v = (
            (inputs @ weights[f"{at}.self_attn.{part}_proj.weight"].T).unflatten(1, (-1, config.head_dim))
            for part, inputs in (("q", x), ("k", both), ("v", both))
        )
        q = turned(norm(q, f"{at}.self_attn.q_norm"), everywhere[count:])
        k = turned(norm(k, f"{at}.self_attn.k_norm"), everywhere)
        k, v = (each.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        hidden = hidden + mixed @ weights[f"{at}.self_attn.o_proj.weight"].T
        x = norm(hidden, f"{at}.post_attention_layernorm")
        gate, up = (x @ weights[f"{at}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ weights[f"{at}.mlp.down_proj.weight"].T
    states = norm(hidden, "norm")[0 if config.sample_from_anchor else 1 :]
    logits = states[len(path) - 1] @ weights["lm_head.weight"].T
    if not isinstance(config, DSparkConfig):
        return logits
    memory = torch.zeros(config.markov_rank)
    for slot, token in enumerate(path):
        embedded = weights["markov_head.markov_w1.weight"][token]
        if config.markov_head_type == "gated":
            inputs = torch.cat((states[slot], embedded))
            gate = weights["markov_head.gate_proj.weight"] @ inputs + weights["markov_head.gate_proj.bias"]
            embedded = gate.sigmoid() * embedded
        elif config.markov_head_type == "rnn":
            inputs = torch.cat((memory, embedded, states[slot]))
            joint = weights["markov_head.joint_proj.weight"] @ inputs + weights["markov_head.joint_proj.bias"]
            keep, new, out = joint.chunk(3)
            memory = keep.sigmoid() * memory + (1 - keep.sigmoid()) * new.tanh()
            embedded = out.tanh()
    return logits + weights["markov_head.markov_w2.weight"] @ embedded


def filled(network: BlockNetwork, counts: list[int]) -> tuple[BlockDrafter, Tensor, Tensor]:
    """A drafter whose slots have read so many pairs, in two pieces, the second one late; their tokens and taps."""
    drafter = BlockDrafter(network, TAPS)
    drafter.resize(len(counts))
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(tiny.VOCAB, (len(counts), max(counts)), generator=draw)
    taps = torch.randn(len(counts), max(counts), len(TAPS), tiny.HIDDEN, generator=draw)
    first = [(count + 1) // 2 for count in counts]
    rows = range(len(counts))
    drafter.observe(rows, tokens, taps, first)
    rest = [count - early for count, early in zip(counts, first, strict=True)]
    late_tokens, late_taps = torch.zeros_like(tokens), torch.zeros_like(taps)
    for row, early in enumerate(first):
        late_tokens[row, : counts[row] - early] = tokens[row, early : counts[row]]
        late_taps[row, : counts[row] - early] = taps[row, early : counts[row]]
    drafter.defer(rows, late_tokens, late_taps, rest)
    return drafter, tokens, taps


def draft(drafter: BlockDrafter, tree: str, temperature: float = 0.0) -> DraftTree:
    rows = range(drafter.slots)
    sampler = Sampler(drafter.slots, tiny.VOCAB, CPU)
    for slot in rows:
        sampler.admit(slot, SamplingParams(temperature=temperature, seed=slot), [3] * 8, ())
    return drafter.draft(rows, parse_tree(tree), sampler.coupling(rows, True))


@pytest.mark.parametrize(
    ("name", "vocabulary", "tree"), tiny.sample([*VARIANTS], [tiny.VOCAB, 40], ["chain:4", "dynamic:4,3,12"])
)
def test_every_node_s_value_is_that_of_the_published_forward(name: str, vocabulary: int, tree: str) -> None:
    network = build(name, draft_vocab_size=vocabulary)
    counts = [6, 1, 9]
    drafter, tokens, taps = filled(network, counts)
    grown, ids = draft(drafter, tree), network.target_ids.tolist()
    for row, count in enumerate(counts):
        paths: list[tuple[list[int], float]] = []
        for token, parent, valid in zip(
            grown.tokens[row].tolist(), grown.parents[row].tolist(), grown.valid[row].tolist(), strict=True
        ):
            above, total = paths[parent] if parent >= 0 else ([int(tokens[row, count - 1])], 0.0)
            if valid:
                step = restated(network, taps[row, :count], above).log_softmax(-1)[ids.index(token)]
                paths.append(([*above, token], total + float(step)))
            else:
                paths.append((above, total))
        values = torch.tensor([total for _, total in paths])
        kept = grown.valid[row]
        torch.testing.assert_close(grown.logprob[row][kept], values[kept], rtol=1e-4, atol=1e-5)
        assert kept.any()


def test_a_block_is_as_deep_as_it_has_guesses() -> None:
    for name, depth in (("dflash", 4), ("vanilla", 5)):
        drafter, _, _ = filled(build(name), [4])
        assert drafter.max_depth == depth
        assert int(draft(drafter, "dynamic:9,2,30").depth.max()) == depth


SLOW = (
    ("dflash", 0.0, "chain:4"), ("dflash", 1.0, "shared:4,3,20"), ("vanilla", 0.0, "dynamic:4,3,9"),
    ("vanilla", 0.7, "shared:4,3,20"), ("gated", 0.0, "shared:4,3,20"), ("rnn", 0.7, "dynamic:4,3,9"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "temperature", "tree"),
    [
        ("dflash", 0.7, "dynamic:4,3,9"), ("vanilla", 1.0, "chain:4"), ("rnn", 0.0, "shared:4,3,20"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)  # fmt: skip
def test_output_is_that_of_plain_decoding(name: str, temperature: float, tree: str) -> None:
    target = tiny.target()
    requests = [
        Request(prompt, SamplingParams(max_tokens=20, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(1, 4, 5, 40, 6))
    ]
    plain = [done.token_ids for done in Engine(target, batch_size=4).generate(requests)]
    speculation = Speculation(BlockDrafter(build(name), TAPS), parse_tree(tree))
    for batch in (1, 4):
        engine = Engine(target, None, speculation, limits=Limits(max_running=batch, prefix_tokens=256))
        for _ in range(2):  # the second time with prefixes from the cache
            assert [done.token_ids for done in engine.generate(requests)] == plain
            engine.check_invariants()


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_saved_loads_back(tmp_path: Path, name: str) -> None:
    made = build(name)
    save_network(made, tmp_path)
    loaded = load_network(tmp_path)
    assert type(loaded) is type(made)
    assert loaded.config == made.config
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in made.state_dict().items())


def published(config: BlockConfig, **changes: Any) -> dict[str, Any]:
    """A config.json as z-lab publishes it."""
    qwen3 = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "auto_map": {"AutoModel": "dflash.X"},
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "max_window_layers": 5,
        "layer_types": ["full_attention"] * 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 10000, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": False, "use_cache": True, "dtype": "float32", "transformers_version": "4.57.3",
    }  # fmt: skip
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    block = {"block_size": config.block_size, "num_target_layers": tiny.LAYERS, "num_hidden_layers": 2}
    nested = {"dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": [1, 2]}}
    return {**qwen3, **{key: getattr(config, key) for key in sizes}, **block, **nested, **changes}


def test_dflash_as_published(tmp_path: Path) -> None:
    """Without embedding and head, which are the target's; layer outputs are boundaries one higher."""
    made = build("dflash")
    tensors = {
        k: v for k, v in made.state_dict().items() if k not in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(published(made.config)))
    opened = open_checkpoint(tmp_path, layers=tiny.LAYERS)
    assert (opened.kind.name, opened.config.taps) == ("dflash", (2, 3))
    assert (opened.config.embedding, opened.config.head) == ("shared", "shared")
    assert "layer outputs" in opened.report.convention
    inspected = report_drafter(tmp_path)
    assert (inspected.taps, inspected.tap_source) == ([2, 3], "dflash_config.target_layer_ids")
    assert inspected.problems == []
    target = tiny.target()
    network = opened.network(target)
    assert torch.equal(network.embed(torch.tensor([5])), target.model.get_input_embeddings().weight[5:6])
    with pytest.raises(ConfigError, match="made for a target of 4 layers"):
        open_checkpoint(tmp_path, layers=7)


def test_dspark_as_published(tmp_path: Path) -> None:
    """DeepSpec keeps all settings at the top level, and embedding and head in the file."""
    made = build("gated")
    tensors = {key: tensor for key, tensor in made.state_dict().items() if key not in ("d2t", "t2d")}
    save_file(tensors, tmp_path / "model.safetensors")
    config = published(
        made.config, architectures=["Qwen3DSparkModel"], target_layer_ids=[-1, 2], mask_token_id=1, num_anchors=512,
        markov_rank=6, markov_head_type="gated", enable_confidence_head=True, confidence_head_with_markov=False,
    )  # fmt: skip
    del config["dflash_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(tmp_path, layers=tiny.LAYERS)
    assert (opened.kind.name, opened.config.taps) == ("dspark", (0, 3))
    assert isinstance(opened.config, DSparkConfig)
    assert opened.config.sample_from_anchor
    assert all(torch.equal(tensor, opened.network().state_dict()[key]) for key, tensor in tensors.items())


def test_a_block_without_its_mask_token_is_refused(tmp_path: Path) -> None:
    made = build("dflash")
    save_network(made, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dflash_config"]["mask_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ConfigError, CheckpointError), match="mask_token_id"):
        load_network(tmp_path)


def taken_at_its_word() -> ValueTable:
    """Values that are the probabilities themselves."""
    return ValueTable(np.broadcast_to(np.exp(BIN_CENTRES), (2, 2, BINS)).copy())


def test_a_confident_drafter_gets_deeper_trees() -> None:
    found = []
    for bias in (6.0, -3.0):
        network = build("gated")
        assert isinstance(network, DSparkNetwork)
        network.confidence_head.proj.weight.zero_()
        network.confidence_head.proj.bias.fill_(bias)
        network.lm_head.weight.mul_(20)  # the best guess is probable: what is left is confidence
        drafter, _, _ = filled(network, [6, 9])
        sampler = Sampler(2, tiny.VOCAB, CPU)
        for slot in range(2):
            sampler.admit(slot, SamplingParams(), [3] * 8, ())
        spec = PlannedTree(SharedTree(5, 4, 40, threshold=0.01), values=taken_at_its_word())
        weighed = drafter.draft(range(2), spec, sampler.coupling(range(2), True))
        fixed = draft(drafter, "dynamic:5,4,12")
        found.append((int(weighed.depth.max()), fixed))
        first = [int((tree.parents[0] == -1).nonzero()[0]) for tree in (weighed, fixed)]
        steps = [float(tree.logprob[0, at]) for tree, at in zip((weighed, fixed), first, strict=True)]
        assert steps[0] == pytest.approx(steps[1] + float(F.logsigmoid(torch.tensor(bias))), abs=1e-4)
    (sure, one), (unsure, other) = found
    assert sure > unsure
    assert torch.equal(one.tokens, other.tokens)  # a fixed shape goes by the probabilities alone
    assert torch.equal(one.logprob, other.logprob)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_confidence_leaves_the_output_as_it_is(temperature: float) -> None:
    target = tiny.target()
    requests = [
        Request(prompt, SamplingParams(max_tokens=16, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(4, 9, 6))
    ]
    plain = [done.token_ids for done in Engine(target, batch_size=3).generate(requests)]
    spec = PlannedTree(SharedTree(5, 3, 20), values=taken_at_its_word())
    engine = Engine(target, None, Speculation(BlockDrafter(build("vanilla"), TAPS), spec), batch_size=3)
    assert [done.token_ids for done in engine.generate(requests)] == plain
