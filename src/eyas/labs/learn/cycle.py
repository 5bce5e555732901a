"""A cycle of learning: from the newest rows of traffic to a promoted generation, or to the reason why there is none.

Rows are copied first, so that the server may drop them meanwhile. Then eyas's own trainer continues from the drafter in
service, the gate compares the two, and a better candidate becomes a generation. A killed cycle resumes where it was:
the copy is complete once its manifest exists, and the trainer saves its own state.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from eyas.data.store.manifest import MANIFEST
from eyas.data.store.reader import FeatureStore
from eyas.drafters.checkpoint import Checkpoint, load_network, open_checkpoint, save_network
from eyas.errors import EyasError, StoreError, TrainingError, UsageError
from eyas.files import FileLock, write_json, write_text
from eyas.labs.learn.folder import Card, LearnFolder, LearnSettings, LearnState
from eyas.labs.learn.gate import Gate, GateConfig
from eyas.labs.learn.traffic import TrafficRow, TrafficStore, stored_rows, write_store
from eyas.targets.loading import load_embedding_and_head
from eyas.targets.passes import EmbeddingAndHead
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.shape import shape_of
from eyas.train.drafter.train import warm_start
from eyas.train.recipe import load_recipe, run_recipe

_VALIDATED = 16
"""One in this many training rows is held out, to choose among the run's checkpoints."""
_RATE_FACTOR = 0.5
"""The peak learning rate of a cycle, as a share of AdamW's in the drafter's own run."""
_HALVINGS = 2
"""How many times a candidate that forgets is moved halfway back to its parent."""
_REFERENCE = 128
"""Maximum number of reference rows."""


@dataclass(frozen=True)
class CycleConfig:
    """How much a cycle learns from."""

    store: Path | None = None
    """The drafter's original store; its rows are mixed in and tested on, so that nothing is forgotten."""
    min_rows: int = 200
    """Minimum number of new training rows for a cycle to begin."""
    max_rows: int = 2000
    """Maximum number of traffic rows, newest first; store rows with about as many tokens are mixed in."""
    epochs: float = 2.0
    threads: int | None = None
    device: str | None = None
    gate: GateConfig = field(default_factory=GateConfig)


def due(folder: LearnFolder, config: CycleConfig) -> bool:
    """Whether there is an unfinished cycle, or one may begin because there are enough new rows."""
    state = folder.state
    if state.wanted != state.settled and not state.pinned:
        return False  # on trial: the next cycle is to begin with the winner
    if (folder.run / "store" / MANIFEST).is_file():
        return True
    traffic = _traffic(folder)
    return traffic.count("train", state.learned) >= config.min_rows and traffic.count("held") >= config.gate.min_rows


def run_cycle(folder: LearnFolder, config: CycleConfig, say: Callable[[str], None] = lambda _: None) -> int | None:
    """Run or finish a cycle; returns the generation that was made, or None.

    Raises UsageError if no cycle is due, LockedError if another process is running one.
    """
    if not due(folder, config):
        raise UsageError(
            f"{folder.path}/traffic has fewer than {config.min_rows} new rows or {config.gate.min_rows} held-out ones, "
            "or a generation is on trial: wait for more traffic"
        )
    with FileLock(folder.path / "learner"):
        return _run(folder, config, say)


def _run(folder: LearnFolder, config: CycleConfig, say: Callable[[str], None]) -> int | None:
    plan, store = _snapshot(folder, config)
    parent = folder.generation(plan["parent"])
    say(f"generation {plan['parent']} learns from {plan['traffic_rows']} requests and {plan['store_rows']} stored rows")
    try:
        if not (folder.run / "run" / "drafter" / "config.json").is_file():
            _train(folder, parent, plan, config)
    except TrainingError as error:  # the same rows would fail in the same way again
        _finish(folder, plan, None, f"training failed: {error}")
        return None
    candidate = folder.run / "run" / "best"
    target = load_embedding_and_head(
        folder.settings.model, dtype=folder.settings.target.dtype, device=config.device or "cpu"
    )
    reference = FeatureStore.open(folder.reference) if (folder.reference / MANIFEST).is_file() else None
    gate = Gate(parent, target, store, "held", reference, config.gate)
    for halved in range(_HALVINGS + 1):
        found = gate.judge(candidate)
        say(found.reason)
        if not found.forgets or halved == _HALVINGS:
            break
        candidate = averaged_with_parent(candidate, parent, target, folder.run / f"halved-{halved}")
    number = None
    reason = found.reason
    if found.promoted and folder.state.settled != plan["parent"]:
        reason = f"generation {folder.state.settled} is in service now, not the one that this one was compared with"
    elif found.promoted:
        number = folder.add(candidate, _card(candidate, plan, {**found.figures, "share_of_change": 0.5**halved}))
    _finish(folder, plan, number, reason)
    return number


def averaged_with_parent(candidate: Path, parent: Path, target: EmbeddingAndHead, made: Path) -> Path:
    """Write a drafter whose weights are the means of the two drafters', with the candidate's vocabulary.

    Since the two are close, it keeps most of what either has learned (Wortsman et al. 2022, WiSE-FT).
    """
    opened = open_checkpoint(candidate, layers=target.num_layers)
    network = opened.network(target)
    mean = opened.network(target)
    known = load_network(parent, target)
    warm_start(mean, known.config.taps_of(target.num_layers), known, str(parent))
    with torch.no_grad():
        for weight, learned in zip(mean.parameters(), network.parameters(), strict=True):
            weight.lerp_(learned, 0.5)
    save_network(mean, made, opened.provenance)
    return made


def _finish(folder: LearnFolder, plan: dict[str, Any], number: int | None, reason: str) -> None:
    def after(state: LearnState) -> LearnState:
        wanted = state.wanted if number is None or state.pinned else number
        return state.model_copy(update={"learned": plan["newest"], "wanted": wanted})

    if number is None:
        folder.change(after, "not promoted", parent=plan["parent"], reason=reason)
    else:
        folder.change(after, "promoted", generation=number, parent=plan["parent"], reason=reason)
    (folder.run / "store" / MANIFEST).unlink(missing_ok=True)  # first: without it, no cycle resumes
    shutil.rmtree(folder.run, ignore_errors=True)  # includes copies of traffic


def _card(candidate: Path, plan: dict[str, Any], figures: dict[str, float]) -> Card:
    origin = open_checkpoint(candidate).provenance
    return Card(
        number=0,
        parent=plan["parent"],
        made=time.time(),
        traffic_rows=plan["traffic_rows"],
        traffic_tokens=plan["traffic_tokens"],
        store_rows=plan["store_rows"],
        steps=int(origin.get("steps", 0)),
        seconds=float(origin.get("seconds", 0.0)),
        gate={name: round(value, 4) for name, value in figures.items()},
    )


def _traffic(folder: LearnFolder) -> TrafficStore:
    return TrafficStore(folder.traffic, folder.settings.layout, sys.maxsize)


def _snapshot(folder: LearnFolder, config: CycleConfig) -> tuple[dict[str, Any], FeatureStore]:
    """Copy the rows of a cycle unless that is done; returns the cycle's plan and the copy."""
    path, plan = folder.run / "store", folder.run / "plan.json"
    if (path / MANIFEST).is_file():
        return yaml.safe_load(plan.read_text(encoding="utf-8")), FeatureStore.open(path)
    shutil.rmtree(folder.run, ignore_errors=True)
    settings = folder.settings
    traffic = _traffic(folder)
    newest = max(one.path.name for one in traffic.shards())
    learned = traffic.newest("train", config.max_rows)
    held = traffic.newest("held", max(config.max_rows // 4, config.gate.min_rows))
    original = None if config.store is None else FeatureStore.open(config.store)
    mixed = [] if original is None else mixed_rows(original, settings, learned, seed=int(newest[:20]))
    if not (folder.reference / MANIFEST).is_file():
        reference = held[-_REFERENCE:] if original is None else []
        if original is not None:
            reference = list(stored_rows(original, "validation", settings.layout, _REFERENCE))
        write_store(folder.reference, settings.target, settings.layout, {"reference": reference}, "reference")
    rows = [*learned, *mixed]
    validation = rows[::_VALIDATED]
    train = [row for index, row in enumerate(rows) if index % _VALIDATED]
    facts = {
        "parent": folder.state.settled, "newest": newest, "traffic_rows": len(learned), "store_rows": len(mixed),
        "traffic_tokens": _tokens(learned),
    }  # fmt: skip
    folder.run.mkdir(parents=True, exist_ok=True)
    write_json(plan, facts)
    splits = {"train": train, "validation": validation, "held": held}
    return facts, write_store(path, settings.target, settings.layout, splits, "traffic")


def mixed_rows(
    original: FeatureStore, settings: LearnSettings, learned: list[TrafficRow], seed: int
) -> list[TrafficRow]:
    """Rows of the original store with about as many tokens as the `learned` rows, since its rows may be far longer.

    Raises StoreError for the store of another target.
    """
    if original.settings.target.fingerprint != settings.target.fingerprint:
        raise StoreError(f"{original.folder} is of another target, {original.settings.target.name}: use another store")
    found = []
    left = _tokens(learned)
    for row in stored_rows(original, "train", settings.layout, len(original.rows("train")), seed=seed):
        if left <= 0:
            break
        found.append(row)
        left -= len(row.tokens.tokens)
    return found


def _tokens(rows: list[TrafficRow]) -> int:
    return sum(len(row.tokens.tokens) for row in rows)


def _train(folder: LearnFolder, parent: Path, plan: dict[str, Any], config: CycleConfig) -> None:
    """Continue training from the parent, or resume that run; the results are in the run's folder."""
    recipe = folder.run / "recipe.yaml"
    made = recipe_for(
        open_checkpoint(parent, layers=folder.settings.target.layers), parent, folder, config, plan["parent"]
    )
    given = made.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    write_text(recipe, yaml.safe_dump({"drafter": given}, sort_keys=False))
    run_recipe(load_recipe(recipe))


def recipe_for(
    opened: Checkpoint, parent: Path, folder: LearnFolder, config: CycleConfig, seed: int
) -> DrafterTrainConfig:
    """The trainer's settings for a cycle: the parent's shape, the first drafter's loss, and AdamW at a lower rate.

    AdamW is used even if that drafter was trained with Muon, whose update takes half of the step on so small a batch.
    """
    settings = folder.settings
    origin = open_checkpoint(folder.generation(0)).provenance
    optimizer: dict[str, Any] = {"lr": 4e-4, **origin.get("loop", {}).get("optimizer", {}), "kind": "adamw"}
    optimizer["lr"] *= _RATE_FACTOR
    try:
        return DrafterTrainConfig.model_validate(
            {
                "target": settings.model,
                "target_dtype": settings.target.dtype,
                "device": config.device,
                "source": "offline",
                "store": folder.run / "store",
                "output": folder.run / "run",
                "shape": shape_of(opened.config, opened.kind, settings.target.layers),
                "warm_start": str(parent),
                "keep_checkpoints": 1,
                "validation": {"decode": False, "batches": 16},
                "loop": {
                    "epochs": config.epochs,
                    "seed": seed,
                    "threads": config.threads,
                    "log_every": "auto",
                    "validate_every": "auto",
                    "save_seconds": 60.0,
                    "optimizer": optimizer,
                    "schedule": {"kind": "cosine", "warmup": 0.05},
                },
                **({"loss": origin["loss"]} if "loss" in origin else {}),
            }
        )
    except ValueError as error:
        raise EyasError(f"training can't continue from {parent}: {error}") from error
