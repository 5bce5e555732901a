"""The controller: chooses before each round the tree shape with the most expected tokens per second, or plain decoding.

A gain model forecasts the accepted tokens of each shape, and a cost model its seconds. The shape is changed only for a
clear gain. A small share of the time is spent on probes, rounds of other shapes, to learn what the shape in use can't
show. `docs/controller.md` explains the design.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from eyas.engine.controller.base import ENTER, LEAVE, Controller
from eyas.engine.controller.costs import CostModel, Work
from eyas.engine.controller.explore import Explorer, Lasting, LookupTrials, Pace, Probe, Recordings
from eyas.engine.controller.gain import GainModel, found_values
from eyas.engine.controller.planner import Prospect, Prospects
from eyas.engine.controller.records import ControllerState, RoundRecord
from eyas.engine.controller.trees import PlannedTrees
from eyas.tree import TreeSpec
from eyas.tree.acceptance import Indices
from eyas.tree.draft_tree import Source

WIDTHS = (1, 2, 3, 4, 6, 8)
DEPTH = 10
_USUAL_SPREAD, _TRUSTED_AFTER = 0.2, 100
"""The spread of start-up costs on an idle machine, and the rounds after which any others have been corrected."""
_CHANGE, _CHANGE_RECORDED = 1.01, 1.05
"""The factor by which a shape must be faster than the one in use to replace it; the same where shapes are recorded."""
_DOUBT = 3.0
"""A shape is recorded once it would have saved this many times the recording's seconds: forecasts may be too high."""
_DRIFT = 1.25
"""The factor by which the texts' yield must change for a new plan, unless less decides whether to speculate."""
_ANALYSING = 0.005
"""The share of the time that analyzing drafts may take."""
_COLD = 8
"""The number of first rounds from which the least overhead is taken, not the average."""
_ANSWER = 100
"""An answer's assumed length, added to the emitted tokens over which the reading of prompts is spread."""
_SEARCHES = 8
"""Rounds in the running mean of the seconds that looking for copies takes."""


class Overhead:
    """Running means of the seconds beyond the forecast, by kind of round: plain, drafted or looked up.

    Means, not medians as for costs: what happens now and then, such as a new plan, has to be paid for too.
    """

    def __init__(self) -> None:
        self._seconds, self._rounds = dict.fromkeys(("plain", "drafted", "looked up"), 0.0), Counter[str]()
        self._last: tuple[str, float, float] | None = None
        """The kind of the latest round, its seconds beyond the forecast so far, and its seconds in all."""

    def learn(self, seconds: float, whole: float, kind: str, before: float) -> None:
        """Account for `seconds` beyond the forecast of a round that took `whole` seconds.

        The time that a round takes after it was measured is reported with the next one, as `before`.
        """
        if self._last is not None:
            last, beyond, length = self._last
            self._add(beyond + min(before, length), last)  # a longer interruption is due to the system
        self._last = kind, seconds, whole

    def _add(self, seconds: float, kind: str) -> None:
        """Update the mean, or in the first rounds, which find cold caches, the minimum."""
        self._rounds[kind] += 1
        known = self._seconds[kind] if self._rounds[kind] > 1 else seconds
        step = (seconds - known) / 32
        self._seconds[kind] = known + step if self._rounds[kind] > _COLD else min(known, seconds)

    def beyond_plain(self, kind: str) -> float:
        """Seconds that a round of this kind takes beyond a plain one, apart from the forecast."""
        return max(0.0, self._seconds[kind] - self._seconds["plain"])


class TreeController(Controller):
    """Plans trees of the shape that promises the most, or plain rounds."""

    def __init__(
        self,
        costs: CostModel,
        *,
        widths: Sequence[int] = WIDTHS,
        depth: int = DEPTH,
        max_length: int | None = None,
        counts_freely: bool = True,
        computes: bool = True,
        looks_up: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Choose among beams of `widths` (ascending) and trees up to `depth`; `max_length` is the target's context.

        `counts_freely`: whether nodes can be counted, and drafting stopped, without a device sync, as on a CPU.
        Elsewhere only the budget limits a tree. `computes`: whether the drafter has a network, whose levels take time;
        `looks_up`: whether it finds continuations on the host.
        """
        super().__init__(costs, clock)
        self.gain = GainModel(widths, depth, len(Source) if looks_up else 1)
        self._computes, self._looks_up = computes, looks_up
        self._widths, self._depth, self._max_length = tuple(widths), depth, max_length
        self._counts_freely = counts_freely
        self._analysing = Pace(_ANALYSING, least=1, most=64)
        self._explorer, self._lookups = Explorer(), LookupTrials()
        self._searching = 0.0
        """Seconds that looking for copies takes in addition to a network's draft: a running mean."""
        self._recordings = None if counts_freely else Recordings()
        self._recording = 0.0
        """Seconds that it takes to record the wanted shape."""
        self._prospects: Prospects | None = None
        self._trees = PlannedTrees(widths, counts_freely)
        self._lasting = Lasting()
        self._choice: Prospect | None = None
        self._best: Prospect | None = None
        """The shape that decides whether to speculate. It is in use, unless a shorter one is used in hope."""
        self._wanted: Prospect | None = None
        """A shape that promises more than plain rounds, but hasn't yet made up for reading the deferred pairs."""
        self._missed = 0.0
        """Seconds that `_wanted` would have saved so far."""
        self._probe: Probe | None = None
        self._deferred = 0
        """Rounds since the drafter last observed; about the number of tokens that it has deferred in each row."""
        self._overhead = Overhead()

    def _plan(
        self,
        texts: Sequence[int],
        lengths: Sequence[int],
        sampled: Sequence[bool] | None,
        unread: Sequence[int] | None,
    ) -> TreeSpec | None:
        """The tree that promises the most tokens per second, or shows what others would bring.

        A drafter that looks up does so in every round but probes, unless that turned out to cost more than it gains. If
        it finds nothing, the round is plain. Speculation begins once it would have saved the time of reading deferred
        pairs, so that a short moment in which it pays costs little.
        """
        rows, room = len(texts), self._depth
        if self._max_length is not None:
            # the root's position is the row's length; a node past the context's end could never be emitted
            room = min(room, self._max_length - 1 - min(lengths, default=0))
        if room < 1:
            return None
        groups = (0,) * rows if sampled is None else tuple(int(bool(one)) for one in sampled)
        situation = (rows, sum(groups), room, max(lengths).bit_length())
        count = 3 if self._choice is None and self._wanted is None else 4  # lengths matter little to plain rounds
        changed = situation[:count] != self._situation[:count]
        new = sum(text not in self._texts for text in texts)
        if new or len(self._texts) > rows:
            self.gain.follow(texts)
        if 2 * new > rows:
            self._explorer.renew()
            self._lookups.renew()
        rests = self._choice is None and self._wanted is None and self._probe is None and not self._looks_up
        if changed and rests and self._prospects is not None and not self._lasting.lasts(situation[:3]):
            return None
        due = self._planning.due()
        if changed or due or self._overtaken(rows):
            self._situation = situation
            self._replan(texts, lengths, groups, room, settles=due)
        waiting = sum((min(length, self._deferred) for length in lengths) if unread is None else unread)

        def reading() -> float:
            return self.costs.reading_seconds(waiting, rows) if waiting else 0.0

        missing = 0.0 if self._wanted is None else reading() + _DOUBT * self._recording - self._missed
        if self._wanted is not None and missing <= 0.0:
            self._choice, self._wanted = self._wanted, None
        prospect = self._choice
        if self._probe is None and self._computes and self._prospects is not None:
            known, analysis = self._prospects, self._analysing.cost
            if self._choice is not None:
                self._probe = self._explorer.beside(known, self._choice, rows, analysis)
            else:
                self._probe = self._explorer.instead_of_plain(known, reading, analysis)
        if self._probe is None and self._choice is None and self._looks_up and self._lookups.looking:
            return None if self._lookups.plain_due else self._spec(None, texts, groups)
        if self._probe is not None:
            prospect = self._probe.prospect
            if prospect is not None and self._prospects is not None:
                prospect = self._prospects.of(prospect.shape)  # the batch may have changed since
        planned = None if prospect is None else self._spec(prospect, texts, groups)
        if self._probe is None:
            left = math.inf if self._max_length is None else self._max_length - max(lengths)
            saved = self._saved(rows)
            enough = missing / saved if saved > 0.0 else math.inf
            self._ahead = int(min(self._explorer.ahead(planned, left), enough))
        return planned

    def _learn(self, record: RoundRecord, before: set[int]) -> None:
        whole, drafted = record.whole, record.drafted
        self._learn_costs(record, before)
        looked_up = record.spec is not None and not drafted
        kind = "drafted" if drafted else "looked up" if looked_up else "plain"
        unseen = 0.0  # beyond draft, pass and reading what was emitted, which isn't measured by itself
        if drafted and record.seconds is not None:
            unseen = whole - record.draft_seconds - record.pass_seconds
            unseen -= self.costs.reading_seconds(record.emitted, record.rows)
            if self._recordings is not None and self._prospects is not None:  # recording is done once
                unseen = min(unseen, self._prospects.plain_seconds)
        self._overhead.learn(unseen, whole, kind, record.overhead)
        copied = record.copied
        if record.draft is not None:
            self._learn_gain(record, copied)
        self._deferred = 0 if drafted else self._deferred + 1
        self._missed += self._saved(record.rows)
        used = self._probe is None and (drafted or record.tokens > record.rows)
        self.audience.round(record.rows, used or self._wanted is not None)
        self._analysing.round(whole)
        prospects = self._prospects
        self._explorer.earn(whole, self._speedup)
        self._lookups.earn(whole)
        if prospects is not None and record.spec is not None and record.spec.found_only:
            spent = whole + self._overhead.beyond_plain("looked up")
            gained = record.emitted / prospects.plain_rate - spent
            self._lookups.learn(gained, record.emitted, spent, record.tokens > record.rows)
        elif prospects is not None and drafted and self._looks_up and record.spec is not None and record.spec.looks_up:
            rate = prospects.plain_rate if self._choice is None else self._choice.rate
            self._lookups.learn(sum(copied) / rate - record.lookup_seconds, record.emitted, whole, True)
            self._searching += (record.lookup_seconds - self._searching) / _SEARCHES
        if self._recordings is not None:
            if drafted and record.spec is not None and record.spec.recurs and self._choice is not None:
                self._recordings.learn(record.rows, record.spec, whole, self._choice.seconds)
            self._recordings.earn(whole)
        if self._probe is not None:
            self._count_probe(record, whole)

    def _saved(self, rows: int) -> float:
        """Seconds that the wanted shape would save in each round of `rows` rows; 0 = none is wanted."""
        if self._wanted is None or self._prospects is None:
            return 0.0
        return self._prospects.plain_seconds - rows / self._wanted.rate_if(self.gain.hope, rows)

    def keep(self) -> None:
        self.gain.keep()

    @property
    def _speedup(self) -> float | None:
        """What speculation promises; None = rounds are plain."""
        if self._choice is None or self._prospects is None:
            return None
        return self._choice.rate / self._prospects.plain_rate

    @property
    def _least(self) -> float:
        """The multiple of the plain rounds' rate that a plan must promise.

        It is higher for beginning on costs that were measured in noise, until rounds have corrected them.
        """
        if self._choice is not None:
            return LEAVE
        doubt = min(1.0, max(0.0, self.costs.table.spread - _USUAL_SPREAD))
        return ENTER + doubt * max(0.0, 1.0 - self._counts["rounds"] / _TRUSTED_AFTER)

    @property
    def probing(self) -> bool:
        return self._probe is not None and self._choice is None

    def snapshot(self) -> ControllerState:
        choice, prospects = self._choice, self._prospects
        plain = prospects.plain_rate if prospects is not None else 0.0
        return replace(
            self._totals(),
            depth=0 if choice is None else choice.shape.depth + 1,
            width=0 if choice is None else self._widths[choice.shape.width],
            budget=0 if choice is None else max(1, round(choice.nodes)),
            predicted_tokens_per_second=plain if choice is None else choice.rate,
            plain_tokens_per_second=plain,
        )

    def _replan(
        self, texts: Sequence[int], lengths: Sequence[int], groups: Sequence[int], room: int, *, settles: bool
    ) -> None:
        """Choose the shape again; if it `settles`, after fitting costs to the latest rounds."""
        began = self._clock()
        self.gain.settle(values=settles)
        if settles:  # fitting costs takes a fifth of a round of a small target, and rows come and go often
            self.costs.settle()
        self.costs.overhead = self._overhead.beyond_plain("drafted") + self._searching * self._lookups.looking
        prospects = Prospects(
            self.gain.forecast(texts, groups),
            self.costs,
            self._widths,
            len(texts),
            lengths,
            depth=room,
            stops_early=self._counts_freely,
            prompt_pairs=self._prompt_pairs / (self._emitted + _ANSWER),
        )
        best, least = prospects.best, prospects.plain_rate * self._least
        if self._choice is not None and self._best is not None:
            held = prospects.of(self._best.shape)
            change = _CHANGE if self._counts_freely else _CHANGE_RECORDED
            best = held if best.rate < change * held.rate else best
        used: Prospect | None = None
        if self._computes and best.rate_if(self.gain.hope, len(texts)) >= least:
            used = best if best.rate >= least else prospects.short(best.shape)  # in hope
        self._recording = 0.0
        if used is not None and self._recordings is not None:
            self._recording = self._recordings.cost(used, self._widths, prospects)
            if self._choice is not None and not self._recordings.affords(self._recording):
                used = prospects.of(self._choice.shape)
            elif self._recording and used.rate < least:  # nothing is recorded in hope
                used = None
        self._wanted, self._choice = (used, None) if self._choice is None else (None, used)
        self._best = best
        if self._wanted is None:
            self._missed = 0.0
        self._prospects = prospects
        # forecasts don't include what is looked up, so rounds that look up may be faster
        self._trees.renew(prospects, self.gain.values, max(prospects.plain_rate, self._lookups.rate))
        if settles:
            self._planning.done(self._clock() - began)

    def _overtaken(self, rows: int) -> bool:
        """Whether the texts' yield has changed so much that the plan may have to change."""
        if self._prospects is None or self._best is None:
            return True
        wanted = self._choice is not None or self._wanted is not None
        drift = self.gain.drift
        if not 1.0 / _DRIFT < drift < _DRIFT:
            return True
        rate = self._best.rate_if(drift * self.gain.hope, rows)
        return self._computes and wanted != (rate >= self._least * self._prospects.plain_rate)

    def _spec(self, prospect: Prospect | None, texts: Sequence[int], groups: tuple[int, ...]) -> TreeSpec:
        """The tree of a shape, the same until the next plan; with None, a tree of what is looked up alone."""
        return self._trees.of(
            prospect,
            groups,
            () if prospect is None else self.gain.calibrations(texts),
            chooses=self._probe is None,
            keeps=self._probe is not None or self._analysing.due(),
            looks_up=self._looks_up and self._lookups.looking,
        )

    def _count_probe(self, record: RoundRecord, seconds: float) -> None:
        """Charge a round of the current probe to its budget, and end the probe after its last round."""
        if self._probe is None or self._prospects is None:
            return
        rate = self._prospects.plain_rate if self._choice is None else self._choice.rate
        self._probe.allowance.spend(max(seconds - record.emitted / rate, self._probe.least))
        hopeless = self._probe.hopeless(self._prospects.best.needed(self._prospects.plain_rate, record.rows))
        left = 0 if hopeless else self._probe.rounds - 1
        self._probe = self._probe._replace(rounds=left) if left else None
        self._counts["probes"] += 1

    def _learn_costs(self, record: RoundRecord, before: set[int]) -> None:
        tree = None if record.draft is None else record.draft.tree
        in_vain = tree is not None and tree.looked_up and not tree.size  # a plain pass
        if tree is None or in_vain or record.spec is None:
            plain = record.spec is None or in_vain
            # the first plain round of its texts, or of a probe, finds cold caches
            cold = before.isdisjoint(record.texts) or (self._probe is not None and self._probe.warms_up)
            if plain and not cold:
                seconds = record.pass_seconds if in_vain else record.whole
                self.costs.learn(Work(record.rows, record.lengths, record.tokens, seconds, plain=True))
            return
        if tree.looked_up:  # nothing was drafted, and the pairs are deferred
            padded = record.padded if self._counts_freely else 0
            self.costs.learn(Work(record.rows, record.lengths, record.tokens, record.pass_seconds, padded=padded))
            return
        levels = tree.levels
        if self._deferred or not before.issuperset(record.texts):
            levels = 0  # drafting began with observing deferred pairs, or the prompts of new rows
        passing = record.pass_seconds
        if not self._counts_freely:
            # the host's clock can't separate drafting from verifying on a device
            drafting = self.costs.draft_seconds(record.rows, record.spec.max_fanout, record.spec.depth)
            passing, levels = record.draft_seconds + passing - float(drafting), 0
        self.costs.learn(
            Work(
                record.rows,
                record.lengths,
                record.tokens,
                passing,
                padded=record.padded if self._counts_freely else 0,
                width=record.spec.max_fanout,
                levels=levels,
                draft_seconds=record.draft_seconds - record.lookup_seconds,
                pairs=record.emitted if record.seconds is not None else 0,
                observe_seconds=record.whole - record.draft_seconds - record.pass_seconds,
            )
        )

    def _learn_gain(self, record: RoundRecord, copied: Sequence[int]) -> None:
        """Learn from what a draft yielded, and from its nodes if reading them takes no sync or it was made for that."""
        if record.draft is None or record.spec is None:
            return
        began, reads = self._clock(), self._counts_freely or record.spec.keeps_candidates
        groups: Indices = np.array(record.spec.groups or (0,) * record.rows)
        if reads:
            self.gain.learn(record.draft, groups, record.drafting)
        if record.spec.keeps_candidates:
            spent = self._clock() - began
            if self._recordings is not None and self._recordings.usual and record.seconds is not None:
                spent += max(0.0, record.seconds - self._recordings.usual)
            self._analysing.done(spent)
        kept = [len(path) - 1 - found for path, found in zip(record.draft.paths, copied, strict=True)]
        network = sum(kept)
        judged = self._choice if self._probe is None else self._probe.prospect if self._probe.tries_text else None
        if judged is not None and not record.draft.tree.looked_up:
            share = 1.0 if record.drafting is None else sum(record.drafting) / record.rows
            self.gain.judge(judged.accepted, record.texts, record.draft.tree.promise, kept, record.drafting)
            if self._probe is not None:
                promised, brought = self._probe.promised + judged.accepted * share, self._probe.brought + network
                self._probe = self._probe._replace(promised=promised, brought=brought)
        found = found_values(record.draft.tree, record.spec, groups) if reads else 0.0
        if found > 0.0:
            self.gain.judge_found(found, record.emitted - record.rows - network)
