"""From a target and a store or chats to a trained drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from eyas.data.batches import ChatBatches
from eyas.drafters.checkpoint import load_network
from eyas.drafters.loading import local_directory
from eyas.drafters.network import DraftNetwork
from eyas.target import Target, load_target, load_tokenizer
from eyas.target.ends import load_ends
from eyas.target.loading import resolve_device
from eyas.train.checkpoint import write_text
from eyas.train.distributed import Team, joined
from eyas.train.drafter_recipe import ELSEWHERE, DrafterTrainConfig
from eyas.train.drafter_run import DrafterRun
from eyas.train.loop import check_loop, train
from eyas.train.objective import DraftObjective
from eyas.train.outlook import outlook, show
from eyas.train.provenance import Origin
from eyas.train.shape import fresh_network
from eyas.train.training_data import TrainingData, open_data, with_taps
from eyas.train.validation import HeldOutDecoding
from eyas.train.vocab_map import DraftVocabulary
from eyas.train.warm_start import warm_start


def train_drafter(config: DrafterTrainConfig) -> Path:
    """Train and save; returns the last drafter's directory. An interrupted run goes on from its last state."""
    with joined(config.loop.parallel, resolve_device(config.device)) as team:
        check_loop(config.loop, team)
        computes = config.source != "offline" or (config.validation.decode and team.leads)
        load = load_target if computes else load_ends
        target = load(config.target, dtype=config.target_dtype, device=team.device)
        tokenizer = load_tokenizer(config.target)
        data = open_data(
            config.source, config.store, config.chats, config.held_out_share, config.max_length, target, tokenizer
        )
        return _train(config, team, target, tokenizer, data)


def _train(config: DrafterTrainConfig, team: Team, target: Target, tokenizer: Any, data: TrainingData) -> Path:
    vocabulary = DraftVocabulary.chosen(
        data.rows["train"], config.shape.draft_vocab_size or target.vocab_size, target, tokenizer
    )
    torch.manual_seed(config.loop.seed)
    shape = with_taps(config.shape, target, data.served_taps)
    network = fresh_network(shape, target, vocabulary.ids)
    taps = network.config.taps or network.config.default_taps(target.num_layers)
    started = _started(network, taps, config, target)
    train_batches, held_out = (
        ChatBatches(rows, config.batch_tokens, config.max_length, config.loop.seed)
        for rows in (data.rows["train"], data.rows["validation"])
    )
    objective = DraftObjective(
        network, target.head, target.vocab_size, data.features(train_batches, taps), config.loss, config.loop.bf16,
        seed=config.loop.seed,
    )  # fmt: skip
    origin = Origin.of(config, data.fingerprint, taps, train_batches, vocabulary)
    decoding = None
    if config.validation.decode and team.leads:
        decoding = HeldOutDecoding(target, tokenizer, data.rows["validation"], config.validation)
    run = DrafterRun(objective, data.features(held_out, taps), held_out.per_epoch, origin, decoding, config, team)
    if team.leads:
        show(outlook(config, network, train_batches, vocabulary, target, started))
        config.output.mkdir(parents=True, exist_ok=True)
        write_text(config.output / "config.yaml", recipe_text(config))
    identity = config.model_dump(mode="json", exclude=ELSEWHERE) | origin.identity
    train(run, config.loop, config.output, team, identity)
    return run.finish()


def recipe_text(config: DrafterTrainConfig) -> str:
    """The recipe with everything filled in, to be run again."""
    return yaml.safe_dump({"drafter": config.model_dump(mode="json")}, sort_keys=False)


def _started(network: DraftNetwork, taps: tuple[int, ...], config: DrafterTrainConfig, target: Target) -> str | None:
    """Warm-start; what to say of it."""
    if config.warm_start is None:
        return None
    path = local_directory(config.warm_start)
    known = warm_start(network, taps, load_network(path, target), config.warm_start)
    return f"{config.warm_start} ({known} of {network.config.draft_vocab_size} draft tokens known to it)"
