"""Sampling along one path: a slot's state, and the penalties, filters and Gumbel noise that turn logits into tokens.

`SamplingState` holds every slot's state on the device. `Needs` lists the sampling steps of a request, so that steps
that no row of a batch needs are skipped. `PathState` samples a walk level by level. Every penalty and filter is an
exact identity for a row that has it off, so a row's result doesn't depend on its neighbors.

Bad words are token sequences that an answer must not contain: after all its other tokens, the last one is ruled out.

Shapes: S slots, B rows, V vocabulary, P positions whose noise is computed together; of bad words, K sequences, L tokens
of the longest. Shorter sequences are right-aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.runtime import to_device
from eyas.targets.native.noise import Draw, native_gumbel
from eyas.tree.draft_tree import NodeDraws
from eyas.types import SamplingParams

_NONE, _ANY = -1, -2
"""Table entries: no token, which matches nothing; and any token, as padding ahead of a shorter sequence."""


class BadWords:
    """Every slot's bad words and last answer tokens, on the device; longer words widen both tables."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._words = torch.full((slots, 0, 1), _NONE, device=device)  # [S, K, L]
        self.recent = torch.full((slots, 0), _NONE, device=device)
        """[S, L - 1] the last answer tokens of every slot."""

    def write(self, slot: int, words: Sequence[Sequence[int]], emitted: Sequence[int]) -> None:
        """Set a slot's words, possibly none, and the answer tokens `emitted` so far."""
        _, count, width = self._words.shape
        wider = max(0, max(map(len, words), default=1) - width)
        more = max(0, len(words) - count)
        self._words = F.pad(F.pad(self._words, (wider, 0), value=_ANY), (0, 0, 0, more), value=_NONE)
        self.recent = F.pad(self.recent, (wider, 0), value=_NONE)
        width += wider
        rows = [[*[_ANY] * (width - len(word)), *word] for word in words]
        rows += [[_NONE] * width] * (self._words.shape[1] - len(words))
        recent = [*[_NONE] * (width - 1), *emitted][len(emitted) :]
        self._words[slot] = torch.tensor(rows, dtype=torch.int64, device=self._words.device)
        self.recent[slot] = torch.tensor(recent, dtype=torch.int64, device=self._words.device)

    def move(self, source: int, target: int) -> None:
        """Copy the words and tokens of slot `source` to slot `target`."""
        self._words[target] = self._words[source]
        self.recent[target] = self.recent[source]

    def banned(self, rows: slice, recent: Tensor, vocab_size: int) -> Tensor:
        """[B, V] bool: the tokens that would complete a bad word after the `recent` ones [B, L - 1]."""
        words = self._words[rows]
        before, last = words[..., :-1], words[..., -1]
        complete = ((before == recent.unsqueeze(1)) | (before == _ANY)).all(dim=-1) & (last != _NONE)  # [B, K]
        table = torch.zeros(len(words), vocab_size + 1, dtype=torch.bool, device=words.device)
        return table.scatter_(1, torch.where(complete, last, vocab_size), True)[:, :vocab_size]


def appended(recent: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """The `recent` tokens [B, L - 1] once the first `counts` [B] of `tokens` [B, N] are appended."""
    kept = torch.arange(recent.shape[1], device=recent.device) + counts.unsqueeze(1)
    return torch.cat((recent, tokens), dim=1).gather(1, kept)


class SamplingState:
    """A column [S] for each parameter; tables [S, V] are allocated when a request first needs them."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, dtype=dtype, device=device)

        self.token_ids = torch.arange(vocab_size, device=device)  # [V]
        self.seed = column(torch.int64)
        self.position = column(torch.int64)
        """Index of the next token to be sampled in the whole sequence, prompt included."""
        self.generated = column(torch.int64)
        """Number of answer tokens so far."""
        self.min_tokens = column(torch.int64)
        self.top_k = column(torch.int64)
        self.divisor = column(torch.float32)
        """The temperature of sampled rows; 1 for greedy ones."""
        self.noise_scale = column(torch.float32)
        """1 for sampled rows, 0 for greedy ones."""
        self.top_p_cut = column(torch.float32)
        self.min_p = column(torch.float32)
        self.repetition = column(torch.float32)
        self.presence = column(torch.float32)
        self.frequency = column(torch.float32)

        self.bias: Tensor | None = None  # [S, V] float32
        self.stops: Tensor | None = None  # [S, V] bool
        self.prompt: Tensor | None = None  # [S, V] bool: the token is in the prompt
        self.counts: Tensor | None = None  # [S, V] int32: occurrences in the answer
        self.bad_words: BadWords | None = None

    @property
    def vocab_size(self) -> int:
        return self.token_ids.shape[0]

    def write(self, slot: int, values: Mapping[str, int | float]) -> None:
        """Set the values of `slot` in the named columns."""
        for name, value in values.items():
            getattr(self, name)[slot] = value

    def write_table(self, name: str, slot: int, ids: list[int], values: list[float] | float) -> None:
        """Set `slot`'s row of a table to `values` at token `ids` and zero elsewhere. Empty `ids` don't allocate it."""
        table: Tensor | None = getattr(self, name)
        if table is None:
            if not ids:
                return
            table = self.make_table(name)
        table[slot] = 0
        if ids:
            index = to_device(ids, table.device)
            table[slot, index] = to_device(values, table.device, table.dtype)

    def write_bad_words(self, slot: int, words: Sequence[Sequence[int]], emitted: Sequence[int]) -> None:
        """Set `slot`'s bad words and the tokens `emitted` so far; allocates nothing until a request has bad words."""
        if words and self.bad_words is None:
            self.bad_words = BadWords(self.seed.shape[0], self.seed.device)
        if self.bad_words is not None:
            self.bad_words.write(slot, words, emitted)

    def make_table(self, name: str) -> Tensor:
        """The named table, allocated on first use."""
        table: Tensor | None = getattr(self, name)
        if table is None:
            dtype = {"bias": torch.float32, "counts": torch.int32}.get(name, torch.bool)
            table = torch.zeros(self.seed.shape[0], self.vocab_size, dtype=dtype, device=self.seed.device)
            setattr(self, name, table)
        return table

    def move(self, source: int, target: int) -> None:
        """Copy the state of slot `source` to slot `target`."""
        for value in vars(self).values():
            if isinstance(value, BadWords):
                value.move(source, target)
            elif value is not None and value is not self.token_ids:
                value[target] = value[source]


GREEDY_BELOW = 1e-5
"""Lower temperatures count as greedy (vLLM's limit): dividing logits by them would swamp the noise."""


@dataclass(frozen=True)
class Needs:
    """Which steps of sampling a request or a batch needs, known on the host; steps that no row needs are skipped."""

    noise: bool = False
    temperature: bool = False
    bias: bool = False
    repetition: bool = False
    counts: bool = False
    bad_words: bool = False
    min_tokens: bool = False
    top_k: int = 0
    """The greatest k of the batch; 0 = the step isn't needed."""
    top_p: bool = False
    min_p: bool = False
    grammar: bool = False

    @staticmethod
    def of(params: SamplingParams, has_stops: bool, vocab_size: int, has_grammar: bool = False) -> Needs:
        """The steps that have an effect for these parameters; filters have none on a greedy row."""
        noise = params.temperature >= GREEDY_BELOW
        return Needs(
            noise=noise,
            temperature=noise and params.temperature != 1.0,
            bias=bool(params.logit_bias),
            repetition=params.repetition_penalty != 1.0,
            counts=params.presence_penalty != 0.0 or params.frequency_penalty != 0.0,
            bad_words=bool(params.bad_words_ids),
            min_tokens=has_stops and params.min_tokens > 0,
            top_k=params.top_k if noise and params.top_k < vocab_size else 0,
            top_p=noise and params.top_p < 1.0,
            min_p=noise and params.min_p > 0.0,
            grammar=has_grammar,
        )

    @staticmethod
    def union(needs: Iterable[Needs]) -> Needs:
        """The steps that any request of a batch needs."""
        flags: dict[str, int] = {}
        for each in needs:
            for name, value in vars(each).items():
                flags[name] = max(flags.get(name, 0), value)
        top_k = flags.pop("top_k", 0)
        return Needs(top_k=top_k, **{name: bool(value) for name, value in flags.items()})

    @property
    def history(self) -> bool:
        """Whether a token's choice depends on the tokens before it (penalties)."""
        return self.repetition or self.counts

    @property
    def plain(self) -> bool:
        """Whether the choice is the argmax of the raw logits."""
        return self == Needs()


_NOISE_BLOCK = 1 << 18
"""Maximum number of noise values computed together, but at least one position's: temporaries fit the CPU's cache."""


class PathState:
    """Samples tokens for the slots `rows`, level by level of a walk.

    It starts from the committed sampling state and never changes it. The walk samples at most `steps` levels; that only
    determines how much noise is computed together.
    """

    def __init__(self, state: SamplingState, needs: Needs, rows: range, steps: int = 1) -> None:
        self.needs = needs
        self._state = state
        self._rows = slice(rows.start, rows.stop)
        self._step = 0
        self._counts: Tensor | None = None  # [B, V], a copy once a token is appended
        self._recent: Tensor | None = None  # [B, L - 1], likewise
        self._block = min(steps, max(1, _NOISE_BLOCK // max(1, len(rows) * state.vocab_size)))
        self._noise: Tensor | None = None  # [B, P, V], the first for step `_noise_start`
        self._noise_start = 0

    def sample(self, logits: Tensor) -> Tensor:
        """The tokens [B] that follow the path, given the target's `logits` [B, V]."""
        return self.choose(self.warped(logits))

    def draws(self) -> list[Draw] | None:
        """[B] how each row's first token is drawn; None if that takes more than temperature and noise."""
        state, rows = self._state, self._rows
        if not self._only_draws:
            return None
        columns = (state.divisor, state.noise_scale, state.seed, state.position)
        numbers = zip(*(column[rows].tolist() for column in columns), strict=True)
        return [Draw(*each) for each in numbers]

    def node_draws(self) -> NodeDraws | None:
        """How tokens are drawn on the device; None if that takes more than temperature and noise."""
        if not self._only_draws:
            return None
        state, rows = self._state, self._rows
        return NodeDraws(state.divisor[rows], state.noise_scale[rows], state.seed[rows], state.position[rows])

    @property
    def _only_draws(self) -> bool:
        return replace(self.needs, noise=False, temperature=False) == Needs()

    def choose(self, warped: Tensor) -> Tensor:
        """The tokens [B] drawn from `warped` logits [B, V]: Gumbel-max, or the argmax for greedy rows."""
        return self.scores(warped).argmax(dim=-1)

    def scores(self, warped: Tensor) -> Tensor:
        """[B, V] `warped` logits plus the noise of this position; `choose` takes their argmax."""
        if not self.needs.noise:
            return warped
        scale = self._state.noise_scale[self._rows].unsqueeze(1)
        return torch.addcmul(warped, self._noise_here(), scale)

    def warped(self, logits: Tensor) -> Tensor:
        """`logits` [B, V] in float32 with all sampling parameters applied, but no noise; -inf = ruled out.

        Greedy rows are neither divided by a temperature nor filtered. Tokens that a grammar rules out are -inf already.
        Grammars take precedence over bans: bans that would leave no legal token are not applied.
        """
        needs = self.needs
        state = self._state
        rows = self._rows
        given = logits = logits.to(torch.float32)
        if needs.bias:
            logits = logits + state.make_table("bias")[rows]
        if needs.history:
            counts = state.make_table("counts")[rows] if self._counts is None else self._counts
            if needs.repetition:
                seen = state.make_table("prompt")[rows] | (counts > 0)
                logits = penalize_repetition(logits, seen, state.repetition[rows])
            if needs.counts:
                logits = penalize_counts(logits, counts, state.presence[rows], state.frequency[rows])
        if needs.bad_words and state.bad_words is not None:
            recent = state.bad_words.recent[rows] if self._recent is None else self._recent
            banned = state.bad_words.banned(rows, recent, state.vocab_size)
            logits = logits.masked_fill(banned, -math.inf)
        if needs.min_tokens:
            early = state.generated[rows] + self._step < state.min_tokens[rows]
            logits = forbid(logits, state.make_table("stops")[rows], early)
        if needs.grammar:
            nothing = logits.amax(dim=-1, keepdim=True) == -math.inf
            logits = torch.where(nothing, given, logits)
        if needs.temperature:
            logits = logits / state.divisor[rows].unsqueeze(1)
        if needs.top_k:
            logits = keep_top_k(logits, state.top_k[rows], needs.top_k)
        if needs.top_p:
            logits = keep_top_p(logits, state.top_p_cut[rows])
        if needs.min_p:
            logits = keep_min_p(logits, state.min_p[rows])
        return logits

    def advance(self, tokens: Tensor) -> None:
        """Append the chosen `tokens` [B] to the path."""
        self._step += 1
        if self.needs.history:
            if self._counts is None:
                self._counts = self._state.make_table("counts")[self._rows].clone()
            index = tokens.unsqueeze(1)
            self._counts.scatter_add_(1, index, torch.ones_like(index, dtype=self._counts.dtype))
        if self.needs.bad_words and self._state.bad_words is not None:
            recent = self._state.bad_words.recent[self._rows] if self._recent is None else self._recent
            self._recent = appended(recent, tokens.unsqueeze(1), torch.ones_like(tokens))

    def _noise_here(self) -> Tensor:
        """[B, V] noise of the current position, computed for the next few positions together."""
        if self._noise is None or self._step >= self._noise_start + self._noise.shape[1]:
            device = self._state.position.device
            ahead = torch.arange(self._step, self._step + self._block, device=device)  # [P]
            positions = self._state.position[self._rows].unsqueeze(1) + ahead
            self._noise = gumbel(self._state.seed[self._rows], positions, self._state.token_ids)
            self._noise_start = self._step
        return self._noise[:, self._step - self._noise_start]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Weaken tokens `seen` [B, V] in prompt or answer by the factor `penalty` [B] (CTRL, arXiv 1909.05858; 1 = off)."""
    factor = penalty.unsqueeze(1)
    return torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)


def penalize_counts(logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """OpenAI's penalties: subtract `presence` [B] once and `frequency` [B] for each of `counts` [B, V] occurrences."""
    return logits - (frequency.unsqueeze(1) * counts + presence.unsqueeze(1) * (counts > 0))


def forbid(logits: Tensor, tokens: Tensor, active: Tensor) -> Tensor:
    """Rule out `tokens` [B, V] bool in the rows that are `active` [B] bool."""
    return logits.masked_fill(tokens & active.unsqueeze(1), -math.inf)


def keep_top_k(logits: Tensor, k: Tensor, largest: int) -> Tensor:
    """Keep the `k` [B] best tokens of each row (0 = all) and ties with the k-th; `largest` is the greatest k.

    The filters compute the same as transformers' logits warpers, but with one parameter per row.
    """
    best = logits.topk(largest, dim=-1).values  # [B, largest]
    kth = best.gather(1, (k - 1).clamp(min=0).unsqueeze(1)).masked_fill_((k == 0).unsqueeze(1), -math.inf)
    return logits.masked_fill(logits < kth, -math.inf)


TOP_P_OFF = -1.0
"""A `cut` below every cumulative probability, which keeps all tokens."""


def keep_top_p(logits: Tensor, cut: Tensor) -> Tensor:
    """Keep the smallest set of best tokens with probability top_p, given `cut` [B] = 1 - top_p, or TOP_P_OFF."""
    ascending, order = logits.sort(dim=-1, stable=True)
    # summed in float64 and rounded to float32, so that a device's order of additions doesn't matter
    cumulative = ascending.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64).to(torch.float32)
    drop = cumulative <= cut.unsqueeze(1)
    drop[:, -1] = False
    return logits.masked_fill(torch.empty_like(drop).scatter_(1, order, drop), -math.inf)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens at least `min_p` [B] times as probable as the best one (0 = all)."""
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < min_p.unsqueeze(1) * probs.amax(dim=-1, keepdim=True), -math.inf)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31
_UNIFORM_BITS = 52


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """[B, P, V] float32 Gumbel noise: a pure function of `seeds` [B], `positions` [B, P], `token_ids` [V], all int64.

    Adding it to log-probabilities and taking the argmax draws an exact sample (the Gumbel-max trick), so the same
    seed, position and probabilities give the same token in any batch or slot, with or without speculation. A token's
    hash is the `token + 1`-th output of the SplitMix64 generator (Steele, Lea, Flood 2014) whose state starts at
    `mix(mix(seed) + position)`. This is integer arithmetic, the same on every device, and so are the uniforms made of
    it (52 bits, exact in float64). Two logarithms follow, rounded from float64 to float32. Where native kernels compute
    them, float64 may differ by a unit in the last place, which has never changed the float32 result.
    """
    noise = native_gumbel(seeds, positions, token_ids)
    return _gumbel(seeds, positions, token_ids) if noise is None else noise


def _gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """`gumbel` where there are no native kernels, with PyTorch's operations."""
    keys = _mix_(_mix_(seeds.clone()).unsqueeze(1) + positions)  # [B, P]
    bits = _mix_(keys.unsqueeze(2) + (token_ids + 1) * _GOLDEN)
    bits = _shift_right(bits, 64 - _UNIFORM_BITS)
    # (bits + 1/2) / 2^52: exact, and never 0 or 1, so the noise is finite
    uniform = bits.to(torch.float64).mul_(2.0**-_UNIFORM_BITS).add_(2.0 ** -(_UNIFORM_BITS + 1))
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's finalizer in wrapping int64 arithmetic, in place."""
    for shift, factor in _ROUNDS:
        x ^= _shift_right(x, shift)
        x *= factor
    x ^= _shift_right(x, _LAST_SHIFT)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift of a signed integer copies the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
