"""Tiny draft networks of every kind, and a reference for their chains of draft tokens, with a growing cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.kinds import KINDS
from eyas.drafters.kinds.medusa import MedusaNetwork
from eyas.drafters.network import DraftNetwork, set_vocabulary

VOCAB = 40
DRAFT = 20
HIDDEN = 16

_SIZES = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "target_hidden_size": HIDDEN}
_LAYERS = {"intermediate_size": 24, "num_attention_heads": 4}
_GROUPED = {**_LAYERS, "num_key_value_heads": 2, "head_dim": 6}
_FUSED = {"draft_vocab_size": DRAFT, "num_aux_hidden_states": 3}

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {**_GROUPED, **_FUSED}),
    "eagle3.1": ("eagle3", {**_GROUPED, **_FUSED, "fc_norm": True, "norm_output": True}),
    "mla": (
        "mla",
        {
            **_LAYERS,
            **_FUSED,
            "q_lora_rank": 10,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
        },
    ),
    "eagle1": ("eagle1", {**_GROUPED, "draft_vocab_size": DRAFT, "embedding": "own", "head": "own"}),
    "mlp": ("mlp", {"draft_vocab_size": DRAFT, "embedding": "own", "head": "own"}),
    "medusa": ("medusa", {"draft_vocab_size": DRAFT, "num_heads": 4, "num_hidden_layers": 2}),
    "mtp": (
        "mtp",
        {**_GROUPED, "draft_vocab_size": DRAFT, "embedding": "own", "head": "own", "zero_first": True},
    ),
    "peagle": ("peagle", {**_GROUPED, **_FUSED, "num_hidden_layers": 2, "num_depths": 4, "mask_token_id": 3}),
    "two layers": ("eagle3", {**_GROUPED, **_FUSED, "num_hidden_layers": 2, "norm_before_residual": True}),
}


def network(name: str, dtype: torch.dtype = torch.float64) -> DraftNetwork:
    """A random network; norm weights aren't left at their initial 1, which would hide a missing scale."""
    kind_name, settings = NETWORKS[name]
    kind = KINDS[kind_name]
    torch.manual_seed(0)
    made = kind.network(kind.config.model_validate({**_SIZES, **settings})).to(dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=0.5 if parameter.ndim == 1 else 0.0, std=0.25)
    set_vocabulary(made, torch.randperm(VOCAB)[: made.config.draft_vocab_size].sort().values)
    return made


def chain(made: DraftNetwork, tokens: Tensor, taps: Tensor, row: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Decode one chat as the engine does: commit pairs 0..row, then feed draft tokens one by one to a growing cache.

    P-EAGLE's masked slots are fed one by one as well: each sees those before it.

    tokens [1, S], taps [1, S, A, Ht]; returns for each step the state fed back and the head's input, [H] each.
    """
    if isinstance(made, MedusaNetwork):
        states = [made.guess(made.fuse(taps)[0, row], step) for step in range(steps)]
        return [(state, state) for state in states]
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in cache:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cache[layer], (k, v), strict=True))
        cache[layer] = (k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)

    hidden, normed = made.step(
        tokens[:, 1 : row + 2], made.fuse(taps[:, : row + 1]), torch.arange(row + 1)[None], attend
    )
    hidden, found = hidden[:, -1:], [(hidden[0, -1], normed[0, -1])]
    masked = made.masked_pair()
    for step in range(1, steps):
        token = tokens[:, row + 1 + step : row + 2 + step]
        if masked is not None:
            token = torch.tensor([[masked.token]])
            hidden = masked.state
        hidden, normed = made.step(token, hidden, torch.tensor([[row + step]]), attend)
        found.append((hidden[0, -1], normed[0, -1]))
    return found
