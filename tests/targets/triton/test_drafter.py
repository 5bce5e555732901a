"""Drafts in Triton: they are those of the modules, and a row's draft has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyas.drafters import kernels
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.kernels import use_kernels
from eyas.drafters.loading import drafter_of
from eyas.engine import Engine, Speculation
from eyas.targets import Target
from eyas.targets.triton.choice import ranked
from eyas.targets.triton.decoder import triton_decoder
from eyas.targets.triton.drafter import TritonDrafter
from eyas.targets.triton.linear import Weight, linear
from eyas.tree import DraftTree, parse_tree
from eyas.types import Request, SamplingParams
from eyas.verify import Sampler, Warp
from tests import recording, tiny

SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
WINDOW: dict[str, Any] = {"sliding_window": 3, "layer_types": ["sliding_attention"]}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {"num_hidden_layers": 2, "qkv_bias": True}),
    "eagle3": ("eagle3", {}),
    "eagle3 with all norms": (
        "eagle3",
        {"norm_output": True, "norm_before_residual": True, "fc_norm": True, "norm_before_fc": True, "qk_norm": True},
    ),
    "eagle3 in a window": ("eagle3", WINDOW),
    "eagle3 in an anchored window": ("eagle3", {**WINDOW, "sliding_anchored": True}),
    "mla": ("mla", {}),
    "mla without a query's latent": ("mla", {"q_lora_rank": None, "rope_interleave": False}),
    "mtp": ("mtp", {}),
    "peagle": ("peagle", {"num_hidden_layers": 1}),
    "dflash": ("dflash", {"num_hidden_layers": 2}),
    "jetspec": ("jetspec", {}),
    "dspark": ("dspark", {}),
}
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3}
ROWS = 3


def _drafter(name: str, dtype: torch.dtype = torch.float32, by_kernels: bool = True) -> NetworkDrafter:
    """A drafter of one of the networks, without a trial, whose weights are float16 numbers."""
    kind, settings = NETWORKS[name]
    network = tiny.network(kind, **{**SMALL, **settings}).half().to(dtype)
    if "shared" in (network.config.embedding, network.config.head):
        network.borrow(tiny.target())
    made = drafter_of(network, network.config.taps or network.config.default_taps(tiny.LAYERS))
    description = network.description()
    assert description is not None
    if by_kernels:
        made.proposer.kernels = TritonDrafter(description)
    return made


def _logits(drafter: NetworkDrafter, pairs: int) -> Tensor:
    """The logits of a small tree behind `pairs` pairs and one fewer."""
    return torch.cat([level.flatten(0, 1) for level in kernels._drafted(drafter.proposer, pairs)]).double()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", NETWORKS)
def test_logits_are_those_of_the_modules(name: str, dtype: torch.dtype) -> None:
    """Of what is read, and of each level of a tree."""
    expected = _logits(_drafter(name, torch.float32, by_kernels=False), 5)
    found = _logits(_drafter(name, dtype), 5)
    assert (found - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()


def _drafts(drafter: NetworkDrafter, rows: Sequence[int], tree: str, lengths: Sequence[int]) -> DraftTree:
    """Drafts of some of three rows, each in the slot of its place among them; pairs are read in two passes."""
    network, spec = drafter.network, parse_tree(tree)
    drafter.pairs.resize(len(rows))
    sampler = Sampler(len(rows), tiny.VOCAB, drafter.pairs.device)
    slots = range(len(rows))
    draw = torch.Generator().manual_seed(3)
    shape = ROWS, max(lengths), network.config.tap_count, network.config.target_hidden_size
    taps = torch.randn(shape, generator=draw).to(network.dtype)[list(rows)]
    tokens = torch.randint(tiny.VOCAB, shape[:2], generator=draw)[list(rows)]
    for slot, row in enumerate(rows):
        sampler.admit(slot, SamplingParams(temperature=0.8 if row else 0.0, seed=row), [1] * (lengths[row] + 1), ())
    first = [min(2, lengths[row]) for row in rows]
    drafter.observe(slots, tokens, taps, first)
    drafter.observe(slots, tokens[:, 2:], taps[:, 2:], [lengths[row] - 2 for row in rows])
    return drafter.draft(slots, spec, sampler.coupling(slots, True))


@pytest.mark.parametrize(
    ("name", "tree"), [("eagle1", "dynamic:3,2,5"), ("eagle3", "chain:3"), ("eagle3", "dynamic:3,3,6")]
)
def test_drafts_of_a_row_have_the_same_bits_in_any_batch(name: str, tree: str) -> None:
    """Values too, whatever the other rows are, and whether the row is greedy or drawn."""
    drafter, lengths = _drafter(name), [7, 3, 5]
    together = _drafts(drafter, [0, 1, 2], tree, lengths)
    for row in range(ROWS):
        alone = _drafts(drafter, [row], tree, lengths)
        for part in ("tokens", "parents", "logprob"):
            assert getattr(alone, part)[0].equal(getattr(together, part)[row]), part


@pytest.mark.parametrize("name", ["mla", "mtp", "peagle", "dflash"])
def test_states_of_a_row_have_the_same_bits_in_any_batch(name: str) -> None:
    drafter, lengths = _drafter(name), [7, 3, 5]
    together = _drafts(drafter, [2, 0, 1], "chain:3", lengths)
    alone = _drafts(drafter, [0], "chain:3", lengths)
    assert alone.tokens[0].equal(together.tokens[1])
    assert alone.logprob[0].equal(together.logprob[1])


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_drafts_are_those_of_the_modules(name: str) -> None:
    lengths = [7, 3, 5]
    found = _drafts(_drafter(name), [0, 1, 2], "dynamic:3,2,5", lengths)
    expected = _drafts(_drafter(name, by_kernels=False), [0, 1, 2], "dynamic:3,2,5", lengths)
    assert found.tokens.equal(expected.tokens)
    assert found.parents.equal(expected.parents)
    torch.testing.assert_close(found.logprob, expected.logprob)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("noise", [False, True])
def test_guesses_are_ranked_as_by_their_logits(noise: bool, dtype: torch.dtype) -> None:
    """In a vocabulary that doesn't fill its tiles, more guesses than some tiles have outputs among them."""
    torch.manual_seed(0)
    head = nn.Linear(64, 75).requires_grad_(False).to(dtype)
    states = torch.randn(2, 3, 64).to(dtype)
    ids = torch.arange(75) * 3
    whole, drawn = torch.tensor([0.7, 1.3]), torch.tensor([1.0, 0.0])
    warp = Warp(whole, drawn, torch.tensor([5, 6]), torch.tensor([9, 80])) if noise else Warp(None, None, None, None)
    scores, guesses = ranked(states, Weight.of(head), 14, warp, 2, ids)
    logits = linear(states.flatten(0, 1), Weight.of(head)).view(2, 3, -1)
    best, at = warp.rank(logits, 2, ids).topk(14, dim=2)
    assert guesses.equal(ids[at])
    torch.testing.assert_close(scores, best)


def test_the_first_of_equal_guesses_is_better() -> None:
    head = nn.Linear(64, 75, bias=False).requires_grad_(False)
    head.weight[40] = head.weight[3]
    none = Warp(None, None, None, None)
    _, guesses = ranked(head.weight[3].view(1, 1, -1), Weight.of(head), 2, none, 0, torch.arange(75))
    assert guesses.flatten().tolist() == [3, 40]


def test_a_network_is_tried_before_it_is_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = _drafter("eagle3", by_kernels=False)
    use_kernels(drafter.proposer)
    assert drafter.proposer.kernels is not None
    drafter.proposer.kernels = None
    drafter.network.layers[0].mlp.act = nn.Tanh()
    use_kernels(drafter.proposer)
    assert drafter.proposer.kernels is None
    monkeypatch.setattr(TritonDrafter, "_run_mlp", lambda _self, _layer, x, *_: x)
    use_kernels(_drafter("eagle1", by_kernels=False).proposer)
    assert "layer 0 is" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(TritonDrafter, "logits", lambda _self, states: states @ states.new_zeros(states.shape[-1], 60))
    use_kernels(_drafter("eagle3", by_kernels=False).proposer)
    assert "the logits of level 0 differ after 3 pairs" in caplog.text


@pytest.mark.parametrize("kind", ["dflash2", "medusa", "mlp"])
def test_other_networks_run_their_modules(kind: str) -> None:
    network = tiny.network(kind)
    if "shared" in (network.config.embedding, network.config.head):
        network.borrow(tiny.target())
    assert drafter_of(network, (1,) * network.config.tap_count, kernels=True).proposer.kernels is None


@pytest.mark.parametrize(
    ("name", "tree", "temperature"),
    [
        ("eagle3", "dynamic:3,2,5", 0.0),
        ("dflash", "chain:2", 0.8),
        pytest.param("eagle1", "chain:3", 0.8, marks=pytest.mark.slow),
        pytest.param("eagle3", "dynamic:3,2,5", 0.8, marks=pytest.mark.slow),
        pytest.param("mtp", "chain:3", 0.0, marks=pytest.mark.slow),
        pytest.param("mla", "dynamic:3,2,5", 0.8, marks=pytest.mark.slow),
        pytest.param("peagle", "dynamic:3,2,5", 0.8, marks=pytest.mark.slow),
        pytest.param("dflash", "dynamic:3,2,5", 0.0, marks=pytest.mark.slow),
    ],
)
def test_speculation_has_the_bits_of_plain_decoding(name: str, tree: str, temperature: float) -> None:
    """With whole drafts recorded and replayed."""
    model = tiny.build_model("llama", num_hidden_layers=1, **SMALL)
    target = Target(model, decoder=triton_decoder(model), record=recording.record)
    drafter = _drafter(name)
    drafter.taps = (2,) if len(drafter.taps) == 1 else (0, 1, 2)
    drafter.pairs.record = recording.record
    drafter.pairs.resize(0)
    params = SamplingParams(max_tokens=7, temperature=temperature, seed=5)
    requests = [Request(tuple(prompt), params) for prompt in tiny.prompts(4, 2)]
    engine = Engine(target, None, Speculation(drafter, parse_tree(tree)), batch_size=2)
    plain, drafted = (each.generate(requests) for each in (Engine(target, batch_size=2), engine))
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    assert engine.speculation is not None
    drafts = engine.speculation.drafter.pairs.cache.drafts  # type: ignore[attr-defined]  # of a network
    assert drafts.failure is None
    assert len(drafts)
