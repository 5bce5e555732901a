"""Trains a drafter: makes a run folder with checkpoints from a target and a store or chats; also warm starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from eyas.data.chats.folder import prompt_of, write_prompts
from eyas.data.tokens.batches import ChatBatches
from eyas.drafters.checkpoint import load_network
from eyas.drafters.loading import local_directory
from eyas.drafters.network import DraftNetwork
from eyas.errors import ConfigError, DrafterMismatchError
from eyas.files import write_text
from eyas.targets import Target, load_target, load_tokenizer
from eyas.targets.loading import load_embedding_and_head, read_config, resolve_device
from eyas.targets.quantization import quantized_by
from eyas.train.drafter.config import ELSEWHERE, DrafterTrainConfig
from eyas.train.drafter.data import open_data, with_taps
from eyas.train.drafter.provenance import Origin
from eyas.train.drafter.resolve import SizedConfig, cut_length, resolved_dtype, sized
from eyas.train.drafter.run import PROMPTS, DrafterRun
from eyas.train.drafter.settings import Outlook, announce
from eyas.train.drafter.shape import fresh_network
from eyas.train.drafter.target import RunTarget
from eyas.train.drafter.validation import HeldOutDecoding
from eyas.train.drafter.vocab_map import DraftVocabulary
from eyas.train.loop.distributed import ProcessGroup, join_processes
from eyas.train.loop.loop import check_loop, resolved, train
from eyas.train.loss.objective import DraftObjective

_FREE = {"draft_vocab_size", "default_tree", "max_position_embeddings", "draft_window"}
"""Config fields that may differ in a warm start: they affect no weights but the head's, whose rows are matched."""


MEASURED = 32
"""Held-out prompts that a run leaves to measure its checkpoints on."""
FIRST_RANGE = 1024
"""Tokens of the first range of contexts; longer chats have metrics for each range."""


def train_drafter(config: DrafterTrainConfig) -> Path:
    """Train a drafter and return the folder of its last checkpoint; an interrupted run is resumed.

    Raises ConfigError, DataError, StoreError, DrafterMismatchError and CheckpointError before the first step.
    """
    with join_processes(config.loop.parallel, resolve_device(config.device)) as processes:
        check_loop(config.loop, processes)
        dtype = resolved_dtype(config, processes)
        target = load_for(config, dtype, processes)
        return _train(config, dtype, processes, target, load_tokenizer(config.target))


def load_for(config: DrafterTrainConfig, dtype: str, processes: ProcessGroup) -> RunTarget:
    """The target as the run needs it: sharded if it computes under FSDP, whole, or nothing but embedding and head."""
    sharded = processes.mode == "fsdp"
    decodes = config.validation.decode and (sharded or processes.is_main)
    if config.source == "offline" and not decodes:
        return RunTarget(load_embedding_and_head(config.target, dtype=dtype, device=processes.device))
    if not sharded:
        eager = processes.device.type == "cuda"  # it reads whole chats
        return RunTarget(load_target(config.target, dtype=dtype, device=processes.device, eager=eager))
    method = quantized_by(read_config(config.target))
    if method is not None:
        raise ConfigError(
            f"{config.target} is quantised by {method}, and fsdp shards no quantised weights: set loop.parallel to "
            "ddp, with which every process holds the whole target"
        )
    return RunTarget.sharded(partial(load_target, config.target, dtype=dtype, device="cpu", prepacked=False), processes)


def _train(written: DrafterTrainConfig, dtype: str, processes: ProcessGroup, loaded: RunTarget, tokenizer: Any) -> Path:
    target, length = loaded.target, cut_length(written, loaded.target)
    data = open_data(written.source, written.store, written.chats, written.held_out_share, length, target, tokenizer)
    config = sized(written, target, dtype, data.rows["train"])
    train_batches, held_out = (
        ChatBatches(rows, config.batch_tokens, config.max_length, config.loop.seed, config.segments)
        for rows in (data.rows["train"], data.rows["validation"])
    )
    loop = resolved(config.loop, train_batches.per_epoch, config.output, processes)
    config = config.model_copy(update={"loop": loop})
    size = config.shape.draft_vocabulary(target.vocab_size)
    vocabulary = DraftVocabulary.chosen(data.rows["train"], size, target, tokenizer)
    torch.manual_seed(loop.seed)
    network = fresh_network(with_taps(config.shape, target, data.served_taps), target, vocabulary.ids)
    taps = network.config.taps_of(target.num_layers)
    check_positions(config, network)
    started = _started(network, taps, config, target)
    learnt, judged = (loaded.in_step_with(data.features(batches, taps)) for batches in (train_batches, held_out))
    objective = DraftObjective(
        network, target.head, target.vocab_size, learnt, config.loss, loop.bf16, loop.seed,
        by_context=config.max_length > FIRST_RANGE,
    )  # fmt: skip
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
    longest, most = config.max_length, getattr(network.config, "max_position_embeddings", None)
    if config.segments is not None:
        longest = min(longest, config.segments.length + config.segments.context)
    if config.loss.random_start is not None and most is not None and config.loss.random_start + longest > most:
        raise ConfigError(
            f"loss.random_start {config.loss.random_start} and rows of {longest} tokens lead to positions beyond the "
            f"drafter's {most}: set it to {max(0, most - longest)} or less"
        )


def _started(network: DraftNetwork, taps: tuple[int, ...], config: DrafterTrainConfig, target: Target) -> str | None:
    """Warm-start `network` if the recipe says so, and return a description for the table of settings."""
    if config.warm_start is None:
        return None
    path = local_directory(config.warm_start)
    known = warm_start(network, taps, load_network(path, target), config.warm_start)
    return f"{config.warm_start} ({known} of {network.config.draft_vocab_size} draft tokens known to it)"


def warm_start(network: DraftNetwork, taps: tuple[int, ...], source: DraftNetwork, name: str) -> int:
    """Initialise `network` with the weights of `source`, called `name` in errors.

    It is a drafter of the same kind or of the one that this kind extends, such as EAGLE-3 for P-EAGLE. Then further
    layers begin by adding nothing, and what else `source` doesn't have keeps its weights.

    Rows of the head are matched by target token; rows of tokens that `source` can't draft are left alone. Returns the
    number of matched rows. Raises DrafterMismatchError listing every difference between the two that prevents it.
    """
    check_alike(network, taps, source, name)
    given = source.state_dict()
    own = network.state_dict()
    extended = type(network) is not type(source)
    if not (given.keys() <= own.keys() if extended else given.keys() == own.keys()):
        different = ", ".join(sorted(own.keys() ^ given.keys()))
        raise DrafterMismatchError(f"can't start from {name}: only one of the two has {different}")
    ids, known = network.target_ids, source.target_ids.to(network.target_ids.device)
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

    A kind that this one extends may have fewer layers, and other settings for feeding states back. A drafter without
    taps in its config was trained at the target's default ones.
    """
    if not isinstance(network, type(source)):
        raise DrafterMismatchError(
            f"can't start from {name}: it is a {type(source).__name__}, but the recipe makes a {type(network).__name__}"
        )
    free, extended = set(_FREE), type(network) is not type(source)
    wanted, there = network.config.model_dump(), source.config.model_dump()
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
