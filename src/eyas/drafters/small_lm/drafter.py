"""The drafter of standard speculative sampling (arXiv 2211.17192, 2302.01318): a smaller language model.

It is a `Target` itself, with native passes and ragged rows. A slot's tokens, observed or deferred, are read before its
next draft; the model's slot cache keeps what was read. If its vocabulary differs from the target's, the model reads the
same text, token by token, in its own vocabulary (`SharedVocabulary`).

Shapes: R rows (a contiguous range of slots), W frontier nodes, F guesses staged so far, K children offered by each, V
the model's vocabulary, Vd the tokens among them that can be drafted.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eyas.assets import PROMPTS
from eyas.drafters.decoding import best_children
from eyas.drafters.files import CONFIG, read_headers, read_json
from eyas.drafters.history import History, HistoryDrafter, TokenPairs
from eyas.drafters.registry import UNKNOWN, kind_name
from eyas.errors import DrafterMismatchError, UnsupportedModelError, UsageError
from eyas.hub import find_adapter
from eyas.runtime import inference
from eyas.targets import load_target, load_tokenizer
from eyas.targets.native.decoder import Staged
from eyas.targets.native.levels import Choices, Roots, beam_search
from eyas.targets.parameters import parameter_count
from eyas.targets.slots import Saved, SlotCache, StagedCache
from eyas.targets.target import Target
from eyas.targets.transformers_names import model_cache_kwargs
from eyas.tree import DraftTree, Frontier, TreeSpec
from eyas.tree.draft_tree import BeamLevels
from eyas.types import NO_OWNER, Owner
from eyas.verify import Coupling

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""SentencePiece's character for a space."""


class SharedVocabulary:
    """The tokens shared by the vocabularies of a target and of a draft model with another tokenizer.

    Tokens are shared if they stand for the same bytes, however their tokenizers write them (`Ġthe`, `▁the`); special
    tokens if they have the same name, or are both the bos or eos token. Only shared tokens can be drafted. The model
    reads the target's tokens one by one: a shared token as its own one, other tokens by encoding their text. It skips
    special tokens that it lacks. So the text is the target's, but may be split differently than by its own tokenizer.
    """

    def __init__(self, target: Any, own: Any, target_size: int, own_size: int, device: torch.device) -> None:
        """From the tokenizers of a `target` and of a draft model, whose heads have the given sizes."""
        self._target = target
        self._own = own
        theirs, ours = (token_bytes(tokenizer) for tokenizer in (target, own))
        own_of = {content: token for token, content in reversed(ours.items()) if token < own_size}
        self._shared = {
            token: own_of[content]
            for token, content in sorted(theirs.items())
            if token < target_size and content in own_of
        }
        for mark in ("bos_token_id", "eos_token_id"):
            token = getattr(target, mark)
            mine = getattr(own, mark)
            if token is not None and mine is not None and token < target_size and mine < own_size:
                self._shared.setdefault(token, mine)
        self.target_ids: Tensor = torch.tensor(list(self._shared), dtype=torch.int64, device=device)
        """[Vd] the target's ids of the shared tokens."""
        self.draft_ids: Tensor = torch.tensor(list(self._shared.values()), dtype=torch.int64, device=device)
        """[Vd] the draft model's ids of the same tokens."""
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
        """The share of the draft model's tokens that can be drafted."""
        return len(set(self._shared.values())) / max(1, self._sizes[0])

    def share_of(self, texts: Iterable[str]) -> float:
        """The share of the target's tokens in `texts` that can be drafted."""
        tokens = [token for text in texts for token in self._target.encode(text, add_special_tokens=False)]
        return sum(token in self._shared for token in tokens) / max(1, len(tokens))


def token_bytes(tokenizer: Any) -> dict[int, bytes | str]:
    """The bytes that each token stands for, or the names of special tokens."""
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
        elif token in added:  # added tokens are plain text
            found[token] = name.encode()
        elif by_bytes and all(character in alphabet for character in name):
            found[token] = bytes(alphabet[character] for character in name)
        elif single is not None:
            found[token] = bytes([int(single[1], 16)])
        else:
            found[token] = name.replace(_SPACE, " ").encode()
    return found


_MAX_JOINT_TOKENS = 64
"""A row with more unread tokens than this, such as a prompt, is read alone, so as not to widen the others' pass."""


class SavedReading(NamedTuple):
    """The tokens of pairs that were copied out of a slot, and the columns of those that the model has read."""

    tokens: list[int]
    read: int
    """How many of the first pairs have columns, which belong to the token before each pair's own."""
    columns: Saved

    @property
    def unread(self) -> int:
        """How many of the last pairs have no columns."""
        return len(self.tokens) - self.read


class Guesses(NamedTuple):
    """A draft's guesses in staging columns, kept because those that turn out right needn't be read again."""

    rows: range
    lengths: list[int]
    """[R] the length of the text that each row's guesses follow; -1 = the row didn't draft."""
    tokens: list[list[int]]  # [R][F] of the model's own vocabulary
    parents: list[list[int]]  # [R][F] the column of the guess that each follows, -1 = none

    def path(self, row: int, text: Sequence[int]) -> list[int]:
        """The columns of the guesses that are the beginning of `text`."""
        found = list[int]()
        above = -1
        columns = {key: at for at, key in enumerate(zip(self.parents[row], self.tokens[row], strict=True))}
        for token in text:
            at = columns.get((above, token))
            if at is None:
                break
            found.append(above := at)
        return found


class _Text(History):
    """A sequence as the model reads it: in the target's tokens, or in its own vocabulary."""

    def __init__(self, shared: SharedVocabulary | None, prompt: Sequence[int] = (), owner: Owner = NO_OWNER) -> None:
        super().__init__(prompt, owner)
        self._shared = shared
        self.text: list[int] = []
        self._stops: list[int] = []
        """For each token, the length of the text up to its end."""

    def cut(self) -> None:
        length = self.end(len(self.tokens))
        del self._stops[len(self.tokens) :], self.text[length:]

    def end(self, tokens: int) -> int:
        """The length of the text of the first `tokens` tokens, as far as it is written."""
        count = min(tokens, len(self._stops))
        return self._stops[count - 1] if count else 0

    def tokens_in(self, length: int) -> int:
        """How many tokens lie within the first `length` of the text."""
        return bisect_right(self._stops, length)

    def write(self) -> None:
        """Extend the text up to the last token."""
        for token in self.tokens[len(self._stops) :]:
            self.text += (token,) if self._shared is None else self._shared.read(token)
            self._stops.append(len(self.text))


class SmallLmPairs(TokenPairs[_Text]):
    """Each slot's text, and the part of it that the model has read."""

    def __init__(self, model: Target, shared: SharedVocabulary | None) -> None:
        self._model = model
        super().__init__(partial(_Text, shared))

    def resize(self, slots: int) -> None:
        super().resize(slots)
        self.cache = self._model.allocate(slots)
        self.guesses: Guesses | None = None
        """The guesses of the last draft, until it is known which are right."""

    def reshape(self, slots: int, columns: int) -> None:
        super().reshape(slots, columns)
        self.cache.reshape(slots, columns)

    def begin(self, slot: int, prompt: Sequence[int], owner: Owner, prediction: Sequence[int] = ()) -> None:
        super().begin(slot, prompt, owner, prediction)
        self.cache.truncate(slot, 0)
        self.guesses = None

    @inference
    def append(self, rows: range, next_tokens: Tensor, counts: Sequence[int]) -> None:
        super().append(rows, next_tokens, counts)
        guesses = self.guesses
        self.guesses = None
        if guesses is None or guesses.rows != rows:
            return
        paths = list[list[int]]()
        for row, slot in enumerate(rows):
            read = self.cache.length(slot)
            if guesses.lengths[row] != read:
                paths.append([])
                continue
            self[slot].write()
            # the last token is left unread: what follows it must be computed
            paths.append(guesses.path(row, self[slot].text[read:-1]))
        self.cache.commit(rows, paths)

    def unread(self, slot: int) -> int:
        return max(0, self.length(slot) - self._read(slot))

    def save(self, slot: int, start: int, stop: int) -> SavedReading:
        own = self[slot]
        between = min(max(self._read(slot), start), stop)
        columns = self.cache.copy_out(slot, own.end(start), own.end(between))
        return SavedReading(own.tokens[start + 1 : stop + 1], between - start, columns)

    def load(self, slot: int, saved: SavedReading, count: int) -> None:
        own = self[slot]
        start = self.length(slot)
        read = min(count, saved.read)
        super().load(slot, saved, count)
        if read:
            own.write()
            if self._read(slot) < start:
                raise UsageError("pairs that were read can't follow unread ones")
            first = own.end(start)
            self.cache.truncate(slot, first)
            self.cache.copy_in(slot, saved.columns, own.end(start + read) - first)

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self.cache.truncate(slot, len(self[slot].text))

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.cache.move(source, target)

    def _read(self, slot: int) -> int:
        """How many of a slot's tokens the model has read."""
        return self[slot].tokens_in(self.cache.length(slot))


class SmallLmDrafter(HistoryDrafter):
    """A language model that drafts for a larger one."""

    draws = True
    default_tree = "auto"  # each of its levels takes a good part of a target pass
    pairs: SmallLmPairs

    def __init__(self, model: Target, shared: SharedVocabulary | None = None) -> None:
        """Draft with `model`; `shared` maps its vocabulary, None if it has the target's own."""
        self.model, self.shared, self.module = model, shared, model.model
        self._choices = (
            Choices(torch.arange(model.vocab_size, device=model.device))
            if shared is None
            else Choices(shared.target_ids, shared.draft_ids)
        )
        self.max_fanout = len(self._choices.ids)
        super().__init__(SmallLmPairs(model, shared), model.device)

    @inference
    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        wanted = [True] * len(rows) if drafting is None else drafting
        grown = [want and self._can_read(slot) for want, slot in zip(wanted, rows, strict=True)]
        if not any(grown):
            return DraftTree.empty(len(rows), self._device)
        final = self._read(rows, grown)
        lengths = [length if grows else -1 for length, grows in zip(self._lengths(rows), grown, strict=True)]
        among = None if all(grown) else grown
        native = self.model.native
        if native is not None and self.model.head_is_linear:
            search = spec.search(len(rows), among)
            warp = coupling.warp()
            if search is not None and warp is not None:
                found = beam_search(native, self.pairs.cache, rows, search, Roots(final), self._choices, warp)
                self.pairs.guesses = Guesses(rows, lengths, *self._searched(found))
                return search.finish(found)
        growth = spec.start(len(rows), self._device, among)
        levels = StagedLevels(self.model, self.pairs.cache, rows)
        logits = self.model.head(final).unsqueeze(1)
        for level in range(spec.depth):
            if self.shared is not None:
                logits = logits.index_select(2, self.shared.draft_ids)
            best = best_children(logits, growth.fanout, coupling, level, self._choices.ids, native is not None)
            frontier = growth.expand(*best)
            if frontier is None:
                break
            own = frontier.tokens if self.shared is None else self.shared.own_ids[frontier.tokens]
            logits = levels.add(Frontier(own, frontier.parents))
        self.pairs.guesses = Guesses(rows, lengths, levels.tokens.tolist(), levels.parents.tolist())
        return growth.tree()

    def _searched(self, searched: BeamLevels) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens and parents of the guesses [R][F] that a beam search has run, as in `Guesses`."""
        rows, levels, width = searched.beams.shape
        level = np.arange(levels)[:, None]
        starts = np.cumsum([0, *searched.sizes])[:levels, None]  # of the levels' candidates
        tokens = np.take_along_axis(searched.tokens, (searched.beams + starts).reshape(rows, -1), axis=1)
        parents = np.where(level > 0, searched.beams // width + (level - 1) * width, -1).reshape(rows, -1)
        if self.shared is not None:
            tokens = self.shared.own_ids[torch.from_numpy(tokens)].numpy()
        return tokens.tolist(), parents.tolist()

    def _lengths(self, rows: range) -> list[int]:
        return self.pairs.cache.lengths[rows.start : rows.stop]

    @inference
    def catch_up(self, rows: range, wanted: Sequence[bool], max_pairs: int | None = None) -> None:
        """Read long unread texts of the `wanted` rows; short ones are read in the pass that begins their next draft."""
        for slot, want in zip(rows, wanted, strict=True):
            if want and self._can_read(slot):
                unread = self.pairs[slot].text[self.pairs.cache.length(slot) :]
                if len(unread) > _MAX_JOINT_TOKENS:
                    self._prefill(slot, unread[: None if max_pairs is None else max_pairs + 1])

    def _prefill(self, slot: int, text: Sequence[int]) -> None:
        """Read all of a slot's next `text` but its last token."""
        for _ in self.model.prefill(self.pairs.cache, range(slot, slot + 1), [text], ()):
            pass

    def _can_read(self, slot: int) -> bool:
        """Whether a slot has text, and it fits the model's context."""
        history = self.pairs[slot]
        longest = self.model.max_length
        history.write()
        return bool(history.text) and (longest is None or len(history.text) < longest)

    def _read(self, rows: range, wanted: Sequence[bool]) -> Tensor:
        """Read all unread text of the `wanted` rows [R]; returns the last token's final states [R, H]."""
        cache = self.pairs.cache
        unread = list[list[int]]()
        for slot, want in zip(rows, wanted, strict=True):
            if not want:
                unread.append([])
                continue
            text = self.pairs[slot].text
            cache.truncate(slot, len(text) - 1)  # the last token's logits are needed
            rest = text[cache.length(slot) :]
            if len(rest) > _MAX_JOINT_TOKENS:
                self._prefill(slot, rest)
                rest = rest[-1:]
            unread.append(rest)
        # a chunk ends with the token after it, which isn't read: here it is unknown, so 0 stands in
        chunk = self.model.prefill_chunk(cache, rows, [[*rest, 0] for rest in unread], ())
        last = torch.tensor([max(0, len(rest) - 1) for rest in unread], device=self._device)
        steps = torch.arange(len(rows), device=self._device)
        return chunk.final[steps, last]


_LOG = logging.getLogger("eyas")


def holds_language_model(path: Path) -> bool:
    """Whether a folder holds a transformers model and no drafter, by its config and tensor names; or an adapter."""
    if not (path / CONFIG).is_file():
        return find_adapter(path) is not None
    config = read_json(path / CONFIG)
    known = config.get("model_type") in CONFIG_MAPPING
    return known and kind_name(config, read_headers(path).tensors) == UNKNOWN


def load_small_lm(
    source: str | Path, target: Target, tokenizer: Any = None, quantize: str | None = None
) -> SmallLmDrafter:
    """Load a language model that drafts for `target`, on its device, with `load_target`'s dtype `auto`.

    `tokenizer` is the target's: with it the model may have another vocabulary. `quantize` `int8` or `int4` as in
    `load_target`; `off` keeps the weights as they are stored, and None reads packed ones in 4 bits. Raises ModelError,
    UnsupportedModelError for models that eyas can't draft with, DrafterMismatchError for vocabularies that can't be
    mapped.
    """
    model = load_target(
        source,
        dtype="auto",
        device=target.device,
        eager=target.device.type == "cuda" and target.record is None,
        quantize=None if quantize == "off" else quantize,
        drafts=quantize is None,
    )
    if not model.head_is_exact:
        raise UnsupportedModelError(
            f"the draft model {source} ({model.config.model_type}) changes its logits in a way that eyas doesn't know: "
            "choose another"
        )
    if model.states:
        raise UnsupportedModelError(
            f"the draft model {source} ({model.config.model_type}) has recurrent states, which a draft would change: "
            "choose one whose layers are all attention"
        )
    size = parameter_count(model.model)
    targets_size = parameter_count(target.model)
    if size >= targets_size:
        _LOG.warning(
            "the draft model %s has %d parameters, the target %d: drafting costs as much as decoding, so use a "
            "model a tenth as large or smaller",
            source,
            size,
            targets_size,
        )
    if model.max_length is not None and (target.max_length is None or model.max_length < target.max_length):
        _LOG.warning("the draft model %s drafts up to its context of %d tokens only", source, model.max_length)
    return SmallLmDrafter(model, _shared_vocabulary(source, model, target, tokenizer))


def _shared_vocabulary(source: str | Path, model: Target, target: Target, tokenizer: Any) -> SharedVocabulary | None:
    """The mapping between the vocabularies; None if they are the same."""
    own = None if tokenizer is None else load_tokenizer(source)
    same_size = model.vocab_size == target.vocab_size
    if own is None or (same_size and own.get_vocab() == tokenizer.get_vocab()):
        if same_size:
            return None
        raise DrafterMismatchError(
            f"the draft model {source} has a vocabulary of {model.vocab_size} tokens, the target one of "
            f"{target.vocab_size}: to map one to the other both need their tokenizers, and "
            f"{'the target' if tokenizer is None else 'the draft model'} has none"
        )
    shared = SharedVocabulary(tokenizer, own, target.vocab_size, model.vocab_size, target.device)
    if not len(shared.target_ids):
        raise DrafterMismatchError(f"the draft model {source} has no token in common with the target: choose another")
    if own.get_vocab() != tokenizer.get_vocab():
        _LOG.warning(
            "the draft model %s has another vocabulary than the target: %.1f%% of its tokens can be drafted, which "
            "make up %.1f%% of a sample of English and code",
            source,
            100 * shared.share,
            100 * shared.share_of(text for _, text in PROMPTS),
        )
    return shared


class StagedLevels:
    """The levels of one draft, each run by one pass of the model after the levels above it; nothing is committed.

    A guess sees its row's committed tokens, the guesses above it, and itself. Guesses lie in staging columns, which the
    next pass over these rows overwrites.
    """

    def __init__(self, target: Target, cache: SlotCache, rows: range) -> None:
        """For drafts below the last committed token of the slots `rows`."""
        self._target = target
        self._cache = cache
        self._rows = rows
        self._start = cache.start(rows)
        self._above = -1  # the staged column of the first node of the level above
        none = torch.empty(len(rows), 0, dtype=torch.int64, device=target.device)
        self.tokens = none
        """[R, F] the guesses."""
        self.parents = none
        """[R, F] the staged column that each guess follows, -1 = none."""
        self._positions = none  # [R, F], where modules are run
        self._seen = torch.empty(
            len(rows), 1, 0, dtype=torch.bool, device=target.device
        )  # [R, W, F] of the level above

    @inference
    def add(self, frontier: Frontier) -> Tensor:
        """Run the next level's nodes; returns the logits [R, W, V] of what follows them."""
        first, width = self.parents.shape[1], frontier.tokens.shape[1]
        self.tokens = torch.cat((self.tokens, frontier.tokens), dim=1)
        self.parents = torch.cat((self.parents, frontier.parents + self._above), dim=1)
        self._cache.reserve(self._start + first + width, first)
        logits = self._native(frontier, first) if self._target.native is not None else self._modules(frontier, first)
        self._above = first
        return logits

    def _native(self, frontier: Frontier, first: int) -> Tensor:
        target, tokens = self._target, frontier.tokens
        assert target.native is not None
        lengths = self._cache.lengths[self._rows.start : self._rows.stop]
        where = Staged(self._rows, tokens.shape[1], None, lengths, self.parents, first)
        done = target.native.run(self._cache, where, tokens, logits=True)
        out: Tensor = target.finish(done.logits)
        return out.view(*tokens.shape, -1)

    def _modules(self, frontier: Frontier, first: int) -> Tensor:
        target, tokens = self._target, frontier.tokens
        width = tokens.shape[1]
        lengths = self._cache.device_lengths(self._rows)
        itself = torch.eye(width, dtype=torch.bool, device=target.device).expand(len(tokens), -1, -1)
        parents = frontier.parents.unsqueeze(2).expand(-1, -1, first)
        self._seen = torch.cat((self._seen.gather(1, parents), itself), dim=2)
        above = self._positions[:, -1:] if first else lengths.unsqueeze(1) - 1
        positions = (above + 1).expand(-1, width)
        if target.max_length is not None:  # guesses beyond the context are useless, but some models index by position
            positions = positions.clamp(max=target.max_length - 1)
        self._positions = torch.cat((self._positions, positions), dim=1)

        def compute(
            rows: range,
            end: int | None,
            lengths: Tensor,
            tokens: Tensor,
            seen: Tensor,
            positions: Tensor,
            staged: Tensor,
        ) -> tuple[Tensor]:
            start = self._start if end is None else end - seen.shape[2]
            staging = self._cache.staging(rows, width, first, lengths, end)
            out: Tensor = target.model(
                input_ids=tokens,
                attention_mask=target.masks(lengths, start, seen, positions, staged),
                position_ids=positions,
                **model_cache_kwargs(target.model, StagedCache(self._cache, staging)),
            )[0]
            return (out,)

        inputs = (tokens, self._seen, positions, self._positions)
        done = None
        if self._cache.graphs is not None:
            done = self._cache.graphs.run("level", self._cache, self._rows, first + width, inputs, compute)
        return (done or compute(self._rows, None, lengths, *inputs))[0]
