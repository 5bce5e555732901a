"""The types that go into the engine and come out of it: requests, sampling parameters, completions, statistics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from eyas.errors import UsageError


class SamplingParams(BaseModel):
    """How a request's tokens are chosen. `temperature=0` is greedy; the defaults change no logits.

    Order and arithmetic are the same as in `transformers`: logit bias, repetition penalty (prompt and answer),
    presence and frequency penalties (answer only), bad words, min tokens, temperature, top-k, top-p, min-p.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int = Field(default=128, ge=0, description="0 = only read the prompt")
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, description="0 = off")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, allow_inf_nan=False)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    bad_words_ids: tuple[Annotated[tuple[int, ...], Field(min_length=1)], ...] = Field(
        default=(), description="token sequences that the answer must not contain"
    )
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = Field(default=0, ge=0, lt=2**63)
    logprobs: int | None = Field(default=None, ge=0, le=20, description="None = off, k = with k alternatives")
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20, description="the same for the prompt's tokens")


@dataclass(frozen=True)
class TypicalAcceptance:
    """The parameters of typical acceptance, the LOSSY rule of `eyas.verify.TypicalWalk`. Raises UsageError."""

    epsilon: float = 0.09
    """A draft token is acceptable if it is more probable than this, or than `delta` * exp(-entropy)."""
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not (0.0 <= self.epsilon <= 1.0 and self.delta >= 0.0):
            raise UsageError(
                f"typical acceptance: epsilon {self.epsilon} must be in [0, 1], delta {self.delta} at least 0"
            )


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar for constrained output: a token is emitted only if the answer can still match afterwards."""

    kind: Literal["json_schema", "json_object", "regex", "lark", "choice"]
    text: str = ""
    """The JSON schema, the regular expression (of the whole answer), the Lark grammar (llguidance's dialect), or the
    choices as a JSON array of strings; empty for `json_object`."""
    whitespace: str | None = None
    """A regular expression for the whitespace between JSON tokens; None = one whitespace character."""
    preface: str = ""
    """A Lark grammar of the whole answer, if something such as a thought may come before the text that this grammar
    constrains; there that text is the rule `@answer`."""


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability that the target gave an emitted token.

    Natural logarithms of the target's own distribution: the softmax of its unmodified logits, before bias,
    penalties, constraints, temperature and filters. These can make the target emit a token that ranks low here.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability) of the most probable tokens, best first, as many as requested."""


@dataclass(frozen=True)
class PromptLogprobs(TokenLogprobs):
    """The log-probability that the target gave a token of the prompt, and how many others were more probable."""

    rank: int = 1
    """1 = no token was more probable."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue, and how."""

    prompt: tuple[int, ...]
    """Prompt token ids, at least one."""
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = ""
    speculate: bool = True
    """Draft for this sequence, where the engine has a drafter."""
    trace: bool = False
    """Report the draft tree of each round in `Chunk.draft`."""
    grammar: GrammarSpec | None = None
    """What the answer must look like; None = any text."""
    chat: bool = False
    """The prompt is a chat: its answer also ends where the chat template ends turns."""
    prediction: tuple[int, ...] = ()
    """What the answer is expected to repeat, as token ids, such as the old text of a file to edit. Drafters that look
    up passages copy from it; it changes no token of the answer."""
    cache_salt: str = ""
    """Prefixes are reused only among requests with the same salt."""
    private: bool = False
    """Nothing may be learned from it. Its text may still serve other private requests of the same owner."""


class Owner(NamedTuple):
    """Whose text a sequence is. What is learned from it may only serve the same owner."""

    key: str = ""
    """`CLIENT` or `CLIENT/USER`; empty = nobody's: it serves no later sequence."""
    private: bool = False
    """Whether nothing may be learned from it."""

    @property
    def client(self) -> str:
        """The client, whose users share its turns."""
        return self.key.partition("/")[0]


NO_OWNER = Owner()
"""The owner of text that serves no other sequence."""


CONTEXT_BUCKETS = ("0-1k", "1-2k", "2-4k", "4-8k", "8-16k", "16k+")
"""Ranges of context length before a round, by which accept lengths are reported; k = 1,024, upper ends excluded."""


def context_bucket(tokens: int) -> int:
    """The index in `CONTEXT_BUCKETS` of a context of `tokens` tokens."""
    return min(max(tokens.bit_length() - 10, 0), len(CONTEXT_BUCKETS) - 1)


@dataclass
class Stats:
    """The only counter: methods and baseline are measured by the same code.

    A round is one target pass over a draft tree (an empty one for plain decoding). Rates are defined in
    `docs/metrics.md`; prefill passes and prefill time are counted separately.
    """

    tokens: int = 0
    """Tokens emitted (after cutting at a stop token or the length limit)."""
    prefill_tokens: int = 0
    """The part of `tokens` emitted by prefill passes: usually the first token."""
    target_passes: int = 0
    """Verification passes; prefill passes are not counted."""
    drafted_depth: int = 0
    """Sum over rounds of the draft tree's depth."""
    walked: int = 0
    """Sum over rounds of draft tokens accepted, before cutting."""
    predicted_accepted: int = 0
    """The part of `walked` that was copied from the request's prediction."""
    predicted_rejected: int = 0
    """Draft tokens copied from the prediction that were verified and rejected."""
    accepted_histogram: list[int] = field(default_factory=list)
    """`[i]` = rounds in which exactly `i` draft tokens were accepted."""
    offered_by_depth: list[int] = field(default_factory=list)
    """`[i]` = rounds whose tree reached depth `i + 1`."""
    rounds_by_context: list[int] = field(default_factory=list)
    """`[i]` = rounds whose context was in bucket `i` of `CONTEXT_BUCKETS`."""
    walked_by_context: list[int] = field(default_factory=list)
    """`[i]` = draft tokens that those rounds accepted, before cutting."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Of one sequence, by round that drafted, in order: how deep its tree was, and how many draft tokens were accepted.
    Pooled statistics have none."""
    reused_tokens: int = 0
    """Prompt tokens that were cached already, from earlier requests with the same prefix."""
    queue_seconds: float = 0.0
    """Wall time from submission to getting a slot."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """Wall time of the rounds this sequence took part in (shared with the others of its batch)."""
    draft_seconds: float = 0.0
    """The part of `decode_seconds` spent drafting and reading committed tokens; on an accelerator, host time."""

    def record(self, accepted: int, offered: int, context: int) -> None:
        """Count one round: `accepted` draft tokens kept of a tree `offered` levels deep, after `context` tokens."""
        bucket = context_bucket(context)
        for counts in (self.rounds_by_context, self.walked_by_context):
            _extend(counts, bucket + 1)
        self.rounds_by_context[bucket] += 1
        self.walked_by_context[bucket] += accepted
        _extend(self.accepted_histogram, accepted + 1)
        _extend(self.offered_by_depth, offered)
        self.target_passes += 1
        self.drafted_depth += offered
        self.walked += accepted
        self.accepted_histogram[accepted] += 1
        for level in range(offered):
            self.offered_by_depth[level] += 1

    @property
    def accept_length(self) -> float:
        """Tokens per target pass, the bonus token counted: 1 + accepted / rounds."""
        return 1.0 + self.walked / self.target_passes if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens on the offered depth."""
        return self.walked / self.drafted_depth if self.drafted_depth else 0.0

    @property
    def accepted_by_position(self) -> list[float]:
        """`[i]` = share of the rounds offering depth `i + 1` in which draft position `i` was accepted."""
        reached = [sum(self.accepted_histogram[i + 1 :]) for i in range(len(self.offered_by_depth))]
        return [r / o if o else 0.0 for r, o in zip(reached, self.offered_by_depth, strict=True)]

    @property
    def accept_length_by_context(self) -> dict[str, float]:
        """Context bucket -> accept length of its rounds, for buckets with any rounds."""
        counts = zip(CONTEXT_BUCKETS, self.rounds_by_context, self.walked_by_context, strict=False)
        return {name: 1.0 + walked / rounds for name, rounds, walked in counts if rounds}

    @property
    def decoded_tokens(self) -> int:
        """Tokens that rounds emitted: all but the prefill passes' tokens."""
        return self.tokens - self.prefill_tokens

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of decoding; prefill and its tokens are not counted."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def draft_share(self) -> float:
        """The drafter's share of decoding time."""
        return self.draft_seconds / self.decode_seconds if self.decode_seconds else 0.0

    def merge(self, other: Stats) -> None:
        """Pool another sequence's counts into this one (times are summed too)."""
        self.tokens += other.tokens
        self.prefill_tokens += other.prefill_tokens
        self.target_passes += other.target_passes
        self.drafted_depth += other.drafted_depth
        self.walked += other.walked
        self.predicted_accepted += other.predicted_accepted
        self.predicted_rejected += other.predicted_rejected
        self.reused_tokens += other.reused_tokens
        self.queue_seconds += other.queue_seconds
        self.prefill_seconds += other.prefill_seconds
        self.decode_seconds += other.decode_seconds
        self.draft_seconds += other.draft_seconds
        _add_counts(self.accepted_histogram, other.accepted_histogram)
        _add_counts(self.offered_by_depth, other.offered_by_depth)
        _add_counts(self.rounds_by_context, other.rounds_by_context)
        _add_counts(self.walked_by_context, other.walked_by_context)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form that `eyas generate --json` writes."""
        return {
            "tokens": self.tokens,
            "target_passes": self.target_passes,
            "accept_length": round(self.accept_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_by_position": [round(x, 4) for x in self.accepted_by_position],
            "accepted_histogram": self.accepted_histogram,
            "accept_length_by_context": {name: round(x, 4) for name, x in self.accept_length_by_context.items()},
            "rounds_by_context": self.rounds_by_context,
            "prefill_seconds": round(self.prefill_seconds, 6),
            "decode_seconds": round(self.decode_seconds, 6),
            "draft_seconds": round(self.draft_seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


@dataclass
class Completion:
    """A finished sequence: its tokens, its text, why it ended, and its statistics."""

    id: str
    token_ids: list[int]
    text: str
    finish_reason: str
    """`stop` (a stop id was produced, it is included), `length`, or `error`."""
    stats: Stats
    lossy: bool = False
    """True when a verification rule that may change the output was used."""
    seeded: bool = True
    """False when the rule keeps the distribution, but draws other tokens than plain decoding with this seed."""
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, if requested."""
    prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
    """One for each token of the prompt but the first, if requested and the prompt was read."""

    def as_dict(self) -> dict[str, Any]:
        """The JSON object that `eyas generate --json` writes for a row."""
        row: dict[str, Any] = {
            "id": self.id,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": self.stats.as_dict(),
        }
        if self.lossy:
            row["lossy"] = True
        if not self.seeded:
            row["seeded"] = False
        if self.logprobs is not None:
            row["logprobs"] = [asdict(each) for each in self.logprobs]
        if self.prompt_logprobs is not None:
            row["prompt_logprobs"] = [asdict(each) for each in self.prompt_logprobs]
        if self.error is not None:
            row["error"] = self.error
        return row


@dataclass(frozen=True)
class DraftRound:
    """The draft tree of a round for one sequence, and the path that the target accepted."""

    root: int
    """The token the tree grows from: the sequence's last one before the round."""
    tokens: tuple[int, ...]
    """One per node, parents before their children."""
    parents: tuple[int, ...]
    """The index of each node's parent, -1 = the root."""
    logprob: tuple[float, ...]
    """The drafter's cumulative log-probability of the path to each node (natural logarithm); when sampling with a
    coupled draft, given the noise that the target samples with."""
    path: tuple[int, ...]
    """The accepted nodes, from the root down."""


@dataclass(frozen=True)
class Chunk:
    """What a step added to a sequence, for streaming."""

    index: int
    """The request: its number in the call, or what `Engine.submit` returned."""
    token_ids: tuple[int, ...]
    accepted: int
    """How many of `token_ids`, from the first, were draft tokens."""
    completion: Completion | None = None
    """The whole result, with the sequence's last chunk."""
    draft: DraftRound | None = None
    """The round's tree, for requests with `trace`; None in a round without one."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, if requested."""
    prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
    """The prompt's, with the sequence's first chunk, if requested."""


@dataclass(frozen=True)
class Limits:
    """What an engine may use: sequences in slots, cache, queue."""

    max_running: int = 1
    """Maximum number of sequences in slots at the same time."""
    max_cached_tokens: int | None = None
    """Maximum size of the slot cache in tokens (slots x columns, see `CacheRoom`); None = what memory allows."""
    max_waiting: int | None = None
    """Maximum number of waiting requests. A client below its share may add more, up to twice as many in all."""
    prefill_chunk: int | None = None
    """Maximum number of prompt tokens a step reads, so that running sequences don't stall; None = whole prompts."""
    prefix_tokens: int = 0
    """Maximum number of tokens kept for requests with a common prefix, in addition to the slots; 0 = none."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_cached_tokens", "max_waiting", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.prefix_tokens < 0:
            raise UsageError(f"prefix_tokens must be at least 0, got {self.prefix_tokens}")


@dataclass(frozen=True)
class EngineState:
    """A snapshot of an engine between two steps: what runs and waits, what is cached, what was counted."""

    running: int
    """Sequences that are decoding."""
    prefilling: int
    """Sequences in a slot whose prompt isn't read yet."""
    waiting: int
    cached_tokens: int
    """Tokens of sequences in slots."""
    allocated_tokens: int
    """Slots x columns of the cache: its memory."""
    cache_limit: int | None
    prefix_tokens: int
    """Tokens kept for requests with a common prefix."""
    prefix_limit: int
    preempted_total: int
    prompt_tokens_total: int
    """Prompt tokens of admitted requests, reused ones included."""
    prefix_hit_tokens_total: int
    """Prompt tokens that were not read again."""
    generated_tokens_total: int
    rounds_total: int
    finished_total: dict[str, int]
    """Finish reason -> number of sequences."""


def _add_counts(counts: list[int], more: list[int]) -> None:
    """Add counts by index, the longer list's length."""
    _extend(counts, len(more))
    for i, count in enumerate(more):
        counts[i] += count


def _extend(counts: list[int], length: int) -> None:
    """Pad a count vector with zeros to at least `length`."""
    counts.extend([0] * (length - len(counts)))
