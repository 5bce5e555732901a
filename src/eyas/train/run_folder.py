"""A run's drafter directories: `checkpoints/step-N/`, `best/` and `drafter/`, each whole or absent.

`best` and what may be thrown away follow from the checkpoints themselves, so nothing has to be remembered across
interruptions.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from eyas.drafters.files import read_json
from eyas.drafters.folders import copy_folder, place_folder
from eyas.errors import CheckpointError

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
        place_folder(self.path / "checkpoints" / f"{PREFIX}{step:06d}", write)
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
