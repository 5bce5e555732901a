"""Block drafters against their published forward, restated; their trees; losslessness; their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.network import BlockConfig, BlockNetwork
from eyas.drafters.checkpoint import load_network, open_checkpoint, save_network
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.kinds import KINDS
from eyas.drafters.kinds.dspark import DSparkConfig, DSparkNetwork
from eyas.drafters.loading import drafter_of
from eyas.drafters.network import set_vocabulary
from eyas.engine import Engine, Speculation
from eyas.errors import CheckpointError, ConfigError
from eyas.interop.inspect.report import report_drafter
from eyas.tree import DraftTree, parse_tree
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import BIN_CENTERS, BINS, ValueTable
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
SELECTOR = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 9}
LATTICE = {
    "lilicorr_hidden_size": 16, "lilicorr_candidate_topk": 9, "lilicorr_factor_dim": 6, "lilicorr_logit_scale": 7.0,
}  # fmt: skip
MIXED = {"sliding_window": 4, "layer_types": ("sliding_attention", "full_attention")}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "jetspec": ("dflash", {"causal": True}),
    "vanilla": ("dspark", {"markov_rank": 6}),
    "gated": ("dspark", {"markov_rank": 6, "markov_head_type": "gated", "confidence_head_with_markov": False}),
    "rnn": ("dspark", {"markov_rank": 6, "markov_head_type": "rnn", "enable_confidence_head": False}),
    "dflash2": ("dflash2", SELECTOR),
    "window": ("dflash2", {**SELECTOR, "conv_kernel_size": 3, "sliding_window": 4}),
    "mixed": ("dflash", {**MIXED, "sliding_causal": True}),
    "both ways": ("dflash", MIXED),
    "anchored": ("dspark", {**MIXED, "sliding_causal": True, "sliding_anchored": True, "markov_rank": 6}),
    "domino": ("domino", {"gru_hidden_dim": 7, "emb_dim": 6, "pure_draft_prefix_len": 1}),
    "shifted": ("domino", {"gru_hidden_dim": 7, "emb_dim": 6, "sample_from_anchor": True}),
    "xpress": ("xpress", {"xpress_rank": 6, "xpress_mlp_hidden": 9}),
    "lilicorr": ("lilicorr", LATTICE),
    "convolved": ("lilicorr", {**LATTICE, "lilicorr_hidden_size": 32, "conv_kernel_size": 2, "conv_group_size": 8}),
}


def build(name: str, **changes: Any) -> BlockNetwork:
    """A random network of a variant."""
    torch.manual_seed(5)
    kind, own = VARIANTS[name]
    made = KINDS[kind].network(KINDS[kind].config(**{**SIZES, **own, **changes}))
    assert isinstance(made, BlockNetwork)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.25)
    set_vocabulary(made, torch.randperm(tiny.VOCAB)[: made.config.draft_vocab_size].sort().values)
    return made.eval()


Weights = dict[str, Tensor]


def normed(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weights[f"{name}.weight"]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def rotated_by(x: Tensor, positions: Tensor) -> Tensor:  # [n, heads, D]
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def convolved(weights: Weights, name: str, x: Tensor, source: Tensor, side: int) -> Tensor:
    """DFlash 2's convolution of slots x [B, H], a channel at a time; `source` is what the kernel is made of."""
    base = weights[f"{name}.base_kernel"][side]  # [taps, H]
    taps, size = base.shape
    dynamic = linear(weights, f"{name}.kernel_projection", source).view(len(x), 2, taps, -1)[:, side]
    group = size // dynamic.shape[-1]
    out = torch.zeros_like(x)
    for slot in range(len(x)):
        for tap in range(min(taps, slot + 1)):
            for channel in range(size):
                kernel = base[tap, channel] + dynamic[slot, tap, channel // group]
                out[slot, channel] += kernel * x[slot - tap, channel]
    return out


def seen_by_slots(config: BlockConfig, layer: int, count: int) -> Tensor:
    """[B, count + B] what the slots after `count` positions see: z-lab's mask, or the one speculators trains with."""
    seen = torch.zeros(config.block_size, count + config.block_size, dtype=torch.bool)
    window = config.sliding_window if (config.layer_types or [])[layer:][:1] == ("sliding_attention",) else None
    causal = config.causal or (config.sliding_causal and window is not None)
    for slot in range(config.block_size):
        query = count + slot
        for key in range(count + config.block_size):
            near = window is None or (query - key < window and (causal or key - query < window))
            if config.sliding_anchored and window is not None:
                near = key >= count - window  # all of the block, and as much before the anchor
            seen[slot, key] = near and (key <= query or not causal)
    return seen


def restated_states(network: BlockNetwork, taps: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
    """The states [B, H] of all slots, and the fused state [H] before the anchor; taps [n, A, Ht] of what is before."""
    weights = network.state_dict()
    config = network.config
    count = len(taps)
    size = config.block_size
    eps = config.rms_norm_eps
    context = normed(weights, "hidden_norm", linear(weights, "fc", taps.flatten(1)), eps)
    hidden = weights["embed_tokens.weight"][[anchor] + [config.mask_token_id] * (size - 1)]
    everywhere = torch.arange(count + size)
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}"
        seen = seen_by_slots(config, i, count)
        x = source = normed(weights, f"{at}.input_layernorm", hidden, eps)
        convolves = f"{at}.attention_conv.base_kernel" in weights
        if convolves:
            x = convolved(weights, f"{at}.attention_conv", x, source, 0)
        both = torch.cat((context, x))
        q, k, v = (
            linear(weights, f"{at}.self_attn.{part}_proj", inputs).unflatten(1, (-1, config.head_dim))
            for part, inputs in (("q", x), ("k", both), ("v", both))
        )
        q = rotated_by(normed(weights, f"{at}.self_attn.q_norm", q, eps), everywhere[count:])
        k = rotated_by(normed(weights, f"{at}.self_attn.k_norm", k, eps), everywhere)
        k, v = (each.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 1) for each in (k, v))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5).masked_fill(~seen, -torch.inf)
        mixed = linear(
            weights, f"{at}.self_attn.o_proj", torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        )
        hidden = hidden + (convolved(weights, f"{at}.attention_conv", mixed, source, 1) if convolves else mixed)
        x = source = normed(weights, f"{at}.post_attention_layernorm", hidden, eps)
        if convolves:
            x = convolved(weights, f"{at}.mlp_conv", x, source, 0)
        gate, up = (linear(weights, f"{at}.mlp.{part}_proj", x) for part in ("gate", "up"))
        mixed = linear(weights, f"{at}.mlp.down_proj", F.silu(gate) * up)
        hidden = hidden + (convolved(weights, f"{at}.mlp_conv", mixed, source, 1) if convolves else mixed)
    return normed(weights, "norm", hidden, eps), context[-1]


@torch.no_grad()
def restated(network: BlockNetwork, taps: Tensor, path: Sequence[int], before: int) -> Tensor:
    """The log-probabilities [Vd] of what follows `path`: the anchor, then guesses; `before` is the token before it."""
    weights = network.state_dict()
    config = network.config
    states, context = restated_states(network, taps, path[0])
    first = config.first
    slot = len(path) - 1
    base = linear(weights, "lm_head", states[first:])  # [D, Vd]
    kind = type(config).__name__.removesuffix("Config").lower()
    if kind == "dspark":
        return (base[slot] + markov(network, states[first:], path)).log_softmax(-1)
    if kind == "domino":
        bias = domino(network, states[first + slot], path) if slot >= config.pure_draft_prefix_len else 0  # type: ignore[attr-defined]
        return (base[slot] + bias).log_softmax(-1)
    if kind == "xpress":
        previous = path if first == 0 else [before, *path]
        return (base[slot] + refined(weights, states, previous)[first + slot]).log_softmax(-1)
    found = base[slot].log_softmax(-1)
    if kind == "dflash2":
        best, ids = base[slot].topk(config.selector_top_k)  # type: ignore[attr-defined]
        gate = weights["candidate_selector.predecessor_codebook"][path[-1]] * linear(
            weights, "candidate_selector.hidden_projection", states[first + slot]
        )
        scores = best + weights["candidate_selector.successor_codebook"][ids] @ gate
    elif kind == "lilicorr":
        ids, start, pairs = lattice(network, base, states[first:], context)
        earlier = {token: at for at, token in enumerate(network.target_ids[ids[slot - 1]].tolist())} if slot else {}
        if slot and path[-1] not in earlier:
            return found
        scores = pairs[slot - 1][earlier[path[-1]]] if slot else start
        ids = ids[slot]
    else:
        return found
    among = found.clone()  # the head shares out what the block gives all of its candidates
    among[ids] = found[ids].logsumexp(-1) + scores.log_softmax(-1)
    return among


def markov(network: BlockNetwork, states: Tensor, path: Sequence[int]) -> Tensor:
    weights = network.state_dict()
    config = network.config
    assert isinstance(config, DSparkConfig)
    memory = torch.zeros(config.markov_rank)
    for slot, token in enumerate(path):
        embedded = weights["markov_head.markov_w1.weight"][token]
        if config.markov_head_type == "gated":
            gate = linear(weights, "markov_head.gate_proj", torch.cat((states[slot], embedded)))
            embedded = gate.sigmoid() * embedded
        elif config.markov_head_type == "rnn":
            joint = linear(weights, "markov_head.joint_proj", torch.cat((memory, embedded, states[slot])))
            keep, new, out = joint.chunk(3)
            memory = keep.sigmoid() * memory + (1 - keep.sigmoid()) * new.tanh()
            embedded = out.tanh()
    return linear(weights, "markov_head.markov_w2", embedded)


def domino(network: BlockNetwork, state: Tensor, path: Sequence[int]) -> Tensor:
    """SpecForge's head: torch's own GRU over the embeddings of the path, then the bottleneck."""
    weights = network.state_dict()
    gru = network.prefix_gru
    assert isinstance(gru, torch.nn.GRU)
    read, _ = gru(weights["embed_tokens.weight"][list(path)].unsqueeze(0))
    return linear(weights, "embed_proj.2", F.silu(linear(weights, "embed_proj.0", torch.cat((state, read[0, -1])))))


def refined(weights: Weights, states: Tensor, previous: Sequence[int]) -> Tensor:
    """XPress's biases [slots, Vd] of the first slots of a block with states [B, H], after the tokens `previous`."""
    weights = {name.removeprefix("xpress_head."): tensor for name, tensor in weights.items()}
    mean = states.mean(0)
    entering = []
    for state, token in zip(states, previous, strict=False):
        parts = (linear(weights, "down_h", state), linear(weights, "down_g", mean), weights["w1.weight"][token])
        entering.append(linear(weights, "in_proj", torch.cat(parts)))
    x = torch.stack(entering)
    count = len(x)
    mixed = x + torch.einsum("ckj,jc->kc", weights["mix.L"][:, :count, :count].tril(), x)
    gate, up = (linear(weights, f"mlp.{part}_proj", mixed) for part in ("gate", "up"))
    return linear(weights, "w2", mixed + linear(weights, "mlp.down_proj", F.silu(gate) * up))


def lattice(network: BlockNetwork, base: Tensor, states: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LiLiCorr's candidates [D, k], scores after the anchor [k], and scores of every step [D - 1, k, k]."""
    config: Any = network.config
    weights = {name.removeprefix("lilicorr."): tensor for name, tensor in network.state_dict().items()}
    logprobs, ids = base.log_softmax(-1).topk(config.lilicorr_candidate_topk)
    slots, count = ids.shape
    embedded = network.state_dict()["embed_tokens.weight"][network.target_ids[ids]]
    if "token_proj.weight" in weights:
        embedded = linear(weights, "token_proj", embedded)
    rank = torch.arange(count).float().expand(slots, -1)
    features = torch.stack(
        (logprobs, logprobs.exp(), logprobs - logprobs[:, :1], rank / (count - 1), 1.0 * (rank == 0)), -1
    )
    read = F.layer_norm(features, (5,), weights["feature_mlp.0.weight"], weights["feature_mlp.0.bias"])
    read = linear(weights, "feature_mlp.3", F.silu(linear(weights, "feature_mlp.1", read)))
    x = embedded + linear(weights, "pass_hidden_proj", states)[:, None] + read
    x = (x + weights["slot_embedding"][0, 0] + weights["rank_embedding"][0, 0]).flatten(0, 1)
    slot = torch.arange(slots).repeat_interleave(count)
    bias = weights["relative_slot_bias"][:, slot[:, None] - slot + config.block_size - 1]
    bias = bias + (slot[:, None] == slot) * weights["same_slot_bias"][:, None, None]
    for i in range(config.lilicorr_num_layers):
        at = f"layers.{i}"
        heads = config.lilicorr_num_heads
        attention = torch.nn.MultiheadAttention(x.shape[1], heads, batch_first=True).train()
        attention.load_state_dict({k.removeprefix(f"{at}.attn."): t for k, t in weights.items() if f"{at}.attn." in k})
        read = normed(weights, f"{at}.attn_norm", x, config.rms_norm_eps)[None]
        x = x + attention(read, read, read, attn_mask=bias, need_weights=False)[0][0]
        read = normed(weights, f"{at}.mlp_norm", x, config.rms_norm_eps)
        x = x + linear(weights, f"{at}.mlp.2", F.silu(linear(weights, f"{at}.mlp.0", read)))
    x = normed(weights, "output_norm", x, config.rms_norm_eps).view(slots, count, -1)
    anchor = normed(weights, "anchor_norm", linear(weights, "context_proj", context), config.rms_norm_eps)
    factors = F.silu(linear(weights, "factor_input_proj", torch.cat((x, anchor.expand_as(x), x * anchor), -1)))
    leaving, entering = (F.normalize(linear(weights, f"{name}_head", factors), dim=-1) for name in ("out", "in"))
    begins = F.normalize(linear(weights, "anchor_out_head", anchor), dim=-1)
    scale = config.lilicorr_logit_scale
    return ids, scale * entering[0] @ begins, scale * leaving[:-1] @ entering[1:].transpose(1, 2)


def filled(network: BlockNetwork, counts: list[int]) -> tuple[NetworkDrafter, Tensor, Tensor]:
    """A drafter whose slots have read so many pairs, in two pieces, the second one late; their tokens and taps."""
    drafter = drafter_of(network, TAPS)
    drafter.pairs.resize(len(counts))
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(tiny.VOCAB, (len(counts), max(counts)), generator=draw)
    taps = torch.randn(len(counts), max(counts), len(TAPS), tiny.HIDDEN, generator=draw)
    first = [(count + 1) // 2 for count in counts]
    rows = range(len(counts))
    drafter.observe(rows, tokens, taps, first)
    rest = [count - early for count, early in zip(counts, first, strict=True)]
    late_tokens = torch.zeros_like(tokens)
    late_taps = torch.zeros_like(taps)
    for row, early in enumerate(first):
        late_tokens[row, : counts[row] - early] = tokens[row, early : counts[row]]
        late_taps[row, : counts[row] - early] = taps[row, early : counts[row]]
    drafter.defer(rows, late_tokens, late_taps, rest)
    return drafter, tokens, taps


def draft(drafter: NetworkDrafter, tree: str, temperature: float = 0.0) -> DraftTree:
    rows = range(drafter.pairs.slots)
    sampler = Sampler(drafter.pairs.slots, tiny.VOCAB, CPU)
    for slot in rows:
        sampler.admit(slot, SamplingParams(temperature=temperature, seed=slot), [3] * 8, ())
    return drafter.draft(rows, parse_tree(tree), sampler.coupling(rows, True))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "vocabulary", "tree"), tiny.sample([*VARIANTS], [tiny.VOCAB, 40], ["chain:4", "dynamic:4,3,12"])
)
def test_every_node_s_value_is_that_of_the_published_forward(name: str, vocabulary: int, tree: str) -> None:
    network = build(name, draft_vocab_size=vocabulary)
    counts = [6, 1, 9]
    drafter, tokens, taps = filled(network, counts)
    grown = draft(drafter, tree)
    ids = network.target_ids.tolist()
    for row, count in enumerate(counts):
        paths: list[tuple[list[int], float]] = []
        for token, parent, valid in zip(
            grown.tokens[row].tolist(), grown.parents[row].tolist(), grown.valid[row].tolist(), strict=True
        ):
            above, total = paths[parent] if parent >= 0 else ([int(tokens[row, count - 1])], 0.0)
            if valid:
                before = int(tokens[row, count - 2]) if count > 1 else above[0]
                step = restated(network, taps[row, :count], above, before)[ids.index(token)]
                paths.append(([*above, token], total + float(step)))
            else:
                paths.append((above, total))
        values = torch.tensor([total for _, total in paths])
        kept = grown.valid[row]
        torch.testing.assert_close(grown.logprob[row][kept], values[kept], rtol=1e-4, atol=1e-5)
        assert kept.any()


@pytest.mark.parametrize("first", [0, 1])
def test_an_xpress_chain_is_what_jacobi_passes_settle_on(first: int) -> None:
    """As the authors' engine runs it: the whole block again and again, from the best guesses of the pass before."""
    network = build("xpress", sample_from_anchor=first == 0)
    drafter, tokens, taps = filled(network, [7])
    weights, (before, anchor) = network.state_dict(), tokens[0, 5:7].tolist()
    states, _ = restated_states(network, taps[0], anchor)
    base = linear(weights, "lm_head", states)
    block = base.argmax(-1).tolist()
    for _ in range(network.config.block_size):
        previous = [before, anchor, *block[1:-1]] if first else [anchor, *block[:-1]]
        block = (base + refined(weights, states, previous)).argmax(-1).tolist()
    depth = network.config.guesses
    assert draft(drafter, f"chain:{depth}").tokens[0].tolist() == network.target_ids[block[first:]].tolist()


def test_a_block_is_as_deep_as_it_has_guesses() -> None:
    for name, depth in (("dflash", 4), ("vanilla", 5)):
        drafter, _, _ = filled(build(name), [4])
        assert drafter.max_depth == depth
        assert int(draft(drafter, "dynamic:9,2,30").depth.max()) == depth


FAST = {
    "dflash": (0.7, "dynamic:4,3,9"), "vanilla": (1.0, "chain:4"), "rnn": (0.0, "shared:4,3,20"),
    "jetspec": (1.0, "dynamic:4,3,9"), "dflash2": (0.7, "chain:4"), "domino": (0.0, "dynamic:4,3,9"),
    "xpress": (1.0, "shared:4,3,20"), "lilicorr": (0.7, "dynamic:4,3,9"), "mixed": (0.0, "shared:4,3,20"),
    "anchored": (1.0, "dynamic:4,3,9"),
}  # fmt: skip
CASES = [
    pytest.param(name, temperature, tree, marks=() if FAST.get(name) == (temperature, tree) else pytest.mark.slow)
    for name in VARIANTS
    for temperature in (0.0, 0.7, 1.0)
    for tree in ("chain:4", "dynamic:4,3,9", "shared:4,3,20")
]


def requests_at(temperature: float) -> list[Request]:
    return [
        Request(prompt, SamplingParams(max_tokens=14, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(1, 4, 5, 40, 6, 3, 9, 2))
    ]


@cache
def plain_at(temperature: float) -> list[list[int]]:
    return [done.token_ids for done in Engine(tiny.quick_target(), batch_size=4).generate(requests_at(temperature))]


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "temperature", "tree"), CASES)
def test_output_is_that_of_plain_decoding(name: str, temperature: float, tree: str) -> None:
    target = tiny.quick_target()
    requests = requests_at(temperature)
    plain = plain_at(temperature)
    speculation = Speculation(drafter_of(build(name), TAPS), parse_tree(tree))
    for batch, times, count in ((1, 1, 2), (4, 2, 8), (8, 1, 8)):
        engine = Engine(target, None, speculation, limits=Limits(max_running=batch, prefix_tokens=256))
        for _ in range(times):  # the second time with prefixes from the cache
            assert [done.token_ids for done in engine.generate(requests[:count])] == plain[:count]
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
        made.config,
        architectures=["Qwen3DSparkModel"],
        target_layer_ids=[-1, 2],
        mask_token_id=1,
        num_anchors=512,
        markov_rank=6,
        markov_head_type="gated",
        enable_confidence_head=True,
        confidence_head_with_markov=False,
    )
    del config["dflash_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(tmp_path, layers=tiny.LAYERS)
    assert (opened.kind.name, opened.config.taps) == ("dspark", (0, 3))
    assert isinstance(opened.config, DSparkConfig)
    assert opened.config.sample_from_anchor
    assert all(torch.equal(tensor, opened.network().state_dict()[key]) for key, tensor in tensors.items())


QWEN38 = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "is_causal": False}
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # variant -> architecture, further keys at the top level, further keys in dflash_config
    "jetspec": ("DFlashDraftModel", {}, {"causal_head": True}),
    "window": ("DFlash2DraftModel", {**QWEN38, "block_size": None}, {
        "block_size": 5, "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 9,
    }),
    "domino": ("DominoDraftModel", {"emb_dim": 6}, {
        "projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 6, "gru_hidden_dim": 7, "shift_label": False,
    }),
    "shifted": ("DominoDraftModel", {}, {
        "projector_type": "domino", "pure_draft_prefix_len": 0, "emb_dim": 6, "gru_hidden_dim": 7, "shift_label": True,
    }),
    "xpress": ("XPressDraftModel", {
        "block_size": None, "xpress_block_size": 5, "xpress_rank": 6, "xpress_mlp_hidden": 9, "xpress_num_passes": 6,
    }, {}),
    "lilicorr": ("LiLiCorrDraftModel", {"block_size": None}, {
        "block_size": 5, "projector_type": "lilicorr", "lilicorr_enabled": True, **LATTICE, "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 4, "lilicorr_mlp_ratio": 2.0, "lilicorr_vector_eps": 1e-6,
    }),
}  # fmt: skip
PREFIX = {"jetspec": "layers.", "window": "candidate_selector.", "domino": "prefix_gru.", "shifted": "embed_proj.",
          "xpress": "xpress_head.", "lilicorr": "lilicorr."}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_others_as_published(name: str, tmp_path: Path) -> None:
    """Keys and tensors as their authors write them; a missing tensor, or one too many, is an error."""
    made, (architecture, top, nested) = build(name), PUBLISHED[name]
    tensors = {
        k: v for k, v in made.state_dict().items() if k not in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    }
    config = published(made.config, architectures=[architecture], **top)
    config["dflash_config"] |= nested
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path, layers=tiny.LAYERS)
    assert opened.kind.name == VARIANTS[name][0]
    assert opened.config == made.config.model_copy(update={"embedding": "shared", "head": "shared"})
    found = opened.network(tiny.target()).state_dict()
    assert all(torch.equal(tensor, found[key]) for key, tensor in tensors.items())
    lost = next(key for key in tensors if key.startswith(PREFIX[name]))
    for wrong in ({k: v for k, v in tensors.items() if k != lost}, tensors | {f"{lost}_more": tensors[lost].clone()}):
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=lost):
            open_checkpoint(tmp_path, layers=tiny.LAYERS).network(tiny.target())


@pytest.mark.parametrize(("name", "causal"), [("jetspec", False), ("domino", True)])
def test_a_file_says_what_the_slots_of_its_blocks_see(name: str, causal: bool, tmp_path: Path) -> None:
    save_network(build(name), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"] |= {"causal": causal, "causal_head": causal}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).config == build(name).config.model_copy(update={"causal": causal})


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "dflash2", "domino", "xpress"])
def test_a_new_correction_says_nothing(name: str) -> None:
    kind, own = VARIANTS[name]
    network = KINDS[kind].network(KINDS[kind].config(**{**SIZES, **own}))
    assert isinstance(network, BlockNetwork)
    logits = torch.randn(2, 4, tiny.VOCAB)
    latent = torch.randn(2, 4, 6)
    torch.testing.assert_close(network.corrected(logits, latent), logits)


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
    return ValueTable(np.broadcast_to(np.exp(BIN_CENTERS), (2, 2, BINS)).copy())


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
    engine = Engine(target, None, Speculation(drafter_of(build("vanilla"), TAPS), spec), batch_size=3)
    assert [done.token_ids for done in engine.generate(requests)] == plain
