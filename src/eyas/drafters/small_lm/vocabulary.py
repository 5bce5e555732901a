"""What two vocabularies have in common: token-level intersection, for a draft model with another tokenizer.

Tokens are the same if they stand for the same bytes, however their tokenizers write them (`Ġthe`, `▁the`), special
ones if they have the same name or begin and end texts. Only those can be drafted. What the model reads is the target's
tokens one by one: a shared one as its own, any other by encoding the text that it stands for, and special ones that it
doesn't have not at all. The text is thus the target's, though not always split as the model's tokenizer would split it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""How SentencePiece writes a space."""


class SharedVocabulary:
    """The tokens that the vocabularies of a target and of a draft model share."""

    def __init__(self, target: Any, own: Any, target_size: int, own_size: int, device: torch.device) -> None:
        """From the tokenizers of a `target` and of a draft model, whose heads have so many outputs."""
        self._target, self._own = target, own
        theirs, ours = (token_bytes(tokenizer) for tokenizer in (target, own))
        own_of = {content: token for token, content in reversed(ours.items()) if token < own_size}
        self._shared = {
            token: own_of[content]
            for token, content in sorted(theirs.items())
            if token < target_size and content in own_of
        }
        for mark in ("bos_token_id", "eos_token_id"):
            token, mine = getattr(target, mark), getattr(own, mark)
            if token is not None and mine is not None and token < target_size and mine < own_size:
                self._shared.setdefault(token, mine)
        self.target_ids: Tensor = torch.tensor(list(self._shared), dtype=torch.int64, device=device)
        """[Vd] the target's ids of the shared tokens."""
        self.draft_ids: Tensor = torch.tensor(list(self._shared.values()), dtype=torch.int64, device=device)
        """[Vd] the draft model's ids of them."""
        self.own_ids: Tensor = torch.zeros(target_size, dtype=torch.int64, device=device)
        """[V of the target] the draft model's id of each token; 0 for those that aren't shared."""
        self.own_ids[self.target_ids] = self.draft_ids
        self._sizes = sum(token < own_size for token in ours), own_size
        self.read = cache(self._read)
        """The draft model's tokens for one of the target's."""

    def _read(self, token: int) -> tuple[int, ...]:
        shared = self._shared.get(token)
        if shared is not None:
            return (shared,)
        text = self._target.decode([token], skip_special_tokens=True)
        return tuple(own for own in self._own.encode(text, add_special_tokens=False) if own < self._sizes[1])

    @property
    def share(self) -> float:
        """Share of the draft model's tokens that can be drafted."""
        return len(set(self._shared.values())) / max(1, self._sizes[0])

    def share_of(self, texts: Iterable[str]) -> float:
        """Share of the target's tokens of some texts that can be drafted."""
        tokens = [token for text in texts for token in self._target.encode(text, add_special_tokens=False)]
        return sum(token in self._shared for token in tokens) / max(1, len(tokens))


def token_bytes(tokenizer: Any) -> dict[int, bytes | str]:
    """What each token stands for: bytes, or for special tokens their names."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    by_bytes = backend is not None and '"ByteLevel"' in backend.to_str()
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    special = set(tokenizer.all_special_ids)
    added = set(tokenizer.get_added_vocab().values())
    found: dict[int, bytes | str] = {}
    for name, token in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        single = _BYTE.fullmatch(name)
        if token in special:
            found[token] = name
        elif token in added:  # written as they are
            found[token] = name.encode()
        elif by_bytes and all(character in alphabet for character in name):
            found[token] = bytes(alphabet[character] for character in name)
        elif single is not None:
            found[token] = bytes([int(single[1], 16)])
        else:
            found[token] = name.replace(_SPACE, " ").encode()
    return found
