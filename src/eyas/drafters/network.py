"""The base of every kind's network, as decoding and training use it: `fuse`, `step`, `logits`.

Shapes: B batch, S positions, A taps, Ht target hidden, H draft hidden, V / Vd full / draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.config import DrafterConfig
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.drafters.layers import Attend
from eyas.errors import CheckpointError
from eyas.targets import Target
from eyas.targets.slots import KVShape


@dataclass(frozen=True)
class SharedParts:
    """The target's embedding and head, for a network without its own; they aren't saved, moved or trained with it."""

    embedding: Tensor  # [V, H]
    head: Callable[[Tensor], Tensor]  # [..., H] -> [..., Vd]


class DraftNetwork(nn.Module):
    """Base of all kinds: the vocabulary map, and an embedding and a head that are its own or the target's."""

    config: DrafterConfig
    d2t: Tensor  # [Vd] int64: target id - draft id
    t2d: Tensor  # [V] bool: the target ids the draft vocabulary covers

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self._shared: SharedParts | None = None
        if config.embedding == "own":
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.head == "own":
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    @property
    def kv_shapes(self) -> list[tuple[KVShape, KVShape]]:
        """The shapes of the keys and values that each layer caches; empty without attention."""
        return []

    @property
    def target_ids(self) -> Tensor:
        """[Vd] target token id of every draft id."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the network computes in."""
        tensors = chain(self.parameters(), self.buffers())
        return next(tensor.dtype for tensor in tensors if tensor.is_floating_point())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all its tensors, the vocabulary map included."""
        return {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}

    def fill(self, tensors: Mapping[str, Tensor], target: Target | None = None) -> DraftNetwork:
        """Make a blank network of exactly these tensors, none of them copied, and what it shares with `target`.

        Returns the network itself, in inference mode.
        """
        self.load_state_dict(tensors, assign=True)
        if target is not None and "shared" in (self.config.embedding, self.config.head):
            self.borrow(target)
        return self.eval().requires_grad_(False)

    def set_vocabulary(self, ids: Tensor) -> None:
        """Let draft id i stand for target id `ids[i]`; ids [Vd] are in rising order."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.fill_(False)
        self.t2d[ids.to(self.t2d.device)] = True

    def borrow(self, target: Target) -> None:
        """Use the target's embedding and head where this network has none; the vocabulary must be set before.

        Raises CheckpointError when they have another size.
        """
        need = (self.config.vocab_size, self.config.hidden_size)
        model = target.model
        for part, shared, weight in (
            (EMBEDDING, self.config.embedding, model.get_input_embeddings().weight),
            (HEAD, self.config.head, model.get_output_embeddings().weight),
        ):
            if shared == "shared" and weight.shape != need:
                raise CheckpointError(
                    f"there is no {part}, and the target's is {' x '.join(map(str, weight.shape))} where the drafter "
                    f"needs {need[0]} x {need[1]}: use the target it was trained for"
                )
        full = self.config.draft_vocab_size == self.config.vocab_size
        head = target.head if full else target.head_rows(self.target_ids)
        self._shared = SharedParts(model.get_input_embeddings().weight.detach(), head)

    def fuse(self, taps: Tensor) -> Tensor:
        """The drafter states [B, S, H] of target taps [B, S, A, Ht]; never applied to states that are fed back."""
        return taps[:, :, 0]

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One pass over pairs (token i+1, state i) at RoPE positions i.

        tokens, positions [B, S]; hidden [B, S, H]. Returns the state to feed back and the state that `logits` takes,
        both [B, S, H].
        """
        raise NotImplementedError

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings [B, S, H] of target tokens [B, S]."""
        if self.config.embedding == "own":
            out: Tensor = self.embed_tokens(tokens)
            return out
        return F.embedding(tokens, self._shared_parts().embedding).to(self.dtype)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., Vd] of states [..., H]; gradients flow to `normed`, also through the target's head."""
        out: Tensor = self.lm_head(normed) if self.config.head == "own" else self._shared_parts().head(normed)
        return out

    def _shared_parts(self) -> SharedParts:
        if self._shared is None:
            raise CheckpointError("this drafter shares its target's embedding or head: give it one with borrow(target)")
        return self._shared
