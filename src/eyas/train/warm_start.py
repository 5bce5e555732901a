"""Begin with the weights of another drafter of the same kind; another draft vocabulary is re-mapped by target ids."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafters.network import DraftNetwork
from eyas.errors import DrafterMismatchError

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
