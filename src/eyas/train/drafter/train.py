"""From a target and a store or chats to a trained drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from eyas.data.tokens.batches import ChatBatches
from eyas.drafters.checkpoint import load_network
from eyas.drafters.loading import local_directory
from eyas.drafters.network import DraftNetwork
from eyas.errors import DrafterMismatchError
from eyas.files import write_text
from eyas.targets import Target, load_target, load_tokenizer
from eyas.targets.loading import load_embedding_and_head, resolve_device
from eyas.train.drafter.config import ELSEWHERE, DrafterTrainConfig
from eyas.train.drafter.data import open_data, with_taps
from eyas.train.drafter.provenance import Origin
from eyas.train.drafter.resolve import SizedConfig, resolved_dtype, sized
from eyas.train.drafter.run import DrafterRun
from eyas.train.drafter.settings import Outlook, announce
from eyas.train.drafter.shape import fresh_network
from eyas.train.drafter.validation import HeldOutDecoding
from eyas.train.drafter.vocab_map import DraftVocabulary
from eyas.train.loop.distributed import Team, joined
from eyas.train.loop.loop import check_loop, resolved, train
from eyas.train.loss.objective import DraftObjective


def train_drafter(config: DrafterTrainConfig) -> Path:
    """Train and save; returns the last drafter's directory. An interrupted run goes on from its last state."""
    with joined(config.loop.parallel, resolve_device(config.device)) as team:
        check_loop(config.loop, team)
        computes = config.source != "offline" or (config.validation.decode and team.leads)
        load = load_target if computes else load_embedding_and_head
        dtype = resolved_dtype(config, team)
        target = load(config.target, dtype=dtype, device=team.device)
        return _train(config, sized(config, target, dtype), team, target, load_tokenizer(config.target))


def _train(written: DrafterTrainConfig, config: SizedConfig, team: Team, target: Target, tokenizer: Any) -> Path:
    data = open_data(
        config.source, config.store, config.chats, config.held_out_share, config.max_length, target, tokenizer
    )
    train_batches, held_out = (
        ChatBatches(rows, config.batch_tokens, config.max_length, config.loop.seed)
        for rows in (data.rows["train"], data.rows["validation"])
    )
    loop = resolved(config.loop, train_batches.per_epoch, config.output, team)
    config = config.model_copy(update={"loop": loop})
    size = config.shape.draft_vocabulary(target.vocab_size)
    vocabulary = DraftVocabulary.chosen(data.rows["train"], size, target, tokenizer)
    torch.manual_seed(loop.seed)
    network = fresh_network(with_taps(config.shape, target, data.served_taps), target, vocabulary.ids)
    taps = network.config.taps_of(target.num_layers)
    started = _started(network, taps, config, target)
    objective = DraftObjective(
        network, target.head, target.vocab_size, data.features(train_batches, taps), config.loss, loop.bf16, loop.seed
    )
    origin = Origin.of(config, data.fingerprint, taps, train_batches, vocabulary)
    decoding = None
    if config.validation.decode and team.leads:
        decoding = HeldOutDecoding(target, tokenizer, data.rows["validation"], config.validation)
    run = DrafterRun(objective, data.features(held_out, taps), held_out.per_epoch, origin, decoding, config, team)
    if team.leads:
        announce(Outlook(written, config, loop, target, network, vocabulary, train_batches, started))
        recipe = {"drafter": config.model_dump(mode="json", exclude={"loop": {"epochs"}})}  # they have become steps
        write_text(config.output / "config.yaml", yaml.safe_dump(recipe, sort_keys=False))
    identity = config.model_dump(mode="json", exclude=ELSEWHERE) | origin.identity
    train(run, loop, config.output, team, identity)
    return run.finish()


def _started(network: DraftNetwork, taps: tuple[int, ...], config: DrafterTrainConfig, target: Target) -> str | None:
    """Warm-start; what to say of it."""
    if config.warm_start is None:
        return None
    path = local_directory(config.warm_start)
    known = warm_start(network, taps, load_network(path, target), config.warm_start)
    return f"{config.warm_start} ({known} of {network.config.draft_vocab_size} draft tokens known to it)"


# Begin with the weights of another drafter of the same kind; another draft vocabulary is re-mapped by target ids.


_FREE = {"draft_vocab_size", "default_tree", "max_position_embeddings"}
"""Fields of a config that may differ: they shape no weight but the head's, which is re-mapped."""
_MAPPED = ("d2t", "t2d", "lm_head.weight")


def warm_start(network: DraftNetwork, taps: tuple[int, ...], source: DraftNetwork, name: str) -> int:
    """Copy `source`'s weights into `network`; returns how many of its draft tokens had a row of the head there.

    Rows of tokens that `source` couldn't draft keep what they start with. DrafterMismatchError lists every difference
    that forbids it. Without taps of its own, `source` was trained at the default ones of the target.
    """
    check_alike(network, taps, source, name)
    given = source.state_dict()
    own = network.state_dict()
    if own.keys() != given.keys():
        different = ", ".join(sorted(own.keys() ^ given.keys()))
        raise DrafterMismatchError(f"can't start from {name}: only one of the two has {different}")
    ids, known = network.target_ids, source.target_ids.to(network.target_ids.device)
    with torch.no_grad():
        for key, tensor in own.items():
            if key not in _MAPPED:
                tensor.copy_(given[key])
        here, there = _common(ids, known)
        if "lm_head.weight" in own:
            own["lm_head.weight"][here] = given["lm_head.weight"].to(own["lm_head.weight"])[there]
    return len(here)


def check_alike(network: DraftNetwork, taps: tuple[int, ...], source: DraftNetwork, name: str) -> None:
    """Refuse a drafter of another kind, of other sizes or with other taps, naming all differences."""
    if type(network) is not type(source):
        raise DrafterMismatchError(
            f"can't start from {name}: it is a {type(source).__name__}, the recipe makes a {type(network).__name__}"
        )
    wanted, there = network.config.model_dump(exclude=_FREE), source.config.model_dump(exclude=_FREE)
    wanted["taps"] = taps
    there["taps"] = there["taps"] or taps
    wrong = [
        f"{key}: {there[key]} there, {value} in the recipe" for key, value in wanted.items() if there[key] != value
    ]
    if wrong:
        raise DrafterMismatchError(f"can't start from {name}, it is another shape of drafter:\n  " + "\n  ".join(wrong))


def _common(ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the same ids in two rising lists [n], [m]: two index tensors of equal length."""
    place = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    here = (known[place] == ids).nonzero().squeeze(1)
    return here, place[here]
