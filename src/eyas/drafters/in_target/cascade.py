"""Several MTP modules, each of which guesses one token further (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k reads a token beside the output of module k - 1 at the token before it; the first module reads the target's
state there. So true pairs go through all modules in turn, and a guess at depth d through those from d + 1 on.
Beyond the last module, that one is fed its own output.

Each module has its own layer of the slot cache. What the modules put out is kept there too, as if it were the keys and
values of one more layer: the next token needs it, also after a prefix was reused.

Shapes: R rows (a contiguous range of slots), Q pairs, K modules, W frontier nodes, F staged guesses so far, H hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eyas.drafters.decoding import Levels, NetworkDrafter
from eyas.drafters.kinds.mtp import MtpModule
from eyas.drafters.network import Attend, DraftNetwork
from eyas.targets.attention import RaggedLayout, columns_seen, grouped_attention
from eyas.targets.slots import KVShape, Staging
from eyas.tree import Frontier


class Cascade(DraftNetwork):
    """The modules of a checkpoint, in the order of their guesses."""

    def __init__(self, modules: Sequence[MtpModule]) -> None:
        """Take K >= 2 modules that are filled."""
        tree = f"chain:{max(3, len(modules))}"
        # embeddings and heads are the modules' own business
        super().__init__(
            modules[0].config.model_copy(update={"embedding": "none", "head": "shared", "default_tree": tree})
        )
        self.steps = nn.ModuleList(modules)

    @property
    def in_order(self) -> list[MtpModule]:
        """The K modules."""
        return [step for step in self.steps if isinstance(step, MtpModule)]

    @property
    def state_size(self) -> int:
        return self.config.hidden_size * len(self.steps)

    @property
    def kv_shapes(self) -> list[tuple[KVShape, KVShape]]:
        """A layer a module, then the outputs [H] of all but the last: halves of them as keys and as values."""
        half = KVShape(len(self.steps) - 1, self.config.hidden_size // 2)
        return [*(shapes for step in self.in_order for shapes in step.kv_shapes), (half, half)]

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., V] of the first module's states [..., H]."""
        return self.in_order[0].logits(normed)

    def logits_at(self, normed: Tensor, slot: int) -> Tensor:
        """Logits [..., V] of the states [..., H] that guess `slot` levels below the root's children."""
        return self.in_order[min(slot, len(self.steps) - 1)].logits(normed)


class CascadeDrafter(NetworkDrafter):
    """A drafter that runs several modules; the state that it keeps of a token is the K outputs, side by side."""

    network: Cascade

    def _run_pairs(
        self, rows: range, tokens: Tensor, hidden: Tensor, width: int, layout: RaggedLayout | None = None
    ) -> tuple[Tensor, Tensor]:
        if layout is not None:  # outputs move on by a token within each row
            tokens, hidden = layout.pad(tokens), layout.pad(hidden)
        lengths = self._lengths(rows)
        steps = torch.arange(width, device=tokens.device)
        positions = lengths.unsqueeze(1) + steps  # [R, Q]
        before = self._before(rows, lengths)
        self._cache.reserve(self._cache.start(rows) + width)
        causal = (steps.unsqueeze(1) >= steps).expand(len(rows), -1, -1)
        outputs: list[Tensor] = []
        for index, module in enumerate(self.network.in_order):
            # the first `index` pairs of a row have no output of the module before this one
            seen = causal & (positions >= index).unsqueeze(1) | torch.eye(width, dtype=torch.bool, device=tokens.device)
            out, _ = module.step(tokens, hidden, positions, self.attend(rows, index, seen))
            outputs.append(out)
            if index < len(before):
                hidden = torch.cat((before[index].unsqueeze(1), out[:, :-1]), dim=1)
        self._keep(rows, outputs)
        fed = torch.cat(outputs, dim=-1)
        if layout is not None:
            return layout.gather(fed).flatten(0, 1), layout.gather(outputs[0]).flatten(0, 1)
        return fed.flatten(0, 1), outputs[0].flatten(0, 1)

    def _keep(self, rows: range, outputs: Sequence[Tensor]) -> None:
        """Stage what the modules put out, [R, Q, H] each."""
        stacked = torch.stack(list(outputs[:-1]), dim=1)  # [R, K - 1, Q, H]
        first, second = stacked.chunk(2, dim=-1)
        self._cache.write(len(outputs), first, second, self._cache.staging(rows, first.shape[2]))

    def _before(self, rows: range, lengths: Tensor) -> list[Tensor]:
        """The K - 1 outputs [R, H] at each row's last committed pair; of an empty row rubbish that nothing sees."""
        count, size = len(self.network.steps) - 1, self.network.config.hidden_size // 2
        nothing = torch.zeros(len(rows), count, 0, size, dtype=self.network.dtype, device=lengths.device)
        views = self._cache.write(
            count + 1, nothing, nothing, Staging(rows, *(max(1, self._cache.start(rows)),) * 2, None)
        )
        last = (lengths - 1).clamp(min=0).view(-1, 1, 1, 1).expand(-1, count, 1, size)
        both = torch.cat([view.gather(2, last) for view in views], dim=-1)  # [R, K - 1, 1, H]
        return list(both[:, :, 0].unbind(1))

    def attend(self, rows: range, index: int, seen: Tensor, before: int = 0) -> Attend:
        """Attention of module `index`, which stages its keys and values behind `before` others.

        `seen` [R, S, F] says which staged columns each sees, besides the row's own pairs.
        """
        staging = self._cache.staging(rows, seen.shape[2] - before, before)
        columns = torch.arange(staging.end, device=seen.device)
        lengths = self._lengths(rows)
        # the first `index` pairs of a row have no output of the module before this one
        real = (columns >= index) | (columns >= lengths.unsqueeze(1))  # [R, K]
        mask = (columns_seen(lengths, seen, columns) & real.unsqueeze(1)).unsqueeze(1)

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.write(index, k, v, staging)
            return grouped_attention(q, keys, values, mask)

        return attend

    def _start(self, rows: range, depth: int) -> tuple[Levels, Tensor]:  # noqa: ARG002
        fed, normed = self._fed[rows.start : rows.stop], self._normed[rows.start : rows.stop]
        return _CascadeLevels(self, rows, fed.unsqueeze(1)), self.network.logits(normed.unsqueeze(1))

    def run_level(self, rows: range, level: int, tokens: Tensor, fed: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Run nodes `level` levels below the root's children: their outputs [R, W, K * H], and their logits [R, W, V].

        `fed` [R, W, K * H] are their parents' outputs; `seen` [R, W, F + W] the guesses each sees, itself included.
        """
        modules, last = self.network.in_order, len(self.network.steps) - 1
        before = seen.shape[2] - tokens.shape[1]
        self._cache.reserve(self._cache.start(rows) + seen.shape[2], before)
        lengths = self._lengths(rows)
        positions = (lengths + level).unsqueeze(1).expand(-1, tokens.shape[1])
        outputs = list(fed.chunk(len(modules), dim=-1))
        above = [outputs[0], *outputs[:-1]] if level < last else outputs
        first = min(level + 1, last)
        for index in range(first, len(modules)):
            attend = self.attend(rows, index, seen, before)
            outputs[index], _ = modules[index].step(tokens, above[index], positions, attend)
        return torch.cat(outputs, dim=-1), modules[first].logits(outputs[first])


class _CascadeLevels:
    """The levels of one draft, each through the modules that guess from there on."""

    def __init__(self, drafter: CascadeDrafter, rows: range, fed: Tensor) -> None:
        self._drafter, self._rows, self._fed = drafter, rows, fed  # [R, W, K * H]
        self._level = 0
        self._seen = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=fed.device)  # [R, W, F]

    def add(self, frontier: Frontier) -> Tensor:
        """Run the next level's nodes; returns the logits [R, W, V] of what follows them."""
        tokens, parents = frontier.tokens, frontier.parents.unsqueeze(2)
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        seen = self._seen.gather(1, parents.expand(-1, -1, self._seen.shape[2]))
        self._seen = torch.cat((seen, itself), dim=2)
        fed = self._fed.gather(1, parents.expand(-1, -1, self._fed.shape[2]))
        self._fed, logits = self._drafter.run_level(self._rows, self._level, tokens, fed, self._seen)
        self._level += 1
        return logits
