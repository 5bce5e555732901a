"""Training of block drafters: attention against a masked softmax, rows against decoding, gradients of all parts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.data.features import FeatureBatch
from eyas.data.tokens.batches import ChatBatches, SegmentConfig
from eyas.data.tokens.tokenize import TokenRow
from eyas.drafters.block.decoding import BlockProposer
from eyas.drafters.block.network import BlockNetwork, LayerView
from eyas.drafters.kinds import KINDS
from eyas.drafters.loading import drafter_of
from eyas.drafters.network import set_vocabulary
from eyas.errors import ConfigError
from eyas.train.loss.block import Anchors, BlockAttention, Blocks, blocks_at, read_context, run_blocks, sampled_anchors
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftLoss, DraftObjective

from ... import tiny

HEADS = 4
KV = 2
SLOTS = 3
SIZE = 8
BLOCK = {
    "hidden_size": tiny.HIDDEN, "target_hidden_size": tiny.HIDDEN, "vocab_size": tiny.VOCAB,
    "draft_vocab_size": 60, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 2, "num_aux_hidden_states": 2, "block_size": 5, "mask_token_id": 1,
}  # fmt: skip
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}), "jetspec": ("dflash", {"causal": True}),
    "vanilla": ("dspark", {"markov_rank": 6}),
    "gated": ("dspark", {"markov_rank": 6, "markov_head_type": "gated"}),
    "rnn": ("dspark", {"markov_rank": 6, "markov_head_type": "rnn"}),
    "dflash2": ("dflash2", {"conv_group_size": 8, "selector_rank": 5, "selector_top_k": 7}),
    "window": ("dflash2", {"conv_group_size": 8, "selector_rank": 5, "selector_top_k": 7, "sliding_window": 4}),
    "domino": ("domino", {"gru_hidden_dim": 7, "emb_dim": 6, "pure_draft_prefix_len": 1}),
    "shifted": ("domino", {"gru_hidden_dim": 7, "emb_dim": 6, "sample_from_anchor": True}),
    "xpress": ("xpress", {"xpress_rank": 6, "xpress_mlp_hidden": 9}),
    "lilicorr": ("lilicorr", {
        "lilicorr_hidden_size": 16, "lilicorr_candidate_topk": 24, "lilicorr_factor_dim": 6, "conv_kernel_size": 2,
        "conv_group_size": 8,
    }),
}  # fmt: skip
VARIANTS = tuple(CHANGES)


def build(name: str) -> BlockNetwork:
    torch.manual_seed(2)
    kind, changes = CHANGES[name]
    made = KINDS[kind].network(KINDS[kind].config(**BLOCK, **changes))
    assert isinstance(made, BlockNetwork)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    set_vocabulary(made, torch.randperm(tiny.VOCAB)[:60].sort().values)
    return made


def batch(seed: int = 0) -> FeatureBatch:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, tiny.VOCAB, (2, 14), generator=draw)
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[0, 4:13] = True
    mask[1, 3:7] = mask[1, 9:12] = True
    taps = torch.randn(2, 14, 2, tiny.HIDDEN, generator=draw)
    return FeatureBatch(tokens, mask, taps, torch.randn(2, 14, tiny.HIDDEN, generator=draw))


@pytest.mark.parametrize(("rows", "together"), [(4, 1), (256, 1), (6, 2), (6, 64)])
def test_attention_is_a_masked_softmax(rows: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.train.loss.block.ROWS", rows)
    monkeypatch.setattr("eyas.train.loss.block.at_once", lambda size, _: size * together)  # as on an accelerator
    chats = [0, 0, 0, 2, 2]
    positions = [0, 3, 6, 1, 5]
    width = 7
    anchors = Anchors(torch.tensor(chats) * width + torch.tensor(positions), chats, positions)
    torch.manual_seed(0)
    shapes = [(5, HEADS, SLOTS, SIZE), (5, KV, SLOTS, SIZE), (5, KV, SLOTS, 6), (3, KV, width, SIZE), (3, KV, width, 6)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    q, k, v, keys, values = given
    attention = BlockAttention(anchors, [LayerView(causal=False, window=None)])
    attention.store(0, keys, values)
    ours = attention(0, q, k, v)
    mask = torch.zeros(5, 1, 1, width + SLOTS, dtype=torch.bool)
    for block, position in enumerate(positions):
        mask[block, ..., : position + 1] = mask[block, ..., width:] = True
    expected = F.scaled_dot_product_attention(
        q,
        torch.cat((keys[chats], k), 2).repeat_interleave(2, 1),
        torch.cat((values[chats], v), 2).repeat_interleave(2, 1),
        mask,
    )
    torch.testing.assert_close(ours, expected)
    down = torch.randn_like(expected)
    found = torch.autograd.grad(ours, given, down)
    for mine, theirs in zip(found, torch.autograd.grad(expected, given, down), strict=True):
        torch.testing.assert_close(mine, theirs)


def block_logits(network: BlockNetwork, blocks: Blocks, taps: Tensor, starts: Tensor | None = None) -> Tensor:
    """[n, K, Vd]"""
    attention = BlockAttention(blocks.anchors, network.config.views)
    context = read_context(network, taps, attention.store, starts).flatten(0, 1)[blocks.anchors.rows]
    block = run_blocks(network, network.embed(blocks.masked), context, blocks, attention)
    return network.joined_logits(network.joined(block, blocks.before))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_what_decoding_computes(name: str) -> None:
    network = build(name).eval().requires_grad_(False)
    given = batch()
    steps = network.config.guesses
    anchors = sampled_anchors(given.loss_mask, None, (0,))
    blocks = blocks_at(network.config, given.tokens, given.loss_mask, anchors, steps)
    logits = block_logits(network, blocks, given.taps)  # [n, K, Vd]
    for block, (chat, position) in enumerate(zip(anchors.chats, anchors.positions, strict=True)):
        drafter = drafter_of(network, (1, 2))
        drafter.pairs.resize(1)
        one = slice(chat, chat + 1)
        drafter.observe(range(1), given.tokens[one, 1:], given.taps[one], [position + 1])
        assert isinstance(drafter.proposer, BlockProposer)
        made = network.begin(drafter.proposer.run_block(drafter.pairs, range(1)))
        memory = None
        slots = network.logits(made.guesses(steps))
        for step in range(steps):
            at = position + 1 + step
            if at >= given.tokens.shape[1]:
                break
            tokens = given.tokens[one, at : at + 1]
            slot = slice(step, step + 1)
            following = slots[:, slot]
            latent, memory = network.follow(made, step, tokens, memory)
            if latent is not None:
                following = network.corrected(following, latent)
            torch.testing.assert_close(following[0, 0], logits[block, step], rtol=1e-4, atol=5e-5)


def test_a_guess_counts_where_all_tokens_up_to_it_are_the_answer_s() -> None:
    given = batch()
    anchors = sampled_anchors(given.loss_mask, None, (0,))
    steps = 4
    rows = blocks_at(build("dflash").config, given.tokens, given.loss_mask, anchors, steps).rows()
    mask = given.loss_mask.tolist()
    expected = set()
    for block, (chat, position) in enumerate(zip(anchors.chats, anchors.positions, strict=True)):
        assert mask[chat][position + 1]
        assert mask[chat][position + 2]
        for step in range(steps):
            span = mask[chat][position + 2 : position + 3 + step]
            if len(span) == step + 1 and all(span):
                expected.add((chat, position + 2 + step, step, block))
    found = set()
    for index, answer in enumerate(rows.answers.tolist()):
        for step in range(steps):
            block = int(rows.guesses[step, index])
            if block >= 0:
                found.add((answer // 14, answer % 14 + 1, step, block))
    assert found == expected


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "window"])
def test_blocks_of_segments_are_those_of_the_whole_chat(name: str) -> None:
    """Every anchor that has a guess within its segment, once; logits of the chat's, if the context is all of it."""
    network = build(name).eval().requires_grad_(False)
    steps = 4
    length = 30
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, tiny.VOCAB, (1, length), generator=draw)
    taps = torch.randn(1, length, 2, tiny.HIDDEN, generator=draw)
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[0, 5:27] = True

    def logits(cut: slice, counted: int) -> dict[int, tuple[list[int], Tensor, Tensor]]:
        """By anchor: its block's positions, its guesses' logits [K, Vd], and which of them count [K]."""
        loss_mask = mask[:, cut] & (torch.arange(length)[cut] >= counted)
        anchors = sampled_anchors(loss_mask, None, (0,))
        starts = torch.tensor([cut.start])
        blocks = blocks_at(network.config, tokens[:, cut], loss_mask, anchors, steps, starts)
        found = block_logits(network, blocks, taps[:, cut], starts)
        rows = zip(anchors.positions, blocks.positions.tolist(), found, blocks.alive, strict=True)
        return {cut.start + at + 1: (positions, each, alive) for at, positions, each, alive in rows}

    whole = logits(slice(0, length), 0)
    assert sorted(whole) == list(range(5, 26))
    row = TokenRow(tokens[0].numpy(), mask[0].numpy(), "chat")
    seen: list[int] = []
    for context in (length, 6):
        made = ChatBatches([row], 1, length, 0, SegmentConfig(length=8, context=context)).segments
        for part in made:
            for anchor, (positions, found, alive) in logits(slice(part.start, part.stop), part.counted).items():
                expected, ours, theirs = whole[anchor]
                assert part.counted <= anchor < part.stop - 1
                assert positions == expected
                assert torch.equal(alive, theirs & (anchor + 1 + torch.arange(steps) < part.stop))
                if context == length:
                    torch.testing.assert_close(found[alive], ours[alive], rtol=1e-4, atol=5e-5)
                    seen.append(anchor)
                elif part.start:
                    assert not torch.allclose(found[alive], ours[alive])
    assert sorted(seen) == [anchor for anchor in range(5, 26) if anchor % 8 != 7]


def test_anchors_are_drawn_by_their_key() -> None:
    mask = batch().loss_mask
    every = sampled_anchors(mask, None, (0,))
    some = sampled_anchors(mask, 3, (0, 1))
    assert some.positions == sampled_anchors(mask, 3, (0, 1)).positions
    assert len(some.chats) == 6
    assert set(zip(some.chats, some.positions, strict=True)) < set(zip(every.chats, every.positions, strict=True))
    assert any(sampled_anchors(mask, 3, (0, key)).positions != some.positions for key in range(2, 6))
    for (chat, at), (other, behind) in pairwise(zip(some.chats, some.positions, strict=True)):
        assert (chat, at) < (other, behind)


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "token"), tiny.sample(VARIANTS, ["ce", "l1", "lk"]))
def test_gradients_are_those_of_finite_differences(name: str, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = build(name).double()
    given = batch()
    for shared in (network.embed_tokens,):
        shared.requires_grad_(False)
    given = given._replace(taps=given.taps.double(), final=given.final.double() if given.final is not None else None)
    head = torch.randn(tiny.HIDDEN, tiny.VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.3
    loss = DraftLoss(network, lambda x: x @ head, tiny.VOCAB, LossConfig(token=token, unroll=4))  # type: ignore[arg-type]
    monkeypatch.setattr("eyas.train.loss.block.SLOTS", 20)  # several groups, one of which has both chats' blocks
    check_gradients(network, loss, given, "confidence_head.")  # its targets are constants, so only its own are exact
    loss._config = loss._config.model_copy(update={"confidence_weight": 0.0})
    check_gradients(network, loss, given, "")


def check_gradients(network: BlockNetwork, loss: DraftLoss, given: FeatureBatch, prefix: str) -> None:
    """Compare the gradients of parameters whose names begin with `prefix` with finite differences.

    Those of an attention or an MLP are moved together: each has its share in the slope.
    """
    step = 1e-7  # a longer one reorders the candidates of a lattice
    network.zero_grad()
    loss(given).loss.backward()
    draw = torch.Generator().manual_seed(4)
    moved: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
    for name_of, parameter in network.named_parameters():
        unused = name_of.startswith("confidence_head.") and not prefix
        if not parameter.requires_grad or not name_of.startswith(prefix) or unused:
            continue
        assert parameter.grad is not None, name_of
        way = torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
        together = name_of.rpartition(".")[0].rpartition(".")[0] if name_of.startswith("layers.") else name_of
        moved.setdefault(together, []).append((parameter, way))
    for together, ways in moved.items():
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                move(ways, sign * step)
                values.append(loss(given).loss.item())
                move(ways, -sign * step)
        slope = (values[0] - values[1]) / (2 * step)
        found = sum(float((parameter.grad * way).sum()) for parameter, way in ways if parameter.grad is not None)
        assert found == pytest.approx(slope, rel=2e-4, abs=2e-5), together


def move(ways: list[tuple[nn.Parameter, Tensor]], by: float) -> None:
    for parameter, way in ways:
        parameter.add_(way, alpha=by)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_groups_add_up_to_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, metrics and gradients with the embedding's are the same however many blocks run together."""
    made = []
    for slots in (10, 1000):
        monkeypatch.setattr("eyas.train.loss.block.SLOTS", slots)
        network = build(name).double()
        given = batch()
        assert given.final is not None
        given = given._replace(taps=given.taps.double(), final=given.final.double())
        head = torch.eye(tiny.HIDDEN, tiny.VOCAB, dtype=torch.float64)
        loss = DraftLoss(network, lambda x, head=head: x @ head, tiny.VOCAB, LossConfig(token="l1", unroll=4))
        found = loss(given)
        found.loss.backward()
        with torch.no_grad():
            assert loss(given).loss.item() == pytest.approx(found.loss.item(), rel=1e-12)
        made.append((found.metrics, {name: p.grad for name, p in network.named_parameters()}))
    (metrics, grads), (expected_metrics, expected) = made
    assert metrics.keys() == expected_metrics.keys()
    for key, pair in expected_metrics.items():
        assert metrics[key] == pytest.approx(pair, rel=1e-12)
    for parameter, grad in expected.items():
        torch.testing.assert_close(grads[parameter], grad, msg=parameter)
        assert grad is not None
        assert bool(grad.any()), parameter


@pytest.mark.parametrize("name", ["dflash", "vanilla"])
def test_a_batch_without_anchors_has_zero_gradients_of_all_parameters(name: str) -> None:
    network = build(name)
    given = batch()
    given = given._replace(loss_mask=torch.zeros_like(given.loss_mask))
    given.loss_mask[0, 5] = True  # an answer that no anchor is in
    head = torch.eye(tiny.HIDDEN, tiny.VOCAB)
    found = DraftLoss(network, lambda x: x @ head, tiny.VOCAB, LossConfig(unroll=4))(given)
    found.loss.backward()
    assert found.weight == 0
    assert all(p.grad is not None and not p.grad.any() for p in network.parameters())


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("eagle3", {"anchors": 4}, "this one has none"),
        ("dflash", {"confidence_weight": 0.5, "unroll": 4}, "trains a confidence head"),
        ("dspark", {"confidence_weight": 0.0, "unroll": 5}, "would never be trained"),
        ("dflash", {"base_weight": 0.5}, "this one doesn't"),
        ("eagle3", {"base_weight": 0.5}, "this one doesn't"),
    ],
)
def test_settings_of_other_drafters_are_refused(kind: str, settings: dict[str, Any], words: str) -> None:
    network = tiny.network(kind)
    settings = {**settings, "unroll": network.config.guesses or 7}
    with pytest.raises(ConfigError, match=words):
        DraftObjective(network, network.logits, tiny.VOCAB, lambda _: batch(), LossConfig(**settings), False)


def test_bfloat16_autocast_stays_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.train.loss.block.SLOTS", 20)
    network = build("vanilla")
    head = torch.eye(tiny.HIDDEN, tiny.VOCAB)
    found = []
    for enabled in (False, True):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made = DraftLoss(network, lambda x: x @ head, tiny.VOCAB, LossConfig(unroll=4))(batch())
        made.loss.backward()
        found.append(torch.cat([p.grad.flatten().float() for p in network.parameters() if p.grad is not None]))
    exact, rough = found
    assert 0 < float((exact - rough).norm() / exact.norm()) < 0.05


TASKS: dict[str, dict[str, Any]] = {
    "dflash": {}, "jetspec": {"token": "kl", "decay": 1.0}, "vanilla": {"token": "l1"}, "dflash2": {"base_weight": 1.0},
    "domino": {"base_weight": 0.5}, "xpress": {"base_weight": 0.6, "anchors": 6}, "lilicorr": {"base_weight": 1.0},
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("name", TASKS)
def test_every_kind_learns(name: str) -> None:
    """A target that counts upwards from a state that says where it is: blocks learn to go on counting."""
    network = build(name)
    tokens = torch.arange(40).remainder(17)[None] + 3
    set_vocabulary(network, torch.arange(60))
    eye = torch.eye(tiny.VOCAB)[:, : tiny.HIDDEN]
    states = eye[tokens - 3] * 4.0  # [1, 40, H]
    head = torch.zeros(tiny.HIDDEN, tiny.VOCAB)
    head[torch.arange(17), torch.arange(1, 18).remainder(17) + 3] = 5.0
    given = FeatureBatch(tokens, torch.arange(40)[None] > 2, torch.stack((states, states), dim=2), states)
    settings = {"unroll": network.config.guesses, **TASKS[name]}
    loss = DraftLoss(network, lambda x: x @ head, tiny.VOCAB, LossConfig(**settings))
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=3e-3)
    lengths = []
    for step in range(80):
        optimizer.zero_grad()
        found = loss(given, key=(step,))
        (found.loss / found.weight).backward()
        optimizer.step()
        total, count = found.metrics["accept_length"]
        lengths.append(total / count)
        if lengths[-1] > network.config.guesses - 0.6:  # the last anchors of the answer have fewer to guess
            break
    assert lengths[0] < 1.6
    assert lengths[-1] > network.config.guesses - 0.6
