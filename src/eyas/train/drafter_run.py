"""A drafter's training run as the loop sees it: micro-batches, and validations that leave checkpoints behind."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from eyas.data.features import FeatureSource
from eyas.drafters.checkpoint import save_network
from eyas.drafters.network import DraftNetwork
from eyas.train.checkpoint import Progress
from eyas.train.distributed import Team, whole
from eyas.train.drafter_recipe import DrafterTrainConfig
from eyas.train.metrics import Part
from eyas.train.objective import DraftObjective
from eyas.train.provenance import Origin
from eyas.train.run_folder import RunFolder
from eyas.train.validation import HeldOutDecoding, scored

SAVED = torch.bfloat16
"""What checkpoints are saved in."""


class DrafterRun:
    """The objective, what it is judged by, and where its checkpoints go."""

    def __init__(
        self,
        objective: DraftObjective,
        held_out: FeatureSource,
        batches: int,
        origin: Origin,
        decoding: HeldOutDecoding | None,
        config: DrafterTrainConfig,
        team: Team,
    ) -> None:
        """`batches` = how many held-out batches there are; without `decoding`, nothing is decoded."""
        self._objective, self._held_out, self._origin, self._decoding = objective, held_out, origin, decoding
        self._count = min(config.validation.batches, batches)
        self._folder = RunFolder(config.output, config.keep_checkpoints)
        self._chosen_by = "decoded_accept_length" if config.validation.decode else "accept_length"
        self._team = team
        objective.core = team.wrap(objective.core)

    @property
    def model(self) -> nn.Module:
        return self._objective.model

    def part(self, number: int) -> Part:
        return self._objective.part(number)

    def validate(self, progress: Progress) -> dict[str, float]:
        """Score, decode, save `checkpoints/step-N` and keep `best` up to date. All processes; rank 0 decodes."""
        network = self._objective.model
        network.eval()
        found = scored(self._objective.score, self._held_out, self._count, self._team)
        network.train()
        served = served_copy(network)
        figures = {f"validation_{name}": value for name, value in found.items()}
        if self._decoding is not None:
            stats = self._decoding(served)
            figures["decoded_accept_length"] = found["decoded_accept_length"] = stats.accept_length
        if self._team.leads:
            provenance = self._origin.at(progress, found, self._chosen_by)
            self._folder.add(progress.step, lambda path: save_network(served, path, provenance))
        return figures

    def finish(self) -> Path:
        """The last drafter's directory."""
        return self._folder.finish() if self._team.leads else self._folder.path / "drafter"


def served_copy(network: DraftNetwork) -> DraftNetwork:
    """A copy in the precision of checkpoints, whole on every process."""
    state = {name: whole(tensor.detach()) for name, tensor in network.state_dict().items()}
    copy = type(network)(network.config)
    copy.load_state_dict(
        {name: t.to(SAVED, copy=True) if t.is_floating_point() else t.clone() for name, t in state.items()},
        assign=True,
    )
    return copy.eval().requires_grad_(False)
