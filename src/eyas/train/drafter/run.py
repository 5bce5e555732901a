"""A drafter's training run as the loop sees it: micro-batches, and validations that leave checkpoints behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from eyas.data.features import FeatureSource
from eyas.drafters.checkpoint import save_network
from eyas.drafters.files import read_json
from eyas.drafters.network import DraftNetwork
from eyas.errors import CheckpointError
from eyas.files import copy_folder, writing_folder
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.provenance import Origin
from eyas.train.drafter.validation import HeldOutDecoding, scored
from eyas.train.loop.checkpoint import TrainingProgress
from eyas.train.loop.distributed import Team, whole
from eyas.train.loop.metrics import MicroBatchLoss
from eyas.train.loss.objective import DraftObjective

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

    def part(self, number: int) -> MicroBatchLoss:
        return self._objective.part(number)

    def validate(self, progress: TrainingProgress) -> dict[str, float]:
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


# A run's drafter directories: `checkpoints/step-N/`, `best/` and `drafter/`, each whole or absent.
#
# `best` and what may be thrown away follow from the checkpoints themselves, so nothing has to be remembered across
# interruptions.


PREFIX = "step-"


class RunFolder:
    """`keep` = how many of the newest checkpoints stay beside the best one; None = all."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path, self._keep = path, keep

    def checkpoints(self) -> dict[int, Path]:
        """step -> directory, in order of steps."""
        found = {
            int(path.name.removeprefix(PREFIX)): path
            for path in (self.path / "checkpoints").glob(PREFIX + "*")
            if path.name.removeprefix(PREFIX).isdecimal()
        }
        return dict(sorted(found.items()))

    def add(self, step: int, write: Callable[[Path], None]) -> None:
        """Make `checkpoints/step-N` with `write`, then choose the best and drop what isn't kept.

        Checkpoints of later steps belong to a run that was interrupted and is being gone over again: they go first.
        """
        for number, path in self.checkpoints().items():
            if number >= step:
                shutil.rmtree(path)
        with writing_folder(self.path / "checkpoints" / f"{PREFIX}{step:06d}") as folder:
            write(folder)
        best = self.best()
        copy_folder(best, self.path / "best")
        for path in list(self.checkpoints().values())[: -self._keep if self._keep else 0]:
            if path != best:
                shutil.rmtree(path)

    def best(self) -> Path:
        """The checkpoint with the highest score; of equal ones the earliest."""
        scored = {path: score(path) for path in self.checkpoints().values()}
        if not scored:
            raise CheckpointError(f"{self.path} holds no checkpoint to choose from")
        return max(scored, key=lambda path: scored[path])

    def finish(self) -> Path:
        """Copy the last checkpoint to `drafter/`."""
        place = self.path / "drafter"
        copy_folder(list(self.checkpoints().values())[-1], place)
        return place


def score(checkpoint: Path) -> float:
    """The figure a checkpoint is chosen by: the one its provenance names."""
    provenance = read_json(checkpoint / "config.json").get("eyas", {})
    return float(provenance["validation"][provenance["chosen_by"]])
