"""Trains a drafter for a target from a store or chats: run folders with checkpoints, warm starts."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor, nn

from eyas.data.chats.folder import prompt_of, write_prompts
from eyas.data.features import FeatureSource
from eyas.data.store.manifest import rows_hash
from eyas.data.tokens.batches import ChatBatches, learnable
from eyas.drafters.checkpoint import load_network, save_network
from eyas.drafters.files import read_json
from eyas.drafters.loading import local_directory
from eyas.drafters.network import DraftNetwork
from eyas.errors import CheckpointError, ConfigError, DrafterMismatchError
from eyas.files import copy_folder, write_text, writing_folder
from eyas.hub import find_drafter, find_target
from eyas.runtime import duration, versions
from eyas.targets import load_tokenizer
from eyas.targets.loading import described, resolve_device
from eyas.train.drafter.config import ELSEWHERE, DrafterTrainConfig
from eyas.train.drafter.data import DraftVocabulary, open_data
from eyas.train.drafter.settings import Outlook, SizedConfig, announce, cut_length, resolved_dtype, sized
from eyas.train.drafter.shape import check_parts, drafter_config, fresh_network, with_taps
from eyas.train.drafter.target import RunTarget, load_run_target
from eyas.train.drafter.validation import HeldOutDecoding, scored
from eyas.train.loop.checkpoint import TrainingProgress
from eyas.train.loop.distributed import ProcessGroup, full_tensor, join_processes
from eyas.train.loop.log import Advance, MicroBatchLoss
from eyas.train.loop.loop import check_loop, resolved, train
from eyas.train.loss.objective import DraftObjective
from eyas.tree import parse_tree


@dataclass(frozen=True)
class Origin:
    """The provenance that all checkpoints of a run share."""

    identity: dict[str, Any]
    """Inputs other than the recipe that determine the weights; a run resumes only if they are unchanged."""
    facts: dict[str, Any]
    """The entries of the provenance that all checkpoints share."""

    @classmethod
    def of(
        cls,
        config: DrafterTrainConfig,
        fingerprint: str,
        taps: tuple[int, ...],
        batches: ChatBatches,
        vocabulary: DraftVocabulary,
    ) -> Origin:
        """The origin of a run on `batches`. The data hash covers their token rows, wherever these were read from."""
        rows = [row for row in batches.rows if learnable(row)]
        identity = {
            "target_fingerprint": fingerprint,
            "taps": list(taps),
            "data_hash": rows_hash(rows),
            "warm_start": None if config.warm_start is None else Path(config.warm_start).name,
        }
        data = config.store if config.source == "offline" else config.chats
        facts = {
            "target": Path(config.target).name if Path(config.target).exists() else config.target,
            **identity,
            "data": data.name if data is not None else "",
            "rows": len(rows),
            "covered": round(vocabulary.covered, 4),
            "shape": config.shape.model_dump(mode="json", exclude_none=True),
            "loss": config.loss.model_dump(mode="json"),
            "batch_tokens": config.batch_tokens,
            "max_length": config.max_length,
            **({} if config.segments is None else {"segments": config.segments.model_dump()}),
            "loop": config.loop.model_dump(
                mode="json", include={"steps", "accumulate", "seed", "bf16", "optimizer", "schedule"}
            ),
            "versions": versions(),
        }
        return cls(identity, facts)

    def at(self, progress: TrainingProgress, validation: Mapping[str, float], chosen_by: str) -> dict[str, Any]:
        """The provenance of a checkpoint; `chosen_by` names the validation metric that decides which one is best."""
        return {
            **self.facts,
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            "validation": {name: round(value, 4) for name, value in validation.items()},
            "chosen_by": chosen_by,
        }


CHECKPOINT_DTYPE = torch.bfloat16
"""The dtype in which checkpoints are saved."""


class DrafterRun:
    """A drafter's objective, validation data and run folder, in the form that the loop's `train` runs."""

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
        self._objective = objective
        self._held_out = held_out
        self._origin = origin
        self._decoding = decoding
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

    def validate(self, progress: TrainingProgress, advance: Advance) -> dict[str, float]:
        """Score held-out batches, decode, save `checkpoints/step-N` and update `best`.

        All processes call this: rank 0 saves, and those with a `decoding` decode.
        """
        network = self._objective.model
        network.eval()
        found = scored(self._objective.score, self._held_out, self._count, self._processes, advance)
        network.train()
        served = served_copy(network)
        figures = {f"validation_{name}": value for name, value in found.items()}
        if self._decoding is not None:
            stats = self._decoding(served, advance)
            figures["decoded_accept_length"] = found["decoded_accept_length"] = stats.accept_length
            by_context = stats.accept_length_by_context
            if len(by_context) > 1:
                figures |= {f"decoded_accept_length_{name}": length for name, length in by_context.items()}
        if self._processes.is_main:
            provenance = self._origin.at(progress, found, self._chosen_by)
            self._folder.add(progress.step, lambda path: save_network(served, path, provenance))
        return figures

    def finish(self) -> Path:
        """On rank 0, print the run's results and the next command, and copy the last checkpoint to `drafter/`."""
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
"""A run's file of prompts from held-out chats, for measuring its checkpoints."""


class RunFolder:
    """The drafter folders of a run: `checkpoints/step-N/`, `best/` and `drafter/`, each complete or absent.

    Which checkpoint is the best, and which ones may be deleted, follows from the checkpoints alone, so an interruption
    loses nothing.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """`keep` is the number of newest checkpoints to keep in addition to the best one; None = all."""
        self.path = path
        self._keep = keep

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

        Checkpoints of this and later steps, left by an interrupted run, are deleted first.
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
        """The checkpoint with the highest score, the earliest if several tie. Raises CheckpointError without any."""
        scored = {path: score(path) for path in self.checkpoints().values()}
        if not scored:
            raise CheckpointError(f"{self.path} holds no checkpoints")
        return max(scored, key=lambda path: scored[path])

    def summary(self) -> list[str]:
        """The results of a finished run, its folders, and the command to run next."""
        best, (step, last) = self.best(), list(self.checkpoints().items())[-1]
        provenance = read_json(last / "config.json").get("eyas", {})
        name = str(provenance.get("chosen_by", "score")).replace("_", " ")
        lines = [
            f"trained {step:,} steps in {duration(provenance.get('seconds', 0.0))}: {name} {score(last):.2f} after the "
            f"last, {score(best):.2f} after the best, {best.name} (1 = no draft token is accepted)",
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
    """The validation metric that a checkpoint's provenance names in `chosen_by`; higher is better."""
    provenance = read_json(checkpoint / "config.json").get("eyas", {})
    return float(provenance["validation"][provenance["chosen_by"]])


_CHANGEABLE = {
    "draft_vocab_size", "default_tree", "max_position_embeddings", "draft_window", "sliding_window", "layer_types",
    "sliding_anchored",
}  # fmt: skip
"""Config fields that may differ in a warm start: they affect no weights but the head's, whose rows are matched."""


MEASURED = 32
"""Number of held-out prompts that a run writes for measuring its checkpoints."""
FIRST_CONTEXT_BUCKET = 1024
"""Tokens in the first context range; a run with longer chats has metrics for each range."""


def train_drafter(config: DrafterTrainConfig) -> Path:
    """Train a drafter and return the folder of its last checkpoint; an interrupted run is resumed.

    Raises ConfigError, DataError, StoreError, DrafterMismatchError and CheckpointError before the first step.
    """
    with join_processes(config.loop.parallel, resolve_device(config.device)) as processes:
        check_loop(config.loop, processes)
        files = find_target(config.target)
        dtype = resolved_dtype(config, files, processes)
        decodes = config.validation.decode and (processes.mode == "fsdp" or processes.is_main)
        target = load_run_target(files, dtype, processes, whole=decodes or config.source != "offline")
        return _train(config, dtype, processes, target, load_tokenizer(files))


def check_run(config: DrafterTrainConfig) -> tuple[int, ...]:
    """Check what a recipe and its target's config determine, before there is any data; the boundaries that it taps.

    Raises ConfigError, UsageError, RequestError and ModelError as `train_drafter` would.
    """
    check_loop(config.loop, ProcessGroup(0, 1, resolve_device(config.device), "none"))
    target = described(config.target)
    cut_length(config, target)
    if config.validation.tree is not None:
        parse_tree(config.validation.tree)
    if config.warm_start is not None:
        find_drafter(config.warm_start)
    network = drafter_config(with_taps(config.shape, target, ()), target)
    check_parts(config.shape, network, target)
    return network.taps_of(target.num_layers)


def _train(written: DrafterTrainConfig, dtype: str, processes: ProcessGroup, loaded: RunTarget, tokenizer: Any) -> Path:
    target = loaded.target
    length = cut_length(written, loaded.target)
    data = open_data(written.source, written.store, written.chats, written.held_out_share, length, target, tokenizer)
    data = data.beginning(written.data_share)
    config = sized(written, target, dtype, data.rows["train"])
    train_batches, held_out = (
        ChatBatches(rows, config.batch_tokens, config.max_length, config.loop.seed, config.segments)
        for rows in (data.rows["train"], data.rows["validation"])
    )
    loop = resolved(config.loop, train_batches.per_epoch, target.hidden_size, config.output, processes)
    config = config.model_copy(update={"loop": loop})
    size = config.shape.draft_vocabulary(target.vocab_size)
    start = None if config.warm_start is None else load_network(local_directory(config.warm_start), target)
    known = None if start is None else start.target_ids
    vocabulary = DraftVocabulary.chosen(data.rows["train"], size, target, tokenizer, known)
    torch.manual_seed(loop.seed)
    network = fresh_network(with_taps(config.shape, target, data.served_taps), target, vocabulary.ids)
    taps = network.config.taps_of(target.num_layers)
    check_positions(config, network)
    started = None
    if start is not None:
        common = warm_start(network, taps, start, str(config.warm_start))
        started = f"{config.warm_start} ({common} of {network.config.draft_vocab_size} draft tokens known to it)"
    learned, judged = (loaded.in_step_with(data.features(batches, taps)) for batches in (train_batches, held_out))
    objective = DraftObjective(
        network,
        target.head,
        target.vocab_size,
        learned,
        config.loss,
        loop.bf16,
        loop.seed,
        by_context=config.max_length > FIRST_CONTEXT_BUCKET,
    )
    origin = Origin.of(config, data.fingerprint, taps, train_batches, vocabulary)
    decoding = None
    if config.validation.decode and (processes.is_main or loaded.is_sharded):
        decoding = HeldOutDecoding(loaded, tokenizer, data.rows["validation"], config.validation)
    run = DrafterRun(objective, judged, held_out.per_epoch, origin, decoding, config, processes)
    if processes.is_main:
        announce(
            Outlook(written, config, loop, target, network, vocabulary, train_batches, started, data.cut, data.left_out)
        )
        recipe = {"drafter": config.model_dump(mode="json", exclude={"loop": {"epochs"}})}  # resolved to steps
        write_text(config.output / "config.yaml", yaml.safe_dump(recipe, sort_keys=False))
        if any(map(prompt_of, data.rows["validation"])):
            write_prompts(config.output / PROMPTS, data.rows["validation"], MEASURED)
    identity = config.model_dump(mode="json", exclude=ELSEWHERE) | origin.identity
    train(run, loop, config.output, processes, identity)
    return run.finish()


def check_positions(config: SizedConfig, network: DraftNetwork) -> None:
    """Raise ConfigError if random starts lead to positions that the drafter doesn't have."""
    longest = config.max_length
    most = getattr(network.config, "max_position_embeddings", None)
    if config.segments is not None:
        longest = min(longest, config.segments.length + config.segments.context)
    if config.loss.random_start is not None and most is not None and config.loss.random_start + longest > most:
        raise ConfigError(
            f"loss.random_start {config.loss.random_start} and rows of {longest} tokens lead to positions beyond the "
            f"drafter's {most}: set it to {max(0, most - longest)} or less"
        )


def warm_start(network: DraftNetwork, taps: tuple[int, ...], source: DraftNetwork, name: str) -> int:
    """Initialize `network` with the weights of `source`, called `name` in errors.

    `source` is a drafter of the same kind or of the kind that this one extends, such as EAGLE-3 for P-EAGLE. In the
    latter case, additional layers start by adding nothing, and other weights that `source` lacks are unchanged.

    Rows of the head are matched by target token; rows of tokens that `source` can't draft are unchanged. Returns the
    number of matched rows. Raises DrafterMismatchError listing every difference that prevents a warm start.
    """
    check_alike(network, taps, source, name)
    given = source.state_dict()
    own = network.state_dict()
    extended = type(network) is not type(source)
    if not (given.keys() <= own.keys() if extended else given.keys() == own.keys()):
        different = ", ".join(sorted(own.keys() ^ given.keys()))
        raise DrafterMismatchError(f"can't start from {name}: only one of the two has {different}")
    ids = network.target_ids
    known = source.target_ids.to(network.target_ids.device)
    here, there = _common(ids, known)
    mapped = {id(head.weight) for head in network.heads}
    with torch.no_grad():
        for key, tensor in network.named_parameters():
            if id(tensor) in mapped:
                tensor[here] = given[key].to(tensor)[there]
            elif key in given:
                tensor.copy_(given[key])
            elif ".o_proj." in key or ".down_proj." in key:
                tensor.zero_()
    return len(here)


def check_alike(network: DraftNetwork, taps: tuple[int, ...], source: DraftNetwork, name: str) -> None:
    """Raise DrafterMismatchError for a drafter of another kind, other sizes or other taps, listing all differences.

    A kind that this one extends may have fewer layers and another setting of `norm_output`. A drafter without taps in
    its config was trained with the target's default taps.
    """
    if not isinstance(network, type(source)):
        raise DrafterMismatchError(
            f"can't start from {name}: it is a {type(source).__name__}, but the recipe makes a {type(network).__name__}"
        )
    free = set(_CHANGEABLE)
    extended = type(network) is not type(source)
    wanted = network.config.model_dump()
    there = source.config.model_dump()
    if extended:
        free |= {"norm_output"} | (wanted.keys() - there.keys())
        if there.get("num_hidden_layers", 0) < wanted.get("num_hidden_layers", 0):
            free.add("num_hidden_layers")
    wanted["taps"] = taps
    there["taps"] = there["taps"] or taps
    wrong = [
        f"{key}: {there[key]} there, {value} in the recipe"
        for key, value in wanted.items()
        if key not in free and there[key] != value
    ]
    if wrong:
        raise DrafterMismatchError(f"can't start from {name}, which has another shape:\n  " + "\n  ".join(wrong))


def _common(ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that two ascending lists [n] and [m] have in common, as indices into each."""
    index = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    here = (known[index] == ids).nonzero().squeeze(1)
    return here, index[here]
