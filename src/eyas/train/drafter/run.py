"""A drafter's training run: the loop's objective and validation, and the folder with its checkpoints."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from eyas.data.features import FeatureSource
from eyas.drafters.checkpoint import save_network
from eyas.drafters.files import read_json
from eyas.drafters.network import DraftNetwork
from eyas.errors import CheckpointError
from eyas.files import copy_folder, writing_folder
from eyas.runtime import duration
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.provenance import Origin
from eyas.train.drafter.validation import HeldOutDecoding, scored
from eyas.train.loop.checkpoint import TrainingProgress
from eyas.train.loop.distributed import ProcessGroup, full_tensor
from eyas.train.loop.metrics import MicroBatchLoss
from eyas.train.loss.objective import DraftObjective

CHECKPOINT_DTYPE = torch.bfloat16
"""The dtype in which checkpoints are saved."""


class DrafterRun:
    """A drafter's objective with its validation data and its run folder, which the loop's `train` runs."""

    def __init__(
        self,
        objective: DraftObjective,
        held_out: FeatureSource,
        batches: int,
        origin: Origin,
        decoding: HeldOutDecoding | None,
        config: DrafterTrainConfig,
        processes: ProcessGroup,
    ) -> None:
        """`batches` is the number of held-out batches; without `decoding`, validations don't decode."""
        self._objective, self._held_out, self._origin, self._decoding = objective, held_out, origin, decoding
        self._count = min(config.validation.batches, batches)
        self._folder = RunFolder(config.output, config.keep_checkpoints)
        self._chosen_by = "decoded_accept_length" if config.validation.decode else "accept_length"
        self._processes = processes
        objective.core = processes.wrap(objective.core)

    @property
    def model(self) -> nn.Module:
        return self._objective.model

    def micro_batch_loss(self, number: int) -> MicroBatchLoss:
        return self._objective.micro_batch_loss(number)

    def validate(self, progress: TrainingProgress) -> dict[str, float]:
        """Score held-out batches, decode, save `checkpoints/step-N` and update `best`.

        All processes call it; rank 0 saves, and those that have a `decoding` decode.
        """
        network = self._objective.model
        network.eval()
        found = scored(self._objective.score, self._held_out, self._count, self._processes)
        network.train()
        served = served_copy(network)
        figures = {f"validation_{name}": value for name, value in found.items()}
        if self._decoding is not None:
            stats = self._decoding(served)
            figures["decoded_accept_length"] = found["decoded_accept_length"] = stats.accept_length
            by_context = stats.accept_length_by_context
            if len(by_context) > 1:
                figures |= {f"decoded_accept_length_{name}": length for name, length in by_context.items()}
        if self._processes.is_main:
            provenance = self._origin.at(progress, found, self._chosen_by)
            self._folder.add(progress.step, lambda path: save_network(served, path, provenance))
        return figures

    def finish(self) -> Path:
        """Copy the last checkpoint to `drafter/`, say what came out and what is next, both on rank 0."""
        if not self._processes.is_main:
            return self._folder.path / "drafter"
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        for line in self._folder.summary():
            console.print(line)
        return self._folder.finish()


def served_copy(network: DraftNetwork) -> DraftNetwork:
    """An unsharded copy of the network in `CHECKPOINT_DTYPE`. All processes must call it."""
    state = {name: full_tensor(tensor.detach()) for name, tensor in network.state_dict().items()}
    copy = type(network)(network.config)
    copy.load_state_dict(
        {name: t.to(CHECKPOINT_DTYPE, copy=True) if t.is_floating_point() else t.clone() for name, t in state.items()},
        assign=True,
    )
    return copy.eval().requires_grad_(False)


PREFIX = "step-"
PROMPTS = "prompts.jsonl"
"""The file of a run with prompts of held-out chats, on which its checkpoints can be measured."""


class RunFolder:
    """The drafter folders of a run: `checkpoints/step-N/`, `best/` and `drafter/`, each complete or absent.

    Which checkpoint is the best, and which ones may be deleted, is computed from the checkpoints alone, so nothing is
    lost by an interruption.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """`keep` is the number of newest checkpoints that are kept besides the best one; None = all."""
        self.path, self._keep = path, keep

    def checkpoints(self) -> dict[int, Path]:
        """Step -> folder of its checkpoint, in order."""
        found = {
            int(path.name.removeprefix(PREFIX)): path
            for path in (self.path / "checkpoints").glob(PREFIX + "*")
            if path.name.removeprefix(PREFIX).isdecimal()
        }
        return dict(sorted(found.items()))

    def add(self, step: int, write: Callable[[Path], None]) -> None:
        """Have `write` fill `checkpoints/step-N`, then copy the best checkpoint to `best/` and delete old ones.

        Checkpoints of this and later steps, which an interrupted run left, are deleted first.
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
        """The checkpoint with the highest score, the earliest if several have it. CheckpointError if there is none."""
        scored = {path: score(path) for path in self.checkpoints().values()}
        if not scored:
            raise CheckpointError(f"{self.path} holds no checkpoints")
        return max(scored, key=lambda path: scored[path])

    def summary(self) -> list[str]:
        """What a finished run came to, where it lies, and the command that goes on."""
        best, (step, last) = self.best(), list(self.checkpoints().items())[-1]
        provenance = read_json(last / "config.json").get("eyas", {})
        name = str(provenance.get("chosen_by", "score")).replace("_", " ")
        lines = [
            f"trained {step:,} steps in {duration(provenance.get('seconds', 0.0))}: {name} {score(last):.2f} after the "
            f"last, {score(best):.2f} after the best, {best.name} (1 = nothing is guessed)",
            f"{self.path / 'best'} is the best, {self.path / 'drafter'} the last, {self.path / 'checkpoints'} has more",
        ]
        prompts = self.path / PROMPTS
        measured = prompts if prompts.is_file() else "PROMPTS.jsonl"
        command = ["eyas", "bench", "checkpoints", str(self.path), "--prompt-file", str(measured), "--write"]
        return [*lines, f"next: {shlex.join(command)}"]

    def finish(self) -> Path:
        """Copy the last checkpoint to `drafter/` and return that folder."""
        folder = self.path / "drafter"
        copy_folder(list(self.checkpoints().values())[-1], folder)
        return folder


def score(checkpoint: Path) -> float:
    """The validation figure by which its provenance says a checkpoint is chosen; higher is better."""
    provenance = read_json(checkpoint / "config.json").get("eyas", {})
    return float(provenance["validation"][provenance["chosen_by"]])
