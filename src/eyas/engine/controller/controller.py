"""The controller: chooses before each round the tree shape with the most expected tokens per second, or plain decoding.

The drafter's arm forecasts the accepted tokens of each shape, and a cost model its seconds. A small share of the time
is spent on probes: rounds of other shapes, which measure what the shape in use can't show. `docs/controller.md`
explains the design.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from eyas.engine.controller.arms import Batch, DraftArm
from eyas.engine.controller.budget import Pace
from eyas.engine.controller.choice import Choice
from eyas.engine.controller.costs import SETTLING, CostModel
from eyas.engine.controller.explore import Probe
from eyas.engine.controller.observation import ObservationPolicy
from eyas.engine.controller.records import ControllerState, RoundRecord, Totals
from eyas.tree import TreeSpec

_THINKING = 0.002
"""The share of the time that planning may take."""
_COLD = 8
"""In this many first rounds the minimum overhead is taken, not the mean, because they find cold caches."""


class Overhead:
    """Running means of the seconds beyond the forecast, by kind of round: plain, drafted or looked up.

    These are means, not medians as for costs, because occasional work, such as a new plan, takes time too.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("plain", "drafted", "looked up"), 0.0)
        self._rounds = Counter[str]()
        self._last: tuple[str, float, float] | None = None
        """The kind of the latest round, its seconds beyond the forecast so far, and its seconds in all."""

    def learn(self, seconds: float, whole: float, kind: str, before: float) -> None:
        """Account for `seconds` beyond the forecast of a round that took `whole` seconds.

        The time that a round takes after it was measured is reported with the next one, as `before`.
        """
        if self._last is not None:
            last, beyond, length = self._last
            self._add(beyond + min(before, length), last)  # the system, not the round, causes longer pauses
        self._last = kind, seconds, whole

    def _add(self, seconds: float, kind: str) -> None:
        """Update the mean, or in the first rounds the minimum."""
        self._rounds[kind] += 1
        known = self._seconds[kind] if self._rounds[kind] > 1 else seconds
        step = (seconds - known) / 32
        self._seconds[kind] = known + step if self._rounds[kind] > _COLD else min(known, seconds)

    def beyond_plain(self, kind: str) -> float:
        """How many more unforecast seconds a round of this kind takes than a plain one."""
        return max(0.0, self._seconds[kind] - self._seconds["plain"])


class Controller:
    """Plans the draft tree of each round and learns from how the round went: a `TreePlanner` for `--tree auto`."""

    always_drafts = False

    def __init__(
        self,
        costs: CostModel,
        arm: DraftArm,
        *,
        max_length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Weigh `arm` against plain rounds by these `costs`.

        `max_length` is the target's context; `clock` gives the seconds that planning takes.
        """
        self.costs = costs
        self.arm = arm
        self._observation = ObservationPolicy()
        self._max_length = max_length
        self._clock = clock
        self._choice = Choice(arm)
        self._explorer = arm.explorer
        self._lookups = arm.lookups
        self._totals = Totals()
        self._overhead = Overhead()
        self._texts: set[int] = set()
        """The texts of the last round."""
        self.tree: TreeSpec | None = None
        """The shape of the latest plan; None = a plain round."""
        self._ahead = 0
        """How many further rounds reuse the last plan."""
        self._situation: tuple[int, ...] = ()
        """The batch that the latest forecasts were made for: rows, sampled rows, room, and the magnitude of lengths."""
        self._planning = Pace(_THINKING, least=8, most=256)
        self._unlearned: list[tuple[RoundRecord, set[int]]] = []
        """Rounds to learn from, and the texts of the round before each."""
        self._probe: Probe | None = None
        self._plain_for = 0.0
        """Seconds that plain rounds usually take, since the latest draft, or since these texts began."""
        self._deferred = 0
        """Rounds since the drafter last observed: about as many pairs as each row has deferred."""

    def observes(self, rows: int) -> bool:
        """Whether the drafter observes a sequence that begins as one of `rows`.

        One that looks up observes all: copies that don't pay beside other rows may pay as soon as these have ended.
        """
        return self._lookups is not None or self._observation.admits(rows)

    def decoded(self, rows: int) -> None:
        """Account for any round, of `rows` rows, whether the drafter observes them or not."""
        self._observation.decoded(rows)

    def _keeps_plan(self, texts: Sequence[int]) -> bool:
        """Whether the next round of these texts reuses the last plan; counts that round off."""
        planned = self._ahead > 0 and self._texts == set(texts)
        self._ahead -= planned
        return planned

    def plan(
        self,
        texts: Sequence[int],
        lengths: Sequence[int],
        sampled: Sequence[bool] | None = None,
        unread: Sequence[int] | None = None,
    ) -> TreeSpec | None:
        """The tree for a round of these `texts`, of which `lengths` tokens are committed; None = plain.

        `sampled` says which rows have a temperature above 0; None = none has. `unread` is the number of deferred pairs
        of each row, which a draft reads first; None = the rounds since the last draft.
        """
        if self._keeps_plan(texts):
            return self.tree
        self._end_stretch()
        room = self.arm.depth
        if self._max_length is not None:
            # the root's position is the row's length; a node past the context's end could never be emitted
            room = min(room, self._max_length - 1 - min(lengths, default=0))
        groups = (0,) * len(texts) if sampled is None else tuple(int(bool(one)) for one in sampled)
        batch = Batch(texts, lengths, groups, room)
        self.tree = None
        if texts and room > 0:
            self._renew(batch)
            self.tree = self._plan(batch, unread)
        return self.tree

    def _renew(self, batch: Batch) -> None:
        """Forecast again if the batch or its texts have changed, and at regular intervals."""
        rows, choice = batch.rows, self._choice
        situation = (rows, sum(batch.groups), batch.room, max(batch.lengths).bit_length())
        count = 3 if choice.rests else 4  # lengths matter little to plain rounds
        changed = situation[:count] != self._situation[:count]
        if self._texts != set(batch.texts):
            if not self._texts.issuperset(batch.texts):
                self._explorer.renew()
            if self._lookups is not None and self._texts.isdisjoint(batch.texts):
                self._choice.restart()  # the copies found in these texts may leave nothing to a network
            self.arm.follow(batch.texts)
        due = self._planning.due()
        if changed or due:
            self._situation = situation
            self._replan(batch, settles=due)
        else:
            choice.follow()

    def _plan(self, batch: Batch, unread: Sequence[int] | None) -> TreeSpec | None:
        """The tree with the most expected tokens per second, or that of a probe.

        A drafter that looks up copies does so in every round except probes, unless searching has turned out to cost
        more than it saves. If it finds nothing, the round is plain. Speculation begins once it would have saved the
        time of reading deferred pairs, so that little is lost if it pays only for a moment.
        """
        rows = batch.rows
        choice = self._choice
        prospects = self._choice.prospects
        waiting = sum((min(length, self._deferred) for length in batch.lengths) if unread is None else unread)

        def reading() -> float:
            return self.costs.reading_seconds(waiting, rows) if waiting else 0.0

        if self._texts.isdisjoint(batch.texts):
            choice.reconsider(reading())
        begins = choice.begin(reading)
        if self._probe is None and self.arm.drafts and prospects is not None:
            if choice.used is not None:
                self._probe = self._explorer.while_drafting(prospects, choice.used, self.arm.analysis)
            elif choice.wanted is None or self.arm.recordings is not None:  # is it worth a recording?
                self._probe = self._explorer.while_plain(
                    prospects, partial(self.arm.saved, prospects), reading, known=self.arm.texts.known
                )
        probe = self._probe
        lookups = self._lookups
        used = choice.used
        if probe is not None:
            if probe.prospect is None or prospects is None:
                return None
            tried = prospects.of(probe.prospect.shape)  # the batch may have changed since
            return self.arm.tree(tried, batch, probing=True)
        looks_up = lookups is not None and lookups.of(rows).looking
        planned = None if used is None and not looks_up else self.arm.tree(used, batch, probing=False)
        left = math.inf if self._max_length is None else self._max_length - max(batch.lengths)
        if prospects is not None:
            seconds = prospects.plain_seconds if used is None else used.seconds
            self._ahead = int(min(self._explorer.ahead(planned, seconds, left), begins))
        return planned

    def _replan(self, batch: Batch, *, settles: bool) -> None:
        """Choose the shape again; if it `settles`, after fitting costs to the latest rounds."""
        began = self._clock()
        self.arm.gain.settle(values=settles)
        if settles:  # too slow for every change of rows: a fifth of a round of a small target
            self.costs.settle()
        searching = 0.0 if self._lookups is None else self._lookups.of(batch.rows).seconds
        self.costs.overhead = self._overhead.beyond_plain("drafted") + searching
        self._choice.renew(self.arm.prospects(batch, self.costs, self._totals.prompt_pairs))
        if settles:
            self._planning.done(self._clock() - began)

    def learn(self, record: RoundRecord) -> None:
        """Learn from a measured round; rounds planned together are learned from together."""
        self._unlearned.append((record, self._texts))
        self._texts = set(record.texts)
        self._totals.count(record, 0 if record.spec is None else self.arm.width_of(record.spec))
        copied = not record.drafted and record.tokens > record.rows  # what it shows decides about the next copy
        if copied or not self._ahead:
            self._end_stretch()

    def _end_stretch(self) -> None:
        """Plan no further round ahead, and learn from those that were planned together."""
        self._ahead = 0
        # in order, because a record's `overhead` belongs to the round before it
        rounds = self._unlearned
        self._unlearned = []
        for record, before in rounds:
            self._totals.average(record)
            self._planning.round(record.whole)
            self._learn(record, before)

    def _learn(self, record: RoundRecord, before: set[int]) -> None:
        """Learn from a round; `before` has the texts of the round before it, so all others are new."""
        whole = record.whole
        drafted = record.drafted
        choice = self._choice
        probe = self._probe
        begins = before.isdisjoint(record.texts)
        settled = not drafted and record.tokens == record.rows and not begins and self._plain_for >= SETTLING
        usual = whole if choice.prospects is None else choice.prospects.plain_seconds
        self._plain_for = 0.0 if drafted else usual + (0.0 if begins else self._plain_for)
        self.costs.learn_round(
            record,
            cold=not settled,
            fresh=self._deferred > 0 or not before.issuperset(record.texts),
            counted=self.arm.recordings is None,
        )
        self._learn_overhead(record)
        judged = choice.used if probe is None else probe.prospect if choice.used is None else None
        accepted = self.arm.learn(record, judged, self._clock)
        self._deferred = 0 if drafted else self._deferred + 1
        choice.wait(record.rows, 0 if drafted else record.emitted - record.rows)
        used = probe is None and (drafted or record.tokens > record.rows)
        self._observation.round(record.rows, used or choice.wanted is not None)
        self._explorer.earn(whole)
        if self._lookups is not None and choice.prospects is not None:
            beyond = self._overhead.beyond_plain("looked up")
            copied, nodes = record.emitted - record.rows - accepted, record.tokens - record.rows
            added = choice.prospects.added(nodes) if nodes and not drafted else 0.0
            self._lookups.of(record.rows).account(record, copied, added, choice.rate, beyond)
        if self.arm.recordings is not None:
            if drafted and record.spec is not None and record.spec.recurs and choice.used is not None:
                self.arm.recordings.learn(record.rows, record.spec, whole, choice.used.seconds)
            self.arm.recordings.earn(whole)
        if probe is not None:
            self._count_probe(probe, record, settled)

    def _learn_overhead(self, record: RoundRecord) -> None:
        looked_up = record.spec is not None and not record.drafted
        kind = "drafted" if record.drafted else "looked up" if looked_up else "plain"
        unseen = 0.0  # besides draft, pass, and reading the emitted tokens, whose time isn't measured separately
        if record.drafted and record.seconds is not None:
            unseen = record.whole - record.draft_seconds - record.pass_seconds
            unseen -= self.costs.reading_seconds(record.emitted, record.rows)
            if self.arm.recordings is not None and self._choice.prospects is not None:  # a recording is a one-time cost
                unseen = min(unseen, self._choice.prospects.plain_seconds)
        self._overhead.learn(unseen, record.whole, kind, record.overhead)

    def _count_probe(self, probe: Probe, record: RoundRecord, settled: bool) -> None:
        """Charge a round of the current probe to the budget, and end the probe after its last round.

        A plain probe ends with the first round that measures plain decoding, which is `settled`.
        """
        lost = record.whole - record.emitted / self._choice.rate
        budget = self._explorer.trials if self._choice.used is None else self._explorer.probes
        budget.spend(max(lost, probe.least))
        ends = settled if probe.prospect is None else probe.rounds == 1
        self._probe = None if ends else probe._replace(rounds=probe.rounds - 1)
        self._totals.probed()

    @property
    def probing(self) -> bool:
        """Whether the last plan is a trial, made while rounds are plain."""
        return self._probe is not None and self._choice.used is None

    def keep(self) -> None:
        """Save what was learned about the drafter; called while the engine is idle."""
        self.arm.gain.keep()

    def snapshot(self) -> ControllerState:
        """The current state, for metrics."""
        used, prospects = self._choice.used, self._choice.prospects
        depth, width = (0, 0) if used is None else self.arm.size(used.shape)
        return replace(
            self._totals.state(),
            depth=depth,
            width=width,
            budget=0 if used is None else max(1, round(used.nodes)),
            predicted_tokens_per_second=self._choice.rate,
            plain_tokens_per_second=0.0 if prospects is None else prospects.plain_rate,
        )
