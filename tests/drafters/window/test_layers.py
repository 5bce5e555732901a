"""Sliding windows by layer: drafts, training rows and output against the bare network with its masks written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.decoding import ParallelProposer
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.kinds.eagle3 import Eagle3Network
from eyas.drafters.loading import drafter_of
from eyas.engine import Engine, Speculation
from eyas.targets.linears import prepack_linears
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.train.loss.ttt import chain_rows, unrolled
from eyas.tree import Frontier, parse_tree
from eyas.types import Limits, Request, SamplingParams

from ... import tiny
from ..test_decoding import coupling, history, observe, paths_of

SLIDING, FULL = "sliding_attention", "full_attention"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"sliding_window": 5}),
    "anchored": ("eagle3", {"sliding_window": 5, "sliding_anchored": True}),
    "tiny": ("eagle3", {"sliding_window": 2, "norm_output": True}),
    "mixed": ("eagle3", {"sliding_window": 4, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}),
    "second": (
        "eagle3",
        {"sliding_window": 3, "num_hidden_layers": 2, "layer_types": [FULL, SLIDING], "sliding_anchored": True},
    ),
    "peagle": ("peagle", {"sliding_window": 6, "num_hidden_layers": 2, "num_depths": 5}),
    "peagle, tiny": (
        "peagle",
        {"sliding_window": 2, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "num_depths": 5},
    ),
}
TREES = ("dynamic:5,3,14", "static:eagle1")  # the first is one native call, the second one for each level


def build(name: str, **settings: Any) -> Eagle3Network:
    kind, own = VARIANTS[name]
    own = {"use_sliding_window": True, "layer_types": [SLIDING] * own.get("num_hidden_layers", 1), **own}
    made = tiny.network(kind, 3, **own, **({"taps": [1, 2, 4]} if kind == "peagle" else {}), **settings)
    assert isinstance(made, Eagle3Network)
    return made


def drafter(name: str, native: bool = False) -> NetworkDrafter:
    made = build(name, **({"head_dim": 16} if native else {}))
    if native:
        prepack_linears(made, NativeLinear)
    found = drafter_of(made, (1, 2, 4))
    assert (found.proposer.decoder is not None) == native
    return found


def sees(network: Eagle3Network, layer: int, known: int, query: int, key: int) -> bool:
    """What speculators' masks, and for windows that aren't anchored vLLM's decoding, let a position see.

    The first `known` positions are true pairs, those after them the guesses of one path.
    """
    config = network.config
    last = known - 1
    if key > query or config.layer_types is None or config.layer_types[layer] == FULL or key >= min(last, query):
        return key <= query
    guessed_from = last if config.sliding_anchored and query > last else query
    return key > guessed_from - (config.sliding_window or 0)


def states(network: Eagle3Network, tokens: Tensor, taps: Tensor, path: list[int]) -> list[Tensor]:
    """The states [H] that the head reads after the true pairs and after each token of `path`; P-EAGLE ignores it.

    tokens [n + 1], taps [n, A, Ht].
    """
    known = len(taps)
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in cache:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cache[layer], (k, v), strict=True))
        cache[layer] = (k, v)
        keys = range(k.shape[2])
        queries = range(k.shape[2])[-q.shape[2] :]
        mask = torch.tensor([[sees(network, layer, known, i, j) for j in keys] for i in queries])
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    masked = network.masked_pair()
    fed, normed = network.step(tokens[None, 1:], network.fuse(taps[None]), torch.arange(known)[None], attend)
    found = [normed[0, -1]]
    for step, token in enumerate(path):
        ids = torch.tensor([[token]])
        state = fed[:, -1:]
        if masked is not None:
            ids = torch.tensor([[masked.token]])
            state = masked.state
        fed, normed = network.step(ids, state, torch.tensor([[known + step]]), attend)
        found.append(normed[0, -1])
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("name", "tree"), tiny.sample([*VARIANTS], TREES))
def test_a_draft_is_that_of_the_masks_written_out(name: str, tree: str, native: bool) -> None:
    """Rows shorter than the window, as long, and longer; deeper trees than the smallest windows are wide."""
    if native and kernels() is None:
        pytest.skip("no compiler, or neither AVX2 nor AVX-512")
    made = drafter(name, native)
    rows = history(1, 3, 5, 17)
    made.pairs.resize(4)
    observe(made, range(4), [(ids[:2], taps[:1]) for ids, taps in rows])
    observe(made, range(1, 4), [(ids[1:], taps[1:]) for ids, taps in rows[1:]])
    bare = build(name, **({"head_dim": 16} if native else {}))
    ids = bare.target_ids.tolist()
    grown = made.draft(range(4), parse_tree(tree), coupling(4))
    tolerance = 1e-4 if native else 1e-5
    for row, (tokens, taps) in enumerate(rows):
        for node, path in enumerate(paths_of(grown, row)):
            after = torch.stack(states(bare, tokens, taps, path[:-1]))
            found = bare.logits(after).log_softmax(-1)
            expected = sum(float(found[depth, ids.index(token)]) for depth, token in enumerate(path))
            assert float(grown.logprob[row, node]) == pytest.approx(expected, rel=tolerance, abs=tolerance)
            if grown.parents[row, node] not in grown.parents[row, :node]:  # the first child
                assert path[-1] == ids[int(found[-1].argmax())]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_window_changes_the_draft(name: str) -> None:
    """So that the other tests can fail."""
    near = build(name)
    far = build(name)
    far.config = near.config.model_copy(update={"sliding_window": 64})
    (row,) = history(17)
    narrow, wide = (states(each, *row, [3, 4])[-1] for each in (near, far))
    assert not torch.allclose(narrow, wide, atol=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_training_rows_are_what_decoding_computes(name: str) -> None:
    """Every step of every row, against the masks written out and against a drafter that has read that row's pairs."""
    network = build(name)
    steps = 4
    width = 12
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, tiny.VOCAB, (2, width), generator=draw)
    taps = torch.randn(2, width, 3, tiny.HIDDEN, generator=draw)
    mask = torch.ones(2, width, dtype=torch.bool)
    mask[:, :2] = False
    rows = chain_rows(mask, steps)
    trained = [network.logits(normed) for _, normed in unrolled(network, tokens, taps, rows)]
    compared = 0
    for chat, last in ((0, 1), (0, 4), (1, 6)):
        path = tokens[chat, last + 2 : last + 1 + steps].tolist()
        expected = network.logits(torch.stack(states(network, tokens[chat, : last + 2], taps[chat, : last + 1], path)))
        decoded = decoded_logits(network, tokens[chat, 1 : last + 2], taps[chat, : last + 1], path)
        torch.testing.assert_close(decoded, expected, rtol=1e-5, atol=3e-5)
        for step in range(steps):
            answer = (rows.answers == chat * width + last + step + 1).nonzero()
            index = int(rows.guesses[step][answer])
            torch.testing.assert_close(trained[step][index], expected[step], rtol=1e-5, atol=3e-5)
            compared += 1
    assert compared == 3 * steps


def decoded_logits(network: Eagle3Network, tokens: Tensor, taps: Tensor, path: list[int]) -> Tensor:
    """[K, Vd] the drafter's logits after it has read the pairs, and below each token of `path`."""
    made = drafter_of(network, (1, 2, 4))
    made.pairs.resize(1)
    made.observe(range(1), tokens[None], taps[None], [len(taps)])
    with torch.inference_mode():
        if isinstance(made.proposer, ParallelProposer):
            return network.logits(made.proposer.masked_states(made.pairs, range(1), 1 + len(path))[0])
        levels = made.proposer.levels(made.pairs, range(1), 1 + len(path))
        root = torch.zeros(1, 1, dtype=torch.int64)
        found = [levels.first(), *(levels.add(Frontier(torch.tensor([[token]]), root)) for token in path)]
    return torch.cat(found, dim=1)[0]


def test_gradients_are_those_of_the_masks_written_out() -> None:
    """Of the true pairs' keys and values, of the chain's own, and of rows in later blocks."""
    for name in ("anchored", "mixed", "peagle"):
        network = build(name).double().requires_grad_(True)
        tokens = torch.randint(3, tiny.VOCAB, (1, 10), generator=torch.Generator().manual_seed(2))
        taps = torch.randn(1, 10, 3, tiny.HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        rows = chain_rows(torch.ones(1, 10, dtype=torch.bool), 3)
        *_, (_, normed) = unrolled(network, tokens, taps, rows)
        index = int(rows.guesses[2][(rows.answers == 8).nonzero()])
        expected = states(network, tokens[0, :7], taps[0, :6], tokens[0, 7:9].tolist())[-1]
        torch.testing.assert_close(normed[index], expected)
        parts = [p for label, p in network.named_parameters() if "lm_head" not in label]
        ours, theirs = (torch.autograd.grad(x.sin().sum(), parts) for x in (normed[index], expected))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("width", [40, 150])
def test_rows_of_every_block_see_their_window(width: int) -> None:
    """More rows than a block of the training kernel has."""
    network = build("eagle3")
    draw = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, tiny.VOCAB, (1, width), generator=draw)
    taps = torch.randn(1, width, 3, tiny.HIDDEN, generator=draw)
    first = next(unrolled(network, tokens, taps, chain_rows(torch.ones(1, width, dtype=torch.bool), 1)))[1]
    for row in (0, 3, 5, width // 2, width - 2):
        expected = states(network, tokens[0, : row + 2], taps[0, : row + 1], [])[0]
        torch.testing.assert_close(first[row], expected, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize(
    ("name", "temperature", "tree"),
    [
        ("anchored", 0.0, "dynamic:4,3,9"),
        ("peagle, tiny", 1.0, "chain:4"),
        *(
            pytest.param(name, temperature, tree, marks=pytest.mark.slow)
            for name in VARIANTS
            for temperature, tree in (
                (0.0, "chain:4"),
                (0.0, "dynamic:4,3,9"),
                (1.0, "chain:4"),
                (1.0, "static:eagle1"),
            )
        ),
    ],
)
def test_output_is_that_of_plain_decoding(name: str, temperature: float, tree: str) -> None:
    target = tiny.target()
    requests = [
        Request(prompt, SamplingParams(max_tokens=10, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(1, 5, 40, 6))
    ]
    plain = [done.token_ids for done in Engine(target, batch_size=4).generate(requests)]
    if VARIANTS[name][0] == "peagle" and tree.startswith("static"):
        tree = "shared:4,3,20"
    speculation = Speculation(drafter(name), parse_tree(tree))
    for limits in (Limits(max_running=1, prefix_tokens=256), Limits(max_running=4, prefix_tokens=256)):
        engine = Engine(target, None, speculation, limits=limits)
        for _ in range(2):  # the second time with prefixes from the cache
            assert [done.token_ids for done in engine.generate(requests)] == plain
            engine.check_invariants()
