"""The sampler: every slot's sampling parameters, seed, token counts and grammar, and coupling for drafters.

A token is a pure function of (target logits, parameters, seed, tokens before it, position). Plain decoding and
speculation call the same function, so speculation can't change the output.

Shapes: B rows = a contiguous range of slots, D + 1 tokens that a round emits at most, W nodes of one tree level, V
vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.errors import RequestError
from eyas.tree import DraftTree
from eyas.types import SamplingParams
from eyas.verify.constraint import Constraint, LegalTokens, LegalTree, end_tokens, legal_roots
from eyas.verify.grammar import Grammar
from eyas.verify.path import TOP_P_OFF, Needs, PathState, SamplingState, appended, gumbel


class Sampler:
    """The sampling state of up to `slots` sequences; a round samples for a contiguous range of them."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.state = SamplingState(slots, vocab_size, device)
        self._needs = [Needs()] * slots
        self._constraints: list[Constraint | None] = [None] * slots
        self._logprobs: list[int | None] = [None] * slots
        self._union: dict[range, Needs] = {}

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        eos_ids: Sequence[int],
        emitted: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """Start a request in `slot`, or resume one that has already `emitted` tokens.

        Raises RequestError if it names tokens the target doesn't have, or its grammar can't be enforced.
        """
        vocab_size = self.state.vocab_size
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        check_request(params, prompt, stops, vocab_size)
        stops = {token for token in stops if 0 <= token < vocab_size}
        needs = Needs.of(params, bool(stops), vocab_size, grammar is not None)
        constraint = None
        if grammar is not None:
            constraint = Constraint(grammar, end_tokens(grammar, params, eos_ids, vocab_size))
            constraint.consume(emitted)
        self.state.write(
            slot,
            {
                "seed": params.seed,
                "position": len(prompt) + len(emitted),
                "generated": len(emitted),
                "min_tokens": params.min_tokens,
                "top_k": params.top_k if needs.top_k else 0,
                "divisor": params.temperature if needs.noise else 1.0,
                "noise_scale": float(needs.noise),
                "top_p_cut": 1.0 - params.top_p if needs.top_p else TOP_P_OFF,
                "min_p": params.min_p if needs.min_p else 0.0,
                "repetition": params.repetition_penalty,
                "presence": params.presence_penalty,
                "frequency": params.frequency_penalty,
            },
        )
        self.state.write_table("bias", slot, list(params.logit_bias), list(params.logit_bias.values()))
        self.state.write_table("stops", slot, sorted(stops) if needs.min_tokens else [], 1.0)
        self.state.write_table("prompt", slot, list(prompt) if needs.repetition else [], 1.0)
        self.state.write_bad_words(slot, params.bad_words_ids, emitted)
        counts = Counter(emitted) if needs.history else {}
        self.state.write_table("counts", slot, list(counts), [float(count) for count in counts.values()])
        self._needs[slot] = needs
        self._constraints[slot] = constraint
        self._logprobs[slot] = params.logprobs
        self._union.clear()

    def move(self, source: int, target: int) -> None:
        """Copy everything of slot `source` to slot `target`."""
        self.state.move(source, target)
        self._needs[target] = self._needs[source]
        self._constraints[target] = self._constraints[source]
        self._logprobs[target] = self._logprobs[source]
        self._union.clear()

    def commit(self, rows: range, tokens: Tensor | list[list[int]], counts: Tensor | list[int]) -> None:
        """Advance the slots `rows` by the first `counts` [B] of `tokens` [B, D + 1], on the device or as lists."""
        here = slice(rows.start, rows.stop)
        needs = self.needs(rows)
        for column in (self.state.position, self.state.generated):
            if isinstance(counts, Tensor):
                column[here].add_(counts)
                continue
            values = column.numpy()  # item by item, because array operations are slow right after a pass
            for slot, count in zip(rows, counts, strict=True):
                values[slot] += count
        if not (needs.history or needs.bad_words):
            return
        tokens = torch.as_tensor(tokens)
        counts = torch.as_tensor(counts)
        if needs.history:
            kept = torch.arange(tokens.shape[1], device=tokens.device) < counts.unsqueeze(1)
            table = self.state.make_table("counts")
            table[here].scatter_add_(1, tokens.clamp(min=0), kept.to(table.dtype))
        if needs.bad_words and self.state.bad_words is not None:
            recent = self.state.bad_words.recent
            recent[here] = appended(recent[here], tokens, counts)

    def legal(self, rows: range, tree: DraftTree) -> LegalTree | None:
        """The trees of the slots `rows`, pruned by their grammars; None if no slot has a grammar."""
        constraints = self._constraints[rows.start : rows.stop]
        return LegalTree(constraints, tree, self.state.vocab_size) if any(constraints) else None

    def constraint(self, slot: int) -> Constraint | None:
        """The grammar constraint of a slot's sequence; None = it has none."""
        return self._constraints[slot]

    def consume(self, rows: range, tokens: Sequence[Sequence[int]]) -> dict[int, tuple[int, str]]:
        """Advance the grammars of the slots `rows` by the emitted `tokens`, on the host.

        For each row whose grammar has reached a limit, returns how many of its tokens are legal and what went wrong.
        """
        failed = {}
        for row, (constraint, emitted) in enumerate(
            zip(self._constraints[rows.start : rows.stop], tokens, strict=True)
        ):
            if constraint is not None:
                count = constraint.consume(emitted)
                if constraint.error is not None:
                    failed[row] = count, constraint.error
        return failed

    def logprobs(self, rows: range) -> dict[int, int]:
        """Row (0 = the first of the slots `rows`) -> number of alternatives, for rows that want log-probabilities."""
        wanted = enumerate(self._logprobs[rows.start : rows.stop])
        return {row: count for row, count in wanted if count is not None}

    def path(self, rows: range, steps: int = 1) -> PathState:
        """The state of a walk of at most `steps` tokens in each of the slots `rows`."""
        return PathState(self.state, self.needs(rows), rows, steps)

    def coupling(self, rows: range, enabled: bool) -> Coupling:
        """Ranking for the drafts of the slots `rows`, with the sampler's noise if `enabled`."""
        constraints = self._constraints[rows.start : rows.stop]
        legal = legal_roots(constraints, self.state.vocab_size, self.state.seed.device) if any(constraints) else None
        return Coupling(self.state, self.needs(rows), rows, enabled, constraints, legal)

    def needs(self, rows: range) -> Needs:
        """The steps of sampling that any of the slots `rows` needs."""
        if rows not in self._union:
            self._union[rows] = Needs.union(self._needs[rows.start : rows.stop])
        return self._union[rows]


_ILLEGAL = -1e9


class Warp(NamedTuple):
    """The temperatures to divide logits by and the scales of the noise to add; [B] per row, None = skip the step."""

    divisors: Tensor | None
    scales: Tensor | None
    seeds: Tensor | None  # [B] int64, of the noise
    positions: Tensor | None  # [B] int64, of the tokens after the root

    def divided(self, logits: Tensor) -> Tensor:
        """`logits` [B, W, Vd] in float32, with the temperature applied."""
        logits = logits.to(torch.float32)
        return logits if self.divisors is None else logits / self.divisors[:, None, None]

    def ranked(self, logits: Tensor, steps_ahead: int, ids: Tensor) -> Tensor:
        """Log-probabilities of divided `logits` [B, W, Vd], with noise; `ids` [Vd] are the target's token ids."""
        if self.scales is not None and self.seeds is not None and self.positions is not None:
            noise = gumbel(self.seeds, self.positions.unsqueeze(1) + steps_ahead, ids)  # [B, 1, Vd]
            logits = torch.addcmul(logits, noise, self.scales[:, None, None])
        return logits.log_softmax(dim=-1)

    def rank(self, logits: Tensor, steps_ahead: int, target_ids: Tensor) -> Tensor:
        """`Coupling.rank` if temperature and noise are all that it applies."""
        return self.ranked(self.divided(logits), steps_ahead, target_ids)


class Coupling:
    """Turns drafter logits into log-probabilities to rank children by, for the slots `rows`.

    Gumbel coupling: the target emits argmax(its warped logits + noise), so a drafter that adds the same noise to its
    own logits proposes what the target will draw far more often than one that proposes its most likely tokens (arXiv
    2408.07978). This can't change the output: with or without noise, a draft is only a guess.
    """

    def __init__(
        self,
        state: SamplingState,
        needs: Needs,
        rows: range,
        enabled: bool,
        constraints: Sequence[Constraint | None],
        legal: LegalTokens | None = None,
    ) -> None:
        """`constraints` [B]: the rows' grammars; `legal`: the tokens that may follow the root, all that is worth
        proposing there."""
        self.state = state
        self.needs = needs
        self.legal = legal
        self.rows = slice(rows.start, rows.stop)
        self._noisy = enabled and needs.noise
        self.constraints = constraints

    def forced(self, row: int) -> list[int]:
        """The tokens that the grammar of the row `row` of the batch forces after the root; none without a grammar."""
        constraint = self.constraints[row]
        return [] if constraint is None else constraint.forced()

    def ranks_by_logits(self, steps_ahead: int) -> bool:
        """Whether `rank` only takes log-probabilities of the logits, which keeps their order."""
        return not (self.needs.temperature or self._noisy or (self.legal is not None and steps_ahead == 0))

    def warp(self) -> Warp | None:
        """All that `rank` does before it takes log-probabilities; None if it does more than a `Warp` can."""
        return self._warp if self.legal is None else None

    @cached_property
    def _warp(self) -> Warp:
        state, here = self.state, self.rows
        divisors = state.divisor[here] if self.needs.temperature else None
        noise = (state.noise_scale[here], state.seed[here], state.position[here]) if self._noisy else (None,) * 3
        return Warp(divisors, *noise)

    def rank(self, logits: Tensor, steps_ahead: int, target_ids: Tensor | None) -> Tensor:
        """[B, W, Vd] float32 log-probabilities of drafter `logits` [B, W, Vd], with temperature and noise applied.

        `steps_ahead` is 0 for the root's children, 1 for theirs, and so on. `target_ids` [Vd] are the target's ids of
        the draft vocabulary, None if it is the target's own.
        """
        ids = self.state.token_ids if target_ids is None else target_ids
        return self._warp.ranked(self.warped(logits, steps_ahead, target_ids), steps_ahead, ids)

    def warped(self, logits: Tensor, steps_ahead: int, target_ids: Tensor | None) -> Tensor:
        """Drafter `logits` [B, W, Vd] in float32, divided by the temperature; illegal tokens get a very low value."""
        logits = self._warp.divided(logits)
        if self.legal is not None and steps_ahead == 0:
            legal = self.legal.at(torch.zeros_like(self.state.position[self.rows]))  # [B, V]
            legal = legal if target_ids is None else legal[:, target_ids]
            # finite, because a draft vocabulary may have no legal token
            logits = logits.masked_fill(~legal.unsqueeze(1), _ILLEGAL)
        return logits


def check_request(params: SamplingParams, prompt: Sequence[int], stops: Collection[int], vocab_size: int) -> None:
    """Raise RequestError if a request names tokens the target doesn't have, or rules out every token.

    `stops` are the stop ids of the request and of the target. Some configs have stop ids outside the target's
    vocabulary; these are never sampled.
    """
    if not prompt:
        raise RequestError("the prompt is empty: give it at least one token, such as the target's BOS token")
    named = {"prompt": prompt, "stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias}
    named["bad_words_ids"] = tuple(chain.from_iterable(params.bad_words_ids))
    for name, ids in named.items():
        _check_ids(name, ids, vocab_size)
    for token, bias in params.logit_bias.items():
        if math.isnan(bias) or bias == math.inf:
            raise RequestError(f"logit_bias of token {token} is {bias}: use a finite number, or -inf to ban it")
    banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
    banned.update(word[-1] for word in params.bad_words_ids)  # banned after the word's other tokens
    if params.min_tokens > 0:
        banned.update(token for token in stops if 0 <= token < vocab_size)
    if len(banned) >= vocab_size:
        raise RequestError("logit_bias, bad_words and min_tokens rule out every token: leave at least one")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has token id {token}, outside the target's vocabulary of {vocab_size}: "
                "was it made with another tokenizer?"
            )
