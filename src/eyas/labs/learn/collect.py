"""Collecting: states that rounds compute anyway go to the traffic store, without the engine ever waiting for it.

The engine's thread notes which tensors hold a row's pairs and hands them over in pieces. The collector's own thread
encodes and writes them. Its queue is bounded: a row that would exceed the bound is dropped. A disk that can't be
written to ends collecting. Both are logged once, and neither affects the requests being served.

Shapes: R rows, Q pairs, n pairs of one row, A taps (those of the drafter, then the state after the final norm).
"""

from __future__ import annotations

import hashlib
import logging
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eyas.data.store.layout import EncodedStates, encode_states
from eyas.data.store.manifest import StoredRow
from eyas.data.tokens.batches import learnable
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import EyasError
from eyas.labs.learn.traffic import Split, TrafficRow, TrafficStore, split_of
from eyas.types import Owner

_PAIRS_PER_PIECE = 64
"""Pairs of a row that are handed over together."""
_MAX_WAITING_BYTES = 256 << 20
"""Maximum bytes of states that wait to be encoded."""
_TOGETHER, _SECONDS = 16, 10.0
"""Maximum rows of a client in a shard, and the seconds between flushes of incomplete shards."""
_MIN_ANSWER_TOKENS = 8
"""Minimum answer tokens of a row worth keeping."""

log = logging.getLogger("eyas.serve.learn")


@dataclass(frozen=True)
class LearnRule:
    """Which requests may be learned from. Those that opt out (`X-Eyas-Learn: off`) never are."""

    excluded: frozenset[str] = frozenset()
    """Clients to leave out, under the server's names: digests of API keys."""
    only: frozenset[str] | None = None
    """The only clients that are learned from; None = all."""
    share: float = 1.0
    """The share of their requests to learn from, drawn at random."""

    def allows(self, owner: Owner, draw: float) -> bool:
        """Whether a request of this owner is learned from; `draw` is uniform in [0, 1)."""
        client = owner.client
        if owner.private or client in self.excluded or (self.only is not None and client not in self.only):
            return False
        return draw < self.share


def digest_of(client: str, salt: bytes) -> str:
    """The name of a client on disk."""
    return hashlib.blake2b(client.encode(), digest_size=8, key=salt).hexdigest()


@dataclass
class _BatchPairs:
    """Pairs of one row in tensors of a whole batch."""

    tokens: Tensor  # [R, Q] the tokens that follow
    states: Tensor  # [R, Q, A + 1, Ht]
    row: int
    count: int
    nbytes: int
    """This row's part of the memory kept alive: the whole tensor's bytes, divided among the collected rows."""


@dataclass(eq=False)
class _Sequence:
    """A sequence being collected. The engine's thread sets the fields up to `pairs`, the writer's thread the others."""

    client: str
    prompt: Sequence[int]
    first: int = 0
    """The position of its first pair whose states are known."""
    pieces: list[_BatchPairs] = field(default_factory=list)
    held: int = 0
    pairs: int = 0
    tokens: list[Tensor] = field(default_factory=list)
    taps: list[EncodedStates] = field(default_factory=list)
    finals: list[EncodedStates] = field(default_factory=list)


_Work = tuple[_Sequence, list[_BatchPairs], bool]
"""A sequence, more of its pairs, and whether they are its last."""


class Collector:
    """Records the rows that the rule allows. `close` writes the complete ones."""

    def __init__(
        self,
        store: TrafficStore,
        rule: LearnRule,
        end_ids: Collection[int],
        *,
        longest: int = 4096,
        salt: bytes = b"",
        seed: int | None = None,
        apart: Mapping[str, TrafficStore] | None = None,
    ) -> None:
        """`end_ids`: tokens that end an answer. Rows have at most `longest` tokens; `salt`: for digests.

        `apart`: digest of a client whose rows go elsewhere -> their store.
        """
        self._apart = apart or {}
        self._store = store
        self._rule = rule
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._longest = longest
        self._salt = salt
        self._random = random.Random(seed)
        self._open: dict[int, _Sequence] = {}  # by slot
        self._queue: queue.SimpleQueue[_Work | threading.Event | None] = queue.SimpleQueue()
        self._waiting = 0
        self._waiting_lock = threading.Lock()
        self._pending: dict[tuple[str, Split], list[TrafficRow]] = defaultdict(list)
        self._flushed = time.monotonic()
        self.counts: Counter[str] = Counter()
        """`rows` and `tokens` written, rows `dropped` because the queue was full."""
        self.stopped: str | None = None
        """Why collecting has stopped; None = it hasn't."""
        self._thread = threading.Thread(target=self._run, name="learn-writer", daemon=True)
        self._thread.start()

    def begin(self, slot: int, prompt: Sequence[int], owner: Owner) -> None:
        self._open.pop(slot, None)
        if self.stopped is None and self._rule.allows(owner, self._random.random()):
            self._open[slot] = _Sequence(digest_of(owner.client, self._salt), prompt)

    def skip(self, slot: int, count: int) -> None:
        if slot in self._open:
            self._open[slot].first += count

    def pairs(self, rows: range, next_tokens: Tensor, states: Tensor, counts: Sequence[int]) -> None:
        taken = [(row, one) for row, slot in enumerate(rows) if counts[row] and (one := self._open.get(slot))]
        for row, one in taken:
            one.pieces.append(_BatchPairs(next_tokens, states, row, counts[row], states.nbytes // len(taken)))
            one.held += counts[row]
            one.pairs += counts[row]
            if one.held >= _PAIRS_PER_PIECE and not self._hand_over(one, last=False):
                del self._open[rows[row]]

    def finish(self, slot: int) -> None:
        one = self._open.pop(slot, None)
        if one is not None:
            self._hand_over(one, last=True)

    def drop(self, slot: int) -> None:
        self._open.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        self._open.pop(target, None)
        if (one := self._open.pop(source, None)) is not None:
            self._open[target] = one

    def flush(self, seconds: float = 60.0) -> None:
        """Write all rows that are complete by now, waiting at most `seconds` for that."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Write the rows that are complete and end the thread, waiting at most `seconds` for that."""
        self._open.clear()
        self._queue.put(None)
        self._thread.join(seconds)

    def _hand_over(self, one: _Sequence, *, last: bool) -> bool:
        """Queue the pairs that a row has gathered; False if the queue is full, or the row is long enough."""
        size = sum(piece.nbytes for piece in one.pieces)
        with self._waiting_lock:
            full = self._waiting + size > _MAX_WAITING_BYTES
            self._waiting += 0 if full else size
        if full:
            if not self.counts["dropped"]:
                log.warning("learning: the disk is slower than the traffic; rows are left out (counted in the metrics)")
            self.counts["dropped"] += 1
            return False
        pieces = one.pieces
        one.pieces = []
        one.held = 0
        self._queue.put((one, pieces, last or one.pairs >= self._longest))
        return one.pairs < self._longest

    # The writer's thread

    @torch.inference_mode()
    def _run(self) -> None:
        ended = False
        while not ended:
            work = None
            with suppress(queue.Empty):
                work = self._queue.get(timeout=_SECONDS)
                ended = work is None
            try:
                if isinstance(work, tuple):
                    self._take(*work)
                if ended or isinstance(work, threading.Event) or time.monotonic() - self._flushed > _SECONDS:
                    self._flush()
            except Exception as error:  # noqa: BLE001  # whatever it is, serving must not be affected
                self._stop(error)
            if isinstance(work, threading.Event):
                work.set()

    def _stop(self, error: Exception) -> None:
        why = str(error) if isinstance(error, EyasError) else f"{type(error).__name__}: {error}"
        if self.stopped is None:
            self.stopped = why
            log.warning("learning: nothing is collected until the server is restarted: %s", why)
        self._pending.clear()

    def _take(self, one: _Sequence, pieces: list[_BatchPairs], last: bool) -> None:
        with self._waiting_lock:
            self._waiting -= sum(piece.nbytes for piece in pieces)
        if self.stopped is not None:
            return
        layout = self._store.layout
        if pieces:
            states = torch.cat([piece.states[piece.row, : piece.count] for piece in pieces]).cpu()  # [n, A (+ 1), Ht]
            one.tokens += [piece.tokens[piece.row, : piece.count].cpu() for piece in pieces]
            one.taps.append(encode_states(states[:, : len(layout.taps)].contiguous(), layout.states))
            one.finals.append(encode_states(states[:, -1].contiguous(), layout.states))
        if last and (row := self._row(one)) is not None:
            key = one.client, split_of(row.tokens)
            self._pending[key].append(row)
            if len(self._pending[key]) >= _TOGETHER:
                self._write(*key, self._pending.pop(key))

    def _row(self, one: _Sequence) -> TrafficRow | None:
        """A complete sequence as a row from its first pair on; None if there is too little to learn from.

        The row leaves out the last emitted token, which has no state, and all that the last round accepted beyond the
        answer's end.
        """
        if not one.tokens or one.first >= len(one.prompt):
            return None
        tokens = np.array([one.prompt[one.first], *torch.cat(one.tokens).tolist()][:-1], dtype=np.int64)
        answer = len(one.prompt) - one.first
        found = np.flatnonzero(np.isin(tokens[answer:], self._end_ids))
        tokens = tokens[: min(self._longest, answer + int(found[0]) + 1 if len(found) else len(tokens))]
        mask = np.arange(len(tokens)) >= answer
        row = TokenRow(tokens, mask)
        if mask.sum() < _MIN_ANSWER_TOKENS or not learnable(row):
            return None
        taps = _joined(one.taps)
        finals = _joined(one.finals)
        whole = self._store.layout.final == "all"
        taught = slice(0, len(tokens)) if whole else slice(max(answer - 1, 0), len(tokens) - 1)
        stored = torch.from_numpy(tokens).to(torch.int32)
        kept = taps.part(slice(0, len(tokens))) if self._store.layout.taps else None
        return TrafficRow(row, StoredRow(stored, kept, finals.part(taught), None))

    def _flush(self) -> None:
        """Write the rows that wait for more of the same client."""
        pending = dict(self._pending)
        self._pending = defaultdict(list)
        self._flushed = time.monotonic()
        for (client, split), rows in pending.items():
            self._write(client, split, rows)

    def _write(self, client: str, split: Split, rows: list[TrafficRow]) -> None:
        self._apart.get(client, self._store).write(client, split, rows)
        self.counts["rows"] += len(rows)
        self.counts["tokens"] += sum(len(row.tokens.tokens) for row in rows)


def _joined(parts: Sequence[EncodedStates]) -> EncodedStates:
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
    exponents = [part.exponents for part in parts if part.exponents is not None]
    return EncodedStates(values, torch.cat(exponents) if exponents else None)
