"""Scores a trial's drafter by the accept length of decoding the same prompts in every trial."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from eyas.bench.offline.runner import Task, read_tasks, run_group
from eyas.data.chats.folder import splits, write_prompts
from eyas.data.store import FeatureStore
from eyas.data.tokens.tokenize import TokenRow, tokenize_chat
from eyas.drafters.loading import load_drafter
from eyas.engine import Engine, Speculation
from eyas.engine.load import tree_for
from eyas.errors import DataError
from eyas.files import file_hash, write_json
from eyas.sweep.config import ScoreConfig
from eyas.sweep.trial import Trial
from eyas.targets import Target, load_target, load_tokenizer
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.data import HELD_OUT_SHARE
from eyas.tree import parse_tree
from eyas.types import SamplingParams, Stats


@dataclass
class Scorer:
    """Measures the accept lengths of drafters; the target is loaded when the first one is scored."""

    config: ScoreConfig
    recipe: DrafterTrainConfig
    folder: Path
    """The folder into which prompts taken from held-out chats are written."""

    @cached_property
    def target(self) -> Target:
        """The recipe's target, loaded once for all trials."""
        return load_target(self.recipe.target, dtype=self.config.dtype, device=self.config.device)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the recipe's target."""
        return load_tokenizer(self.recipe.target)

    @cached_property
    def params(self) -> SamplingParams:
        """Greedy sampling of at most `max_tokens` tokens."""
        return SamplingParams(max_tokens=self.config.max_tokens)

    @cached_property
    def files(self) -> list[Path]:
        """The prompt files; if none are configured, one is written from held-out chats."""
        if self.config.prompt_files:
            return list(dict.fromkeys(self.config.prompt_files))
        path = self.folder / "held_out.jsonl"
        write_prompts(path, held_out_rows(self.recipe, self.tokenizer), self.config.prompts)
        return [path]

    @cached_property
    def tasks(self) -> list[Task]:
        """The prompts as batches, one task for each prompt file."""
        return read_tasks(self.files, self.config.batch_size, self.config.prompts)

    @cached_property
    def prompts(self) -> dict[str, str]:
        """Task name -> SHA-256 of its prompt file."""
        return {task.name: file_hash(path) for task, path in zip(self.tasks, self.files, strict=True)}

    @cached_property
    def key(self) -> str:
        """A hash of everything except the drafter that a score depends on."""
        settings = self.config.model_dump(mode="json", exclude={"prompt_files"})
        text = json.dumps([settings, self.recipe.target, self.prompts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def score(self, trial: Trial, until: int | None = None) -> dict[str, float]:
        """Task name -> accept length; taken from the trial's `score.json` if nothing it depends on has changed.

        That at the step `until` is in a file of its own, which stays when training has gone on.
        """
        path = trial.folder / ("score.json" if until is None else f"score-{until}.json")
        weights = file_hash(*sorted(trial.drafter.glob("*.safetensors")), trial.drafter / "config.json")
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        past = until is not None and (trial.steps or 0) > until
        if known.get("key") == self.key and (past or known.get("weights") == weights):
            return {name: float(value) for name, value in known["tasks"].items()}
        found = {task.name: self._decode(trial.drafter, task).accept_length for task in self.tasks}
        content = {"key": self.key, "weights": weights, "tasks": found, "mean": fmean(found.values())}
        write_json(path, content)
        return found

    def _decode(self, drafter: Path, task: Task) -> Stats:
        loaded = load_drafter(drafter, self.target)
        spec = tree_for(loaded, None if self.config.tree is None else parse_tree(self.config.tree))
        engine = Engine(self.target, self.tokenizer, Speculation(loaded, spec), batch_size=self.config.batch_size)
        pooled = Stats()
        for group in task.groups:
            run = run_group(engine, group, self.params)
            pooled.merge(run.stats)
            task.errors += [error for error in run.errors if error not in task.errors]
        return pooled


def held_out_rows(recipe: DrafterTrainConfig, tokenizer: Any) -> Sequence[TokenRow]:
    """The rows of the validation split of the recipe's store or chats; DataError if the recipe has neither."""
    if recipe.store is not None:
        return FeatureStore.open(recipe.store).rows("validation")
    if recipe.chats is None:
        raise DataError("the recipe has neither a store nor chats, so there are no held-out prompts")
    share = HELD_OUT_SHARE if recipe.held_out_share is None else recipe.held_out_share
    return [tokenize_chat(tokenizer, chat) for chat in splits(recipe.chats, share)["validation"]]
