"""The controller of lookahead decoding: before each round it decides whether the window pays, or rests.

A window can't be sized by what its nodes are worth: its scratch nodes are never accepted, and the n-grams of later
rounds come from all of them. So a round either runs the whole window in every row, or it is plain:

    tokens per second = R (1 + accepted) / (draft(R) + pass(R (1 + nodes), columns) + observe(R (1 + accepted)))

Scratch nodes and candidates both count as `nodes`. What a row accepts, and how many nodes it has, are running averages.
While the window rests nothing is learned about it, so now and then it is tried for some rounds, within an allowance of
lost time. While it is in use, some rounds are plain, to keep the price of plain decoding current.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from eyas.engine.controller.base import ENTER, LEAVE, Controller
from eyas.engine.controller.costs import CostModel, Work
from eyas.engine.controller.explore import CHECKS, REST, Allowance
from eyas.engine.controller.records import ControllerState, RoundRecord
from eyas.tree import TreeSpec
from eyas.tree.lookahead import LookaheadTree

_GUESS, _GUESSED = 0.5, 16.0
"""Tokens that a row is assumed to accept in a round before any was seen (published: 0.5 to 1), and the weight of this
assumption, in rounds of one row."""
_FADE = 1.0 - 1.0 / 50.0
"""The factor by which running averages decay with each round that has windows."""
_TRIAL = 4
"""Rounds of a trial for each level of the window, which fills in as many rounds as it has levels."""
_AFTER_REST = 0.2
"""The weight that earlier averages keep when a window that rested is tried again."""
_FOR_PLAIN, _FOR_TRIALS = 0.002, 0.0045
"""Shares of the time that plain rounds while the window is in use, and trials while it rests, may lose."""
_LEAST = 0.02
"""The least share of its time that such a round is assumed to lose."""


class LookaheadController(Controller):
    """Plans whether a round runs windows or is plain, by measured costs and what windows have brought lately."""

    def __init__(
        self, costs: CostModel, window: LookaheadTree, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """For rounds whose trees are `window` or nothing."""
        super().__init__(costs, clock)
        self._window, self._pays = window, False
        self._rows_seen, self._accepted, self._nodes = _GUESSED, _GUESS * _GUESSED, window.max_nodes * _GUESSED
        self._plain_seconds = self._window_seconds = self._plain_rate = self._window_rate = 0.0
        self._for_plain, self._for_trials = Allowance(_FOR_PLAIN), Allowance(_FOR_TRIALS)
        self._trial = self._used = 0  # remaining rounds of a trial; rounds with windows so far
        self._checking = False  # whether this round is plain only to measure it

    def _plan(
        self,
        texts: Sequence[int],
        lengths: Sequence[int],
        sampled: Sequence[bool] | None,  # noqa: ARG002
        unread: Sequence[int] | None,  # noqa: ARG002
    ) -> TreeSpec | None:
        rows = len(texts)
        situation = (rows, max(lengths).bit_length())
        if situation != self._situation or self._planning.due():
            self._situation = situation
            self._weigh(rows, lengths)
        self._checking = False
        if self._pays:
            lost = max(self._plain_seconds - rows / self._window_rate, _LEAST * self._window_seconds)
            self._checking = self._used in CHECKS or self._for_plain.affords(lost)
            return None if self._checking else self._window
        if not self._trial:
            rounds = _TRIAL * self._window.depth
            lost = max(self._window_seconds - self._plain_seconds, _LEAST * self._window_seconds)
            if self._for_trials.affords(rounds * lost):
                self._trial = rounds
                self._forget(_AFTER_REST)
        self._ahead = 0 if self._trial else REST - 1
        return self._window if self._trial else None

    def _learn(self, record: RoundRecord, before: set[int]) -> None:  # noqa: ARG002
        whole, drafted = record.whole, record.draft is not None
        self.costs.learn(
            Work(
                record.rows,
                record.lengths,
                record.tokens,
                record.pass_seconds if drafted else whole,
                plain=not drafted,
                width=1,
                levels=int(drafted),
                draft_seconds=record.draft_seconds,
                pairs=record.emitted if drafted and record.seconds is not None else 0,
                observe_seconds=whole - record.draft_seconds - record.pass_seconds,
            )
        )
        self.audience.round(record.rows, drafted)
        if drafted:
            self._forget(_FADE)
            self._rows_seen += record.rows if record.drafting is None else sum(record.drafting)
            self._accepted += record.emitted - record.rows
            self._nodes += record.tokens - record.rows
            self._used += 1
        if self._pays:
            self._for_plain.earn(whole)
            if self._checking:
                self._used += 1  # else a check would follow itself
                self._spend(self._for_plain, whole, record.emitted / self._window_rate)
        else:
            self._for_trials.earn(whole)
            if self._trial and drafted:
                self._spend(self._for_trials, whole, record.emitted / self._plain_rate)
                self._trial -= 1
                self._situation = () if not self._trial else self._situation  # so that the next plan weighs the results

    @property
    def probing(self) -> bool:
        return False  # a trial runs the whole window, as any other round with one

    def snapshot(self) -> ControllerState:
        plain, pays, totals = self._plain_rate, self._pays, self._totals()
        return replace(
            totals,
            depth=self._window.depth if pays else 0,
            width=self._window.window if pays else 0,
            budget=round(self._nodes / self._rows_seen * self._situation[0]) if pays and self._situation else 0,
            predicted_tokens_per_second=self._window_rate if pays else plain,
            plain_tokens_per_second=plain,
            mean_width=totals.mean_depth / self._window.depth * self._window.window,
        )

    def _weigh(self, rows: int, lengths: Sequence[int]) -> None:
        """Forecast a round with windows and a plain one, and decide between them."""
        began = self._clock()
        costs = self.costs
        costs.settle()
        emitted, tokens = (rows * (1.0 + part / self._rows_seen) for part in (self._accepted, self._nodes))
        self._plain_seconds = costs.plain_seconds(rows, lengths)
        self._window_seconds = float(
            costs.pass_seconds(tokens, rows, lengths)
            + costs.draft_seconds(rows, 1, 1)
            + costs.observe_seconds(emitted, rows)
        )
        self._plain_rate, self._window_rate = rows / self._plain_seconds, emitted / self._window_seconds
        self._pays = self._window_rate >= self._plain_rate * (LEAVE if self._pays else ENTER)
        if self._pays:
            self._trial = 0
        self._planning.done(self._clock() - began)

    def _forget(self, kept: float) -> None:
        self._rows_seen, self._accepted, self._nodes = (
            kept * part for part in (self._rows_seen, self._accepted, self._nodes)
        )

    def _spend(self, allowance: Allowance, whole: float, worth: float) -> None:
        allowance.spend(max(whole - worth, _LEAST * whole))
        self._counts["probes"] += 1
