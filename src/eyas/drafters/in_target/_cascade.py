"""Several MTP modules, each of which guesses one token further (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k reads a token beside the output of module k - 1 at the token before it; the first module reads the target's
state there. So true pairs go through all modules in turn, and a guess at depth d through those from d + 1 on.
Beyond the last module, that one is fed its own output.

Each module has its own layer of the slot cache. What the modules put out is kept there too, as if it were the keys and
values of one more layer: the next token needs it, also after a prefix was reused.

Shapes: R rows (a contiguous range of slots), Q pairs, K modules, W frontier nodes, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eyas.drafters.decoding import NetworkDrafter, Stage
from eyas.drafters.kinds.mtp import MtpModule
from eyas.drafters.network import DraftNetwork
from eyas.targets.attention import RaggedLayout
from eyas.targets.slots import KVShape, Staging


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
        """The K modules, the one that guesses the next token first."""
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
            stage = Stage(lengths, seen, layer=index, first=index)
            out, _ = module.step(tokens, hidden, positions, self.attend(rows, stage))
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

    def run_level(
        self, rows: range, tokens: Tensor, fed: Tensor, positions: Tensor, stage: Stage
    ) -> tuple[Tensor, Tensor]:
        modules, last = self.network.in_order, len(self.network.steps) - 1
        outputs = list(fed.chunk(len(modules), dim=-1))  # [R, W, H] each
        above = [outputs[0], *outputs[:-1]] if stage.level < last else outputs
        first = min(stage.level + 1, last)
        for index in range(first, len(modules)):
            attend = self.attend(rows, stage._replace(layer=index, first=index))
            outputs[index], _ = modules[index].step(tokens, above[index], positions, attend)
        return torch.cat(outputs, dim=-1), modules[first].logits(outputs[first])
