"""Blocks for training: anchors sampled in the answers, their attention, and their loss.

Row i of a batch is the pair (state at i, token i + 1), as in the training-time test; its block begins with token
i + 1, the anchor, and sees the states up to i. Guess j of the block predicts token i + 2 + j. A guess counts only if
all tokens from the anchor's successor up to its own are answer tokens, as in DSpark's trainer. Corrections read the
true tokens.

Attention: each block sees the target's states before its anchor, and its own slots. Neighboring blocks of a chat form
a part of up to `ROWS` queries. A part is one product with the context that its last block sees and with all of its own
slots, under a mask of that size. So there is no mask over all blocks, the context isn't copied for each of them, and
few masked products are computed. An accelerator computes many parts together. The context's gradients are added to one
buffer per layer, since adding up slices in autograd would cost a whole context each.

Loss: blocks depend on each other only through the context's keys and values. These are computed once; then each group
of blocks runs forward and backward through layers, head and loss before the next group begins. So the memory for states
and logits doesn't grow with the number of blocks, and nothing is computed twice. Gradients are added to one buffer for
each parameter and each layer's context; the backward pass only scales them, as in `draft_loss`.

Shapes: C chats, S positions, A taps, Ht target hidden, H draft hidden, M answer tokens; n blocks of B slots with K
guesses, g of them in a group, c in a part that sees the context up to position `stop`; D / Dv head size of keys /
values, heads = kv * G.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F

from eyas.data.features import FeatureBatch
from eyas.drafters.block.network import Block, BlockConfig, BlockNetwork, LayerView, Store
from eyas.runtime import to_device
from eyas.targets.attention import additive
from eyas.train.loss.config import LossConfig
from eyas.train.loss.draft_loss import Teacher, TokenLoss, TokenScores, at_once, head_parameters, teacher_of
from eyas.train.loss.ttt import ChainRows


class Blocks(NamedTuple):
    """The inputs of blocks, and the tokens that they are to guess."""

    anchors: Anchors
    masked: Tensor  # [n, B] the anchor, then mask tokens
    positions: Tensor  # [n, B]
    before: Tensor  # [n, K] the true token before each guess's own
    known: Tensor  # [n, 2] the token before the anchor, and the anchor
    alive: Tensor  # [n, K] bool: which guesses count
    loss_mask: Tensor  # [C, S] of the whole batch

    def part(self, chosen: slice) -> Blocks:
        """Only the `chosen` blocks, with all of their fields."""
        return self._replace(
            anchors=self.anchors.part(chosen),
            masked=self.masked[chosen],
            positions=self.positions[chosen],
            before=self.before[chosen],
            known=self.known[chosen],
            alive=self.alive[chosen],
        )

    def rows(self) -> ChainRows:
        """All answer tokens of the batch, and these blocks' guesses of them."""
        return _rows(self.anchors.rows, self.alive, self.loss_mask)


def sampled_anchors(loss_mask: Tensor, max_anchors: int | None, key: tuple[int, ...]) -> Anchors:
    """At most `max_anchors` per chat (None = all), drawn with the seed `key`; loss_mask [C, S] marks answer tokens.

    An anchor is an answer token that is followed by another one.
    """
    follows = F.pad(loss_mask[:, 1:] & F.pad(loss_mask[:, 2:], (0, 1)), (0, 1))  # [C, S], at the pair before the anchor
    draw = np.random.default_rng(np.random.SeedSequence(key))
    chats: list[int] = []
    positions: list[int] = []
    for chat, row in enumerate(follows.cpu().numpy()):
        found = np.flatnonzero(row)
        if max_anchors is not None and len(found) > max_anchors:
            found = np.sort(draw.choice(found, max_anchors, replace=False))
        chats += [chat] * len(found)
        positions += found.tolist()
    rows = torch.tensor(chats, dtype=torch.int64) * loss_mask.shape[1] + torch.tensor(positions, dtype=torch.int64)
    return Anchors(rows.to(loss_mask.device), chats, positions)


def blocks_at(
    config: BlockConfig, tokens: Tensor, loss_mask: Tensor, anchors: Anchors, steps: int, starts: Tensor | None = None
) -> Blocks:
    """The blocks of all anchors, with K = `steps` guesses each; tokens, loss_mask [C, S].

    `starts` [C]: the position of each chat's first token; None = 0.
    """
    width = tokens.shape[1]
    ahead = F.pad(tokens, (0, steps)).unfold(1, steps + 1, 1)  # [C, S, K + 1] the tokens from each position on
    following = ahead.flatten(0, 1)[anchors.rows]  # [n, K + 1]: the token before the anchor, the anchor, true guesses
    masked = F.pad(following[:, 1:2], (0, config.block_size - 1), value=config.mask_token_id)
    start = (_positions(tokens, starts).flatten()[anchors.rows] + 1).unsqueeze(1)
    alive = F.pad(loss_mask, (0, steps + 2)).unfold(1, steps, 1)[:, 2 : width + 2].flatten(0, 1)[anchors.rows]
    positions = start + torch.arange(config.block_size, device=tokens.device)
    alive = alive.long().cumprod(1).bool()
    return Blocks(anchors, masked, positions, following[:, 1:], following[:, :2], alive, loss_mask)


def read_context(network: BlockNetwork, taps: Tensor, store: Store, starts: Tensor | None = None) -> Tensor:
    """Compute every layer's keys and values for the taps [C, S, A, Ht] of chats that begin at `starts` [C]; None = 0.

    Returns the fused states [C, S, H] that they are computed from.
    """
    context = network.fuse(taps).to(taps.dtype)
    network.read(context, _positions(taps, starts), store)
    return context


def _positions(like: Tensor, starts: Tensor | None) -> Tensor:
    """[C, S] the positions of chats that begin at `starts` [C]; None = 0."""
    steps = torch.arange(like.shape[1], device=like.device)
    return steps.expand(like.shape[:2]) if starts is None else starts.unsqueeze(1) + steps


def run_blocks(network: BlockNetwork, hidden: Tensor, context: Tensor, blocks: Blocks, attend: BlockAttention) -> Block:
    """Run blocks with embeddings `hidden` [n, B, H] that follow the fused states `context` [n, H]."""
    states = network.states(hidden, blocks.positions, attend)
    return network.begin(Block(states, blocks.known, context, network.config.first))


def _rows(at: Tensor, alive: Tensor, loss_mask: Tensor) -> ChainRows:
    """The answer tokens and their guesses; `alive` [n, K] says which guesses count."""
    count, steps, total = *alive.shape, loss_mask.numel()
    index = torch.full((total + steps,), -1, dtype=torch.int64, device=at.device)
    index[at] = torch.arange(count, device=at.device)
    answers = F.pad(loss_mask[:, 1:], (0, 1)).flatten().nonzero().squeeze(1)
    rows = answers - 1 - torch.arange(steps, device=at.device).unsqueeze(1)  # [K, M]
    inside = rows >= answers // loss_mask.shape[1] * loss_mask.shape[1]
    found = index[rows.clamp(min=0)].where(inside, -1)
    steps_of = torch.arange(steps, device=at.device).unsqueeze(1).expand_as(found)
    counted = alive[found.clamp(min=0), steps_of] & (found >= 0) if count else found >= 0
    return ChainRows(at, [total, *[count] * (steps - 1)], answers, found.where(counted, -1))


ROWS = 64
"""Slots in a part on a CPU, 4 times as many elsewhere. With more, more of each product is masked; with fewer, products
are too small."""


class Anchors(NamedTuple):
    """Blocks of a batch, ordered by chat and position."""

    rows: Tensor  # [n] int64: the last pair before each block, as an index into C * S; the anchor is that pair's token
    chats: list[int]
    positions: list[int]
    """The position of each row within its chat: the last one that the block sees."""

    def part(self, blocks: slice) -> Anchors:
        """A slice of the blocks; rows still index the whole batch."""
        return Anchors(self.rows[blocks], self.chats[blocks], self.positions[blocks])


class BlockAttention:
    """The `attend` function of a pass over blocks, and the `store` function of the context before it."""

    def __init__(self, anchors: Anchors, views: Sequence[LayerView]) -> None:
        """`views`: what the slots see in each layer."""
        self._anchors = anchors
        self._views = views
        self._context: dict[int, tuple[tuple[Tensor, Tensor | None], ...]] = {}
        self._order: _Order | None = None
        self._parts: dict[LayerView, list[_Parts]] = {}

    def store(
        self, layer: int, keys: Tensor, values: Tensor, buffers: tuple[Tensor | None, Tensor | None] = (None, None)
    ) -> None:
        """Keep a layer's keys and values [C, kv, S, .] of the context.

        Their gradients are added to `buffers` of the same shapes; where one is None, autograd gets them.
        """
        self._context[layer] = tuple(zip((keys, values), buffers, strict=True))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, B, D], k [n, kv, B, D], v [n, kv, B, Dv] -> [n, heads, B, Dv]."""
        kind, (_, heads, slots, _), kv = q.device.type, q.shape, k.shape[1]
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
        if self._order is None:  # the same in all layers
            self._order = _Order.of(self._anchors, slots, q.device)
        view = self._views[layer]
        if view not in self._parts:
            self._parts[view] = list(self._seen(view, self._order, slots, heads // kv, dtype))
        cells = [
            torch.split_with_sizes(x.to(dtype).index_select(0, self._order.cells), self._order.sizes) for x in (q, k, v)
        ]
        mixed = [v.new_empty(0, slots, heads, v.shape[-1], dtype=dtype)]
        for parts, *mine in zip(self._parts[view], *cells, strict=True):
            queries, *own = (x.unflatten(0, (len(parts.chats), -1)).transpose(1, 2) for x in mine)  # [P, ., c, B, .]
            keys, values = (
                _joined(x.flatten(2, 3), context, buffer, parts)
                for x, (context, buffer) in zip(own, self._context[layer], strict=True)
            )
            folded = queries.reshape(len(parts.chats), kv, -1, q.shape[-1])  # [P, kv, G * c * B, D]
            out = F.scaled_dot_product_attention(folded, keys, values, parts.seen)
            out = out.reshape(*queries.shape[:4], -1)  # a copy on CUDA, where rows aren't adjacent
            mixed.append(out.permute(0, 2, 3, 1, 4).flatten(0, 1))  # [P * c, B, heads, Dv]
        return torch.cat(mixed).index_select(0, self._order.cell_of).transpose(1, 2)

    def _seen(self, view: LayerView, order: _Order, slots: int, groups: int, dtype: torch.dtype) -> Iterator[_Parts]:
        """The parts that are computed together, with their masks."""
        device = order.cells.device
        rows = self._anchors.rows.index_select(0, order.cells)
        width = next(iter(self._context.values()))[0][0].shape[2]
        slot = torch.arange(slots, device=device)
        near = torch.ones(slots, slots, dtype=torch.bool, device=device)
        near = near.tril() if view.causal else near
        if view.window is not None:
            near = near & view.window.near(slot.unsqueeze(1), slot, 0)
        in_parts = torch.split_with_sizes(rows, order.sizes)
        for stop, count, at in zip(order.stops, order.counts, in_parts, strict=True):
            cells = at.view(-1, count)  # [P, c]
            last = (cells % width)[:, :, None, None]
            column = torch.arange(stop, device=device)
            context = (column <= last).expand(-1, -1, slots, -1)  # [P, c, B, stop]
            if view.window is not None:
                context = context & view.window.near(last + 1 + slot.unsqueeze(1), column, last + 1)
            same = torch.eye(count, dtype=torch.bool, device=device)[:, None, :, None]
            own = (same & near[:, None]).flatten(2)  # [c, B, c * B]
            seen = torch.cat((context, own.expand(len(cells), -1, -1, -1)), dim=3).flatten(1, 2)
            yield _Parts(cells[:, 0] // width, stop, additive(seen.repeat(1, groups, 1).unsqueeze(1), dtype))


class _Parts(NamedTuple):
    """P parts that are computed together, each with c blocks of one chat; a part with fewer repeats its last block."""

    chats: Tensor  # [P]
    stop: int  # the context is read up to this column
    seen: Tensor  # [P, 1, G * c * B, stop + c * B] additive


class _Order(NamedTuple):
    """The order in which blocks are computed, and which of them together. A cell is a position in that order."""

    cells: Tensor  # the block in each cell
    cell_of: Tensor  # [n] the cell of each block
    sizes: list[int]  # P * c for each set of parts computed together
    counts: list[int]  # c
    stops: list[int]

    @classmethod
    def of(cls, anchors: Anchors, slots: int, device: torch.device) -> _Order:
        """On a CPU, parts are computed one after the other; elsewhere, many larger parts are computed together."""
        chats = anchors.chats
        start = 0
        parts = []
        most = max(1, (ROWS if device.type == "cpu" else 4 * ROWS) // slots)
        while start < len(chats):
            end = bisect_right(chats, chats[start], start, min(start + most, len(chats)))
            parts.append(range(start, end))
            start = end
        cells: list[int] = []
        cell_of: list[int] = []
        made = []
        for first in range(0, len(parts), at_once(1, device)):
            together = parts[first : first + at_once(1, device)]
            count = max(map(len, together))
            for part in together:
                cell_of += range(len(cells), len(cells) + len(part))
                cells += [*part, *[part[-1]] * (count - len(part))]
            stop = max(anchors.positions[part[-1]] for part in together) + 1
            made.append((len(together) * count, count, stop))
        both = to_device([*cells, *cell_of], device, torch.int64)  # one transfer instead of two
        sizes, counts, stops = ([each[i] for each in made] for i in range(3))
        return cls(both[: len(cells)], both[len(cells) :], sizes, counts, stops)


def _joined(own: Tensor, context: Tensor, buffer: Tensor | None, parts: _Parts) -> Tensor:
    made: Tensor = _Joined.apply(own, context, buffer, parts)  # type: ignore[no-untyped-call]
    return made


class _Joined(torch.autograd.Function):
    """Keys or values of the context [C, kv, S, .] that parts see, then their own [P, kv, c * B, .] -> [P, kv, ., .]."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: Tensor, buffer: Tensor | None, parts: _Parts) -> Tensor:
        ctx.shape = context.shape
        ctx.buffer = buffer
        ctx.parts = parts
        seen = context[:, :, : parts.stop].index_select(0, parts.chats).to(own.dtype)
        return torch.cat((seen, own), dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        stop, total = ctx.parts.stop, ctx.buffer
        if total is None and ctx.needs_input_grad[1]:
            total = grad.new_zeros(ctx.shape)
        if total is not None:
            total[:, :, :stop].index_add_(0, ctx.parts.chats, grad[:, :, :stop].to(total.dtype))
        return grad[:, :, stop:], total if ctx.buffer is None else None, None, None


SLOTS = 256
"""Slots in a group on a CPU, or half a layer's width if that is more, so that adding up the weights' gradients takes
little time compared with computing them."""


def block_loss(
    network: BlockNetwork,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    config: LossConfig,
    batch: FeatureBatch,
    taps: Tensor,
    anchors: Anchors,
    starts: Tensor | None = None,
) -> tuple[TokenScores, ChainRows]:
    """The summed loss of the blocks after `anchors`, and their guesses.

    `head` is the target's. `taps` [C, S, A, Ht], which the network reads, are those of `batch` with or without noise.
    `starts` [C] are the positions of the chats' first tokens; None = 0.
    """
    blocks = blocks_at(network.config, batch.tokens, batch.loss_mask, anchors, config.unroll, starts)
    context: list[Tensor] = []  # the keys and the values of each layer in turn
    fused = read_context(network, taps, lambda _, keys, values: context.extend((keys, values)), starts)
    group = _Group(network, teacher_of(batch, head, network.target_ids, vocab_size), vocab_size, config)
    hidden = torch.cat((network.embed(blocks.masked), fused.flatten(0, 1)[anchors.rows].unsqueeze(1)), dim=1)
    trained = {n: p for n, p in group.named_parameters() if p.requires_grad}
    tensors = (hidden, *context, *trained.values())
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        scores = TokenScores(*_Grouped.apply(group, blocks, list(trained), *tensors))  # type: ignore[no-untyped-call]
    else:
        scores = _total([group(blocks.part(part), hidden[part], context) for part in group.parts(blocks)])
    return scores, blocks.rows()


class _Group(nn.Module):
    """The loss of a group of blocks: a module, so that it can be called with other tensors as its parameters."""

    def __init__(self, network: BlockNetwork, teacher: Teacher, vocab_size: int, config: LossConfig) -> None:
        super().__init__()
        self.network = network
        self._teacher = teacher
        self._vocab_size = vocab_size
        self._config = config

    def parts(self, blocks: Blocks) -> list[slice]:
        """The groups of a batch's blocks: at least one, since every process needs gradients of all parameters."""
        config = self.network.config
        count = len(blocks.masked)
        most = max(1, at_once(max(SLOTS, config.hidden_size // 2), blocks.masked.device) // config.block_size)
        if self._config.kl_decay is not None:  # its loss depends on the mean over all guesses
            most = max(1, count)
        return [slice(start, start + most) for start in range(0, max(1, count), most)]

    def forward(
        self, blocks: Blocks, hidden: Tensor, context: list[Tensor], buffers: list[Tensor | None] | None = None
    ) -> TokenScores:
        """Scores over all answer tokens of the batch; `buffers` are for the context's gradients.

        hidden [g, B + 1, H] holds the embeddings of each block's slots, then the fused state before the block.
        """
        network = self.network
        config = self._config
        rows = blocks.rows()
        attention = BlockAttention(blocks.anchors, network.config.views)
        for layer, at in enumerate(range(0, len(context), 2)):
            keys, values = (None, None) if buffers is None else buffers[at : at + 2]
            attention.store(layer, context[at], context[at + 1], (keys, values))
        block = run_blocks(network, hidden[:, :-1], hidden[:, -1], blocks, attention)
        loss = partial(
            TokenLoss, self._teacher, target_ids=network.target_ids, vocab_size=self._vocab_size, config=config
        )
        joined = network.joined(block, blocks.before)
        states = block.guesses(blocks.before.shape[1])
        scores = loss(network.joined_logits, network.joined_parameters())(list(joined.unbind(1)), rows)
        if config.base_weight:
            base = loss(network.logits, head_parameters(network))(list(states.unbind(1)), rows)
            scores = scores._replace(loss=scores.loss + config.base_weight * base.loss)
        confidence = network.confidence(states, blocks.before)  # [g, K], None without such a head
        weight = 1.0 if config.confidence_weight is None else config.confidence_weight
        if confidence is None or not weight:
            return scores
        return scores._replace(loss=scores.loss + weight * _confidence_loss(confidence, scores, rows, config.decay))


class _Grouped(torch.autograd.Function):
    """Runs each group forward and backward; hidden [n, B + 1, H], the context, and the trained parameters by name."""

    @staticmethod
    def forward(
        ctx: Any, group: _Group, blocks: Blocks, names: list[str], hidden: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = len(tensors) - len(names)
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        context = leaves[:count]
        weights = dict(zip(names, leaves[count:], strict=True))
        buffers = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if x.requires_grad else None
            for x in context
        ]
        given, found = [], []
        for part in group.parts(blocks):
            with torch.enable_grad():
                own = hidden[part].detach().requires_grad_(hidden.requires_grad)
                scores: TokenScores = functional_call(group, weights, (blocks.part(part), own, context, buffers))
                scores.loss.backward()  # type: ignore[no-untyped-call]
            given.append(own.grad)
            found.append(scores._replace(loss=scores.loss.detach()))
        embedded = torch.cat([x for x in given if x is not None]) if hidden.requires_grad else None
        of_context = [None if x is None else x.to(like.dtype) for x, like in zip(buffers, context, strict=True)]
        # every process of DDP and FSDP needs gradients of all parameters, even if it has no anchor
        of_weights = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in weights.values())
        ctx.found = [embedded, *of_context, *of_weights]
        total = _total(found)
        ctx.mark_non_differentiable(total.right, total.overlap, total.by_token)
        return total.loss, total.right, total.overlap, total.by_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # released, so that they can become the parameters' gradients uncopied
        found = ctx.found
        ctx.found = []
        return None, None, None, *(None if x is None else x.mul_(grad) for x in found)


def _total(found: list[TokenScores]) -> TokenScores:
    """The combined scores of all groups; each guess is in exactly one."""
    loss, right, overlap, by_token = found[0]
    for more in found[1:]:
        loss = loss + more.loss
        right = right | more.right
        overlap = overlap + more.overlap
        by_token = by_token + more.by_token
    return TokenScores(loss, right, overlap, by_token)


def _confidence_loss(confidence: Tensor, scores: TokenScores, rows: ChainRows, decay: float) -> Tensor:
    """Binary cross entropy of the confidences [g, K] with the rates at which sampled guesses are accepted."""
    at = rows.guesses.T  # [M, K]
    said = F.pad(confidence, (0, 0, 0, 1)).gather(0, at.clamp(min=0))  # there may be no blocks at all
    said = said.to(torch.promote_types(said.dtype, torch.float32))
    found = F.binary_cross_entropy_with_logits(said, scores.overlap.clamp(0, 1), reduction="none")
    weights = decay ** torch.arange(at.shape[1], device=at.device) * (at >= 0)
    return (found * weights).sum()
