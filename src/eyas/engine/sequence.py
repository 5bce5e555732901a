"""A request in the engine: what it has emitted, how much of it is cached, and when it is finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eyas.engine.fair_share import client_of
from eyas.errors import RequestError
from eyas.targets import Target
from eyas.targets.tokenizers import eos_token_ids, turn_end_ids
from eyas.types import Completion, Owner, PromptLogprobs, Request, Stats, TokenLogprobs
from eyas.verify import Grammar, WalkRule, check_request, grammar_of

if TYPE_CHECKING:
    from eyas.engine.round import RoundOutput


@dataclass(eq=False)
class SequenceState:
    """A request that waits or runs. The scheduler sets `slot`; `cached` grows with every pass."""

    index: int
    """Its number, in order of arrival."""
    request: Request
    limit: int
    """Maximum number of tokens it may emit."""
    stop_ids: frozenset[int] = frozenset()
    key: str = ""
    """The queue key, `CLIENT` or `CLIENT/USER`: clients share the slots fairly, and users what their client gets."""
    expires: float | None = None
    """When its deadline passes, in `time.monotonic` seconds."""
    grammar: Grammar | None = None
    """The grammar that its answer follows; None = any text."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The log-probabilities of its tokens, if requested."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """The log-probabilities of the prompt tokens read so far, except the first, if requested."""
    error: str | None = None
    """Why it failed, if its grammar is the cause and not the engine."""
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    slot: int | None = None
    """None = it waits, or has ended."""
    cached: int = 0
    """How many of its tokens its slot holds."""
    observed: bool = False
    """Whether the drafter observes it, decided when it gets a slot; if not, it is decoded plainly."""
    arrived: float = field(default_factory=time.monotonic)

    @property
    def client(self) -> str:
        """The client of its queue key."""
        return client_of(self.key)

    @property
    def owner(self) -> Owner:
        """Whose text it is."""
        return Owner(self.key, self.request.private)

    @property
    def root(self) -> int:
        """Its last token: the root of the next draft tree, not yet in the target's cache."""
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]

    @property
    def known(self) -> int:
        """The tokens that must be cached before it can decode: all but the root."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def unread(self) -> int:
        """The number of tokens left to prefill."""
        return max(0, self.known - self.cached)

    @property
    def unscored(self) -> int:
        """The number of prompt tokens whose log-probabilities are requested and not known yet."""
        wanted = self.request.params.prompt_logprobs is not None
        return len(self.request.prompt) - 1 - len(self.prompt_logprobs) if wanted else 0

    @property
    def longest(self) -> int:
        """Maximum number of tokens it can have, prompt and answer."""
        return len(self.request.prompt) + self.limit

    def admitted(self, now: float) -> None:
        """Record that it has its first slot, and how many of its tokens were cached already."""
        self.stats.reused_tokens = self.cached
        self.stats.queue_seconds = max(0.0, now - self.arrived)

    def window(self, start: int, stop: int) -> list[int]:
        """Its tokens `[start, stop)`, prompt and answer."""
        size = len(self.request.prompt)
        return [*self.request.prompt[start:stop], *self.tokens[max(0, start - size) : max(0, stop - size)]]

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Take a round's tokens up to the first stop token or the limit; returns those taken."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) + len(taken) >= self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        self.tokens.extend(taken)
        return taken

    def take(
        self, output: RoundOutput, row: int, seconds: float | None
    ) -> tuple[list[int], tuple[TokenLogprobs, ...] | None]:
        """Take a round's output for this sequence, in `row`; returns the tokens taken and their log-probabilities.

        `seconds` is what the round took; None if it came with prefill, whose time is counted already.
        """
        self.cached += output.accepted[row] + 1
        taken = self.extend(output.tokens[row])
        self.stats.tokens += len(taken)
        if seconds is None:
            self.stats.prefill_tokens += len(taken)
        else:
            self.stats.record(output.accepted[row], output.offered[row], output.contexts[row])
            if output.offered[row]:
                self.stats.steps.append((output.offered[row], output.accepted[row]))
            self.stats.decode_seconds += seconds
            self.stats.draft_seconds += output.observe_seconds
            if output.draft is not None:
                self.stats.draft_seconds += output.draft_seconds
                if self.request.prediction:
                    accepted, rejected = output.draft.copied_from_prediction(row)
                    self.stats.predicted_accepted += accepted
                    self.stats.predicted_rejected += rejected
        logprobs = output.logprobs.get(row)
        logprobs = None if logprobs is None else logprobs[: len(taken)]
        self.logprobs += logprobs or ()
        if row in output.failed and self.finish_reason is None:
            self.finish_reason = "error"
            self.error = f"{RequestError.__name__}: {output.failed[row]}"
        return taken, logprobs

    @property
    def known_prompt_logprobs(self) -> tuple[PromptLogprobs, ...] | None:
        """The log-probabilities of the whole prompt; None if they aren't requested, or not all known yet."""
        wanted = self.request.params.prompt_logprobs is not None and not self.unscored
        return tuple(self.prompt_logprobs) if wanted else None

    def completion(self, tokenizer: Any, rule: WalkRule, error: Exception | None = None) -> Completion:
        """The finished sequence's completion. `rule` decoded it; `error`, if any, ended it."""
        return Completion(
            id=self.request.id,
            token_ids=self.tokens,
            text=tokenizer.decode(self.tokens, skip_special_tokens=True) if tokenizer else "",
            finish_reason=self.finish_reason or "length",
            stats=self.stats,
            lossy=not rule.lossless,
            seeded=rule.seeded,
            error=self.error if error is None else f"{type(error).__name__}: {error}",
            logprobs=None if self.request.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self.known_prompt_logprobs,
        )


def slots_of(neighbors: Sequence[SequenceState]) -> range:
    """The slots of sequences that are next to each other."""
    first = neighbors[0].slot
    assert first is not None
    return range(first, first + len(neighbors))


class PrefillBatch:
    """Sequences in neighboring slots that prefill in the same passes, `counts` tokens of each.

    Sums are updated as it grows, because adding them up again for each of hundreds of prompts takes long.
    """

    def __init__(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> None:
        self.sequences: list[SequenceState] = []
        self.counts: list[int] = []
        self.tokens = 0
        """Tokens to read, of all rows."""
        self.most = 0
        """The most tokens to read of a row."""
        self.cached = 0
        """Cached tokens of all rows."""
        self.longest = 0
        """The most cached tokens of a row."""
        self.whole = True
        """Whether all its sequences can decode afterwards."""
        for sequence, count in zip(sequences, counts, strict=True):
            self.add(sequence, count)

    def add(self, sequence: SequenceState, count: int) -> None:
        """Read `count` tokens of one more sequence, too."""
        self.sequences.append(sequence)
        self.counts.append(count)
        self.tokens += count
        self.most = max(self.most, count)
        self.cached += sequence.cached
        self.longest = max(self.longest, sequence.cached)
        self.whole = self.whole and count == sequence.unread

    @property
    def rows(self) -> range:
        """The range of their slots."""
        return slots_of(self.sequences)

    @property
    def columns(self) -> list[int]:
        """The cache columns that each row takes, its root included: all rows stage equally many."""
        return [one.cached + self.most + 1 for one in self.sequences]

    def windows(self) -> list[list[int]]:
        """The tokens that each sequence reads, and the one after them."""
        spans = zip(self.sequences, self.counts, strict=True)
        return [one.window(one.cached, one.cached + count + 1) for one, count in spans]

    def before_last(self, max_tokens: int) -> PrefillBatch:
        """What to read first, so that a pass of at most `max_tokens` per row can read the rest and the roots."""
        # with 512, of 1,000 and 300 unread tokens 489 and 0 are read first: the last pass reads 511 and the root
        return PrefillBatch(self.sequences, [max(0, count + 1 - max_tokens) for count in self.counts])


class InputProcessor:
    """Turns requests into sequences: whether they can run, how much they may emit, and where they end."""

    def __init__(self, target: Target, tokenizer: Any) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self.eos_ids = eos_token_ids(target.model)
        self._turn_end_ids = turn_end_ids(tokenizer)

    def check(self, request: Request) -> None:
        """Raise RequestError when a request can't run."""
        check_request(request.params, request.prompt, self._stop_ids(request), self._target.vocab_size)
        room = self._target.max_length
        if room is not None and len(request.prompt) >= room + (request.params.max_tokens == 0):
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens, the model's context holds {room}: shorten the prompt"
            )
        if request.params.prompt_logprobs is not None and not self._target.head_is_exact:
            raise RequestError(f"{self._target.config.model_type}: prompt_logprobs can't be computed for this model")
        self._grammar(request)

    def sequence(self, index: int, request: Request, deadline: float | None, queue_key: str) -> SequenceState:
        """A request's sequence, which ends in `deadline` seconds at the latest. Raises RequestError if it can't run."""
        self.check(request)
        limit = request.params.max_tokens
        if self._target.max_length is not None:
            limit = min(limit, self._target.max_length - len(request.prompt))
        expires = None if deadline is None else time.monotonic() + deadline
        stops = frozenset(self._stop_ids(request))
        return SequenceState(index, request, limit, stops, queue_key, expires, self._grammar(request))

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        return request.params.stop_token_ids + (() if request.params.ignore_eos else self.end_ids(request))

    def end_ids(self, request: Request) -> tuple[int, ...]:
        """The tokens with which the model ends an answer: its EOS tokens and, in chats, its end-of-turn tokens."""
        ids = self.eos_ids + (self._turn_end_ids if request.chat else ())
        if not ids and request.grammar is not None and self._tokenizer is not None:
            return tuple(token for token in (self._tokenizer.eos_token_id,) if token is not None)  # a grammar needs one
        return ids

    def _grammar(self, request: Request) -> Grammar | None:
        if request.grammar is None:
            return None
        return grammar_of(request, self._tokenizer, self.end_ids(request), self._target.vocab_size)
