"""Every drafter kind behind the same interface: saved and loaded, drafted in trees and from scratch, told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.drafters.checkpoint import load_network, save_network
from eyas.drafters.loading import drafter_of, load_drafter
from eyas.drafters.network import DraftNetwork
from eyas.drafters.registry import kind_for, kind_name
from eyas.errors import CheckpointError, ConfigError
from eyas.targets import Target
from eyas.targets.linears import can_prepack, prepack_linears
from eyas.tree import parse_tree
from eyas.types import SamplingParams
from eyas.verify import Sampler

from .. import tiny
from .cacheless import from_scratch

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {}),
    "eagle1, two layers": ("eagle1", {"num_hidden_layers": 2, "qkv_bias": True, "bias": False}),
    "eagle1, draft vocabulary": ("eagle1", {"draft_vocab_size": 50}),
    "eagle3": ("eagle3", {}),
    "mla": ("mla", {}),
    "mla, plain queries": ("mla", {"q_lora_rank": None, "num_hidden_layers": 2, "fc_norm": True, "norm_output": True}),
    "mlp": ("mlp", {}),
    "mlp, all options": ("mlp", {"depth": 3, "gate": False, "dropout": 0.5, "norm": True, "taps": [3]}),
    "mtp": ("mtp", {}),
    "mtp, two layers": ("mtp", {"num_hidden_layers": 2, "zero_first": True, "draft_vocab_size": 50}),
    "mlp, no tokens": ("mlp", {"embedding": "none"}),
    "medusa": ("medusa", {}),
    "medusa, deep": ("medusa", {"num_hidden_layers": 3, "medusa_fc_bias": False, "default_tree": "chain:3"}),
}


def build(name: str, **more: Any) -> DraftNetwork:
    kind, settings = VARIANTS[name]
    return tiny.network(kind, **{**settings, **more})


def same(a: DraftNetwork, b: DraftNetwork) -> bool:
    left = a.state_dict()
    right = b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_saved_loads_back(tmp_path: Path, name: str) -> None:
    made = build(name)
    save_network(made, tmp_path, {"note": "here"})
    loaded = load_network(tmp_path)
    assert type(loaded) is type(made)
    assert loaded.config == made.config
    assert same(loaded, made)
    assert json.loads((tmp_path / "config.json").read_text())["eyas"] == {"note": "here"}


@pytest.mark.parametrize("kind", tiny.TRAINED)
def test_shared_parts_are_the_target_s_and_not_in_the_file(tmp_path: Path, kind: str) -> None:
    embeds = kind != "medusa"  # its heads read no tokens
    made = tiny.network(kind, embedding="shared" if embeds else "none", head="shared", draft_vocab_size=tiny.VOCAB)
    save_network(made, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert not {"embed_tokens.weight", "lm_head.weight", "lm_heads.0.weight"} & names
    with pytest.raises(CheckpointError, match="no target was given"):
        load_network(tmp_path)
    for target in (tiny.target(), tiny.target("gemma2")):  # one that soft-caps its logits and scales its embedding
        loaded = load_network(tmp_path, target)
        states = torch.randn(2, 5, tiny.HIDDEN)
        assert torch.equal(loaded.logits(states), target.head(states))
        weight = target.model.get_input_embeddings().weight
        assert not embeds or torch.equal(loaded.embed(torch.arange(7)), weight[:7])
        assert not any(parameter is weight for parameter in loaded.parameters())


@pytest.mark.parametrize("rows", [tiny.VOCAB, 20])
def test_gradients_pass_a_shared_head(rows: int) -> None:
    """Also when the target's linears are packed for the CPU's kernels, and when only some rows are drafted."""
    made = tiny.network("eagle1", head="shared", draft_vocab_size=rows)
    plain = tiny.build_model("gemma2")
    weight = plain.lm_head.weight.clone()
    target = Target(plain)
    if can_prepack(target.device, target.dtype):
        prepack_linears(plain)
    made.borrow(target)
    states = torch.randn(3, tiny.HIDDEN, requires_grad=True)
    logits = made.logits(states)
    logits[:, 2].sum().backward()
    mirror = states.detach().clone().requires_grad_(True)
    expected = torch.tanh(mirror @ weight[made.target_ids].T / 10) * 10
    expected[:, 2].sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.grad, mirror.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tree", ["chain:4", "dynamic:3,3,9"])
def test_a_cached_draft_is_every_path_recomputed(name: str, tree: str) -> None:
    network = build(name)
    drafter = drafter_of(network, (0,) * network.config.tap_count)
    draw = torch.Generator().manual_seed(3)
    counts = [5, 9, 1]
    tokens = torch.randint(tiny.VOCAB, (3, 10), generator=draw)
    taps = 2 * torch.randn(3, 9, network.config.tap_count, tiny.HIDDEN, generator=draw)
    drafter.pairs.resize(3)
    for start, stop in ((0, 4), (4, 9)):  # in two pieces, ragged
        part = [max(0, min(count, stop) - start) for count in counts]
        drafter.observe(range(3), tokens[:, start + 1 : stop + 1], taps[:, start:stop], part)
    sampler = Sampler(3, tiny.VOCAB, torch.device("cpu"))
    for slot in range(3):
        sampler.admit(slot, SamplingParams(), [3] * 8, ())
    for _ in range(2):  # the second draft must not see the first one's guesses
        drafted = drafter.draft(range(3), parse_tree(tree), sampler.coupling(range(3), False))
    ids = network.target_ids.tolist()
    for row, count in enumerate(counts):
        paths: list[list[int]] = []
        for node in range(drafted.size):
            parent = int(drafted.parents[row, node])
            paths.append([*(paths[parent] if parent >= 0 else []), int(drafted.tokens[row, node])])
            value = sum(
                float(from_scratch(network, tokens[row, : count + 1], taps[row, :count], paths[-1][:i])[ids.index(t)])
                for i, t in enumerate(paths[-1])
            )
            assert float(drafted.logprob[row, node]) == pytest.approx(value, rel=1e-3, abs=1e-3)


DAMAGE: dict[str, tuple[str, tuple[str, ...], dict[str, Tensor], str]] = {
    "eagle1 lacks its bias": ("eagle1", ("fc.bias",), {}, "missing: fc.bias"),
    "eagle1 with a norm": ("eagle1", (), {"layers.0.input_layernorm.weight": torch.ones(32)}, "extra: layers.0.in"),
    "eagle1 shape": ("eagle1", ("fc.weight",), {"fc.weight": torch.ones(32, 63)}, r"fc.weight is \[32, 63\]"),
    "mla lacks a latent": ("mla", ("layers.0.self_attn.kv_a_layernorm.weight",), {}, "missing: layers.0.self"),
    "mla shape": (
        "mla", ("layers.0.self_attn.kv_b_proj.weight",),
        {"layers.0.self_attn.kv_b_proj.weight": torch.ones(55, 16)}, r"kv_b_proj.weight is \[55, 16\]",
    ),
    "mlp lacks its gate": ("mlp", ("gate",), {}, "missing: gate"),
    "mlp extra layer": ("mlp", (), {"layers.2.weight": torch.ones(32, 32)}, "extra: layers.2.weight"),
    "mlp lacks its embedding": ("mlp", ("embed_tokens.weight",), {}, "missing: embed_tokens.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    kind, drop, add, reason = DAMAGE[name]
    save_network(tiny.network(kind), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k not in drop} | add, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        load_network(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("eagle1", {"swirl": 1}, "unknown key swirl"),
        ("eagle1", {"taps": [2]}, "reads the target's last state"),
        ("mla", {"kv_lora_rank": 0}, "kv_lora_rank"),
        ("mla", {"swirl": 1}, "unknown key swirl"),
        ("mlp", {"depth": 0}, "depth"),
        ("mlp", {"taps": [1, 2]}, "reads one boundary"),
        ("mlp", {"dropout": 1.0}, "dropout"),
        ("mlp", {"num_hidden_layers": 2}, "unknown key num_hidden_layers"),
    ],
)
def test_a_bad_config_is_named(tmp_path: Path, kind: str, changes: dict[str, Any], reason: str) -> None:
    save_network(tiny.network(kind), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=reason):
        load_network(tmp_path)


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    save_network(tiny.network("eagle3"), tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(good | {"speculators_model_type": "x"}))
    with pytest.raises(CheckpointError, match=r"x.*eyas loads "):
        load_network(tmp_path)


@pytest.mark.parametrize("kind", tiny.TRAINED)
def test_the_files_tell_the_kind(tmp_path: Path, kind: str) -> None:
    made = tiny.network(kind)
    save_network(made, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    names = set(load_file(tmp_path / "model.safetensors"))
    assert kind_name(raw, names) == kind == kind_for(made.config).name
    if kind != "mlp":
        anonymous = {k: v for k, v in raw.items() if k not in ("architectures", "draft_vocab_size")}
        assert kind_name(anonymous, names) == kind


def test_the_boundary_after_the_final_norm_is_the_default_of_features() -> None:
    for kind in ("eagle1", "mlp"):
        assert tiny.drafter(kind).taps == (tiny.target().final_boundary,)


def test_a_file_of_another_width_is_refused(tmp_path: Path) -> None:
    save_network(tiny.network("eagle1", hidden_size=48), tmp_path)
    with pytest.raises(Exception, match="reads states 48 wide, the target's are 32"):
        load_drafter(tmp_path, tiny.target())


def test_rope_keeps_its_precision_in_half_precision() -> None:
    network = tiny.network("eagle1", rope_theta=5e5)
    exact = network.rotary(torch.zeros(1), torch.tensor([[4001]]))
    rounded = network.to(torch.bfloat16).rotary(torch.zeros(1), torch.tensor([[4001]]))
    torch.testing.assert_close(rounded, exact)
