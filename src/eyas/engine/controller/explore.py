"""Exploration: probes, which are rounds with a shape other than the one in use, within a budget of lost time.

While speculating there are two kinds of probes: plain rounds, which keep the cost of plain decoding current, and rounds
of a larger shape, which show what its nodes are worth. While not speculating, a short chain shows what the texts yield:
a few rounds of it when they are new, and now and then one. Drafts first read everything that the drafter has deferred.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eyas.engine.controller.planner import BEGIN, Prospect, Prospects
from eyas.engine.controller.records import RoundRecord
from eyas.targets.shapes import USES, recurring
from eyas.tree import TreeSpec

_FOR_PLAIN, _FOR_LARGER, _FOR_TRIALS, _FOR_RARE_TRIALS, _FOR_FURTHER = 0.002, 0.004, 0.01, 0.002, 0.003
"""Shares of all time that each kind of probe may lose: plain rounds and larger shapes while speculating; the trials of
new texts while not, those that would need more luck than texts have, and further trials of the same texts."""
PLAIN_PAIR = 2
"""Plain rounds of a probe. The first one after a draft takes 5 to 20% longer, as caches are full of other weights, so
only the second one shows what plain decoding takes."""
_LEAST = 0.02
"""The least share of its time that a probe is assumed to lose, whatever the models predict."""
_LARGER = ({"deeper": 2}, {"wider": 1, "deeper": 1}, {"lower": 3})
_FOR_SEARCHES = 0.01
"""The share of all time that looking for copies in vain may take."""
_SEARCH_FADE = 1.0 - 1.0 / 16.0
"""The factor by which running means of searches decay with each search: passages begin and end within some rounds."""
_HOPED = 2.0
"""How many times its cost the first search is hoped to save, so that some searches in vain don't end all others."""
_CHECKS = (3, 12, 48)
"""Rounds after which a plain one follows at any price: its cost may have been measured too high at start-up."""
_MANY_ROWS, _JUDGED, _HARDLY, _SKIPPED, _LATEST = 4, 64, 0.02, 8, 16
"""The number of rows from which sequences may go unobserved; the rounds that are judged together; the share of them
with drafts that counts as none; the number of sequences that then go unobserved for each one that was observed; the
rounds that show how many rows there usually are."""
_LASTING = 4
"""The rounds after which a batch that has changed is planned for while nothing is drafted."""
_STRETCH, _REST = 8, 16
"""Rounds in a row that are planned together, and learned from together, with and without drafts. After each pass, whose
weights fill the caches, every line of Python is slow."""
_TRIAL_AT, _TRIAL_ROUNDS, _TRIAL_GAIN, _IN_VAIN, _PAID = 8, 8, 3.0, 4, 1.15
"""After `_TRIAL_AT` tokens new texts are tried with `_TRIAL_ROUNDS` rounds of drafting. Texts differ: one may yield
more by the share `_TRIAL_GAIN` (in a single row). If drafting wouldn't pay for that one, trials are rare: what was
learned may hold no longer. The rounds after which a trial is usually given up, and the speedup after which the next
text is tried in any case."""
_FOR_RECORDING, _RECORDING = 0.02, 60.0
"""The share of all time that recording other shapes may take while speculating on an accelerator, and the assumed
length of the first recording, in plain rounds."""


class Probe(NamedTuple):
    """A few rounds of another shape, spent on learning."""

    prospect: Prospect | None
    """The shape and its forecast; None = plain rounds."""
    rounds: int
    """The remaining rounds."""
    least: float
    """The least seconds that a round is charged with, so that a lucky one doesn't lead straight to another."""
    allowance: Allowance
    """The budget that is charged."""
    tries_text: bool = False
    """Whether its purpose is to show what a new text yields."""
    promised: float = 0.0
    """The accepted tokens that the rounds of such a probe have promised so far."""
    brought: float = 0.0
    """The accepted tokens that they have brought."""

    @property
    def warms_up(self) -> bool:
        """Whether this round is plain and another plain one follows, which is the one that counts."""
        return self.prospect is None and self.rounds > 1

    def hopeless(self, needed: float) -> bool:
        """Whether a text has yielded less than `needed` times what was promised, by more than one token."""
        return self.tries_text and self.brought + 1.0 < needed * self.promised


class Allowance:
    """A budget of seconds that may be lost, which grows by a share of all time."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = 0.0

    def earn(self, seconds: float) -> None:
        """Add the budget's share of `seconds` of elapsed time."""
        self._credit += self._share * seconds

    def affords(self, cost: float, further: Callable[[], float] | None = None) -> bool:
        """Whether `cost` seconds may be lost now. More than twice that is never saved up, so probes don't cluster.

        A `further` cost is computed only if the rest is covered.
        """
        if further is not None:
            if self._credit < cost:
                return False
            cost += further()
        self._credit = min(self._credit, 2.0 * cost)
        return self._credit >= cost

    def spend(self, cost: float) -> None:
        """Charge the budget with `cost` lost seconds."""
        self._credit -= cost


class Explorer:
    """Proposes probes within the budget of each kind."""

    def __init__(self, whole: int = 0) -> None:
        """`whole`: the rounds of a trial of drafts that have one size, and can't be judged sooner; 0 = any others."""
        self._whole = whole
        self._plain, self._larger, self._trials, self._rare, self._further = map(
            Allowance, (_FOR_PLAIN, _FOR_LARGER, _FOR_TRIALS, _FOR_RARE_TRIALS, _FOR_FURTHER)
        )
        self._trials.earn(math.inf)  # the first one is free
        self._direction = self._speculated = 0
        self._age = 0
        """Rounds since most of the texts being written had begun."""
        self._together = True
        """Whether they began together."""

    def renew(self, *, together: bool) -> None:
        """Account for new texts in most rows, which began `together` or one by one."""
        self._age, self._together = 0, together

    def ahead(self, planned: TreeSpec | None, left: float) -> int:
        """How many more rounds may be like `planned` until a probe may be due; `left` is a row's room in tokens."""
        if planned is None:
            return (min(_REST, _TRIAL_AT - self._age) if self._age < _TRIAL_AT else _REST) - 1
        if planned.keeps_candidates or left < _STRETCH * (planned.depth + 2) or self._age < _TRIAL_AT:
            return 0  # the first rounds of a text say the most about it
        return min((_STRETCH, *(at - self._speculated for at in _CHECKS if at > self._speculated))) - 1

    def earn(self, seconds: float, speedup: float | None) -> None:
        """Account for a round of `seconds`, and the speedup that speculation promises; None = rounds are plain."""
        self._age += 1
        self._speculated += speedup is not None
        for allowance in (self._rare, self._further) if speedup is None else (self._plain, self._larger):
            allowance.earn(seconds)
        paid = speedup is not None and speedup > _PAID
        self._trials.earn(math.inf if paid else seconds)  # after a text that paid, the next is always tried

    def beside(self, prospects: Prospects, choice: Prospect, rows: int, analysis: float) -> Probe | None:
        """An affordable probe while speculating, if any; drafts also cost the `analysis` of candidates, in seconds."""
        least = _LEAST * choice.seconds
        loss = PLAIN_PAIR * (prospects.plain_seconds - rows / choice.rate) + prospects.catching_up
        if self._speculated in _CHECKS or self._plain.affords(max(loss, least)):
            self._speculated += 1  # else a check would follow itself
            return Probe(None, PLAIN_PAIR, prospects.catching_up / PLAIN_PAIR, self._plain)
        if self._whole:
            return None
        larger = prospects.larger(choice.shape, **_LARGER[self._direction % len(_LARGER)])
        loss = larger.seconds - (rows + larger.accepted) / choice.rate
        if self._larger.affords(max(loss, least) + analysis):
            self._direction += 1
            return Probe(larger, 1, least + analysis, self._larger)
        return None

    def instead_of_plain(
        self, prospects: Prospects, usual: float, reading: Callable[[], float], analysis: float
    ) -> Probe | None:
        """An affordable probe while not speculating, if any; texts of the `usual` kind yield that many times more.

        Its cost includes the `analysis` of candidates and the `reading` of deferred pairs, in seconds. The latter is
        computed only if the rest is covered: plain rounds of a small target take little longer than computing it.
        """
        # with all that it offers: the nodes that are likely enough to pay are too few to tell texts apart
        tried = prospects.of(prospects.short(prospects.best.shape).shape._replace(threshold=0))
        loss = max(tried.seconds - prospects.plain_seconds, _LEAST * prospects.plain_seconds)
        if self._whole:
            cost = self._whole * loss + reading()
            return (
                Probe(tried, self._whole, _LEAST * tried.seconds, self._further)
                if self._further.affords(cost)
                else None
            )
        if self._age == _TRIAL_AT:
            more = _TRIAL_GAIN / math.sqrt(prospects.rows) if self._together else 0.0  # many are seldom all alike
            pays = tried.rate_if(usual * (1.0 + more), prospects.rows) > BEGIN * prospects.plain_rate
            allowance = self._trials if pays else self._rare
            if allowance.affords(_IN_VAIN * loss, reading):
                return Probe(tried, _TRIAL_ROUNDS, 0.0, allowance, tries_text=True)
        loss += analysis
        if self._further.affords(loss, reading):
            return Probe(tried, 1, loss, self._further, tries_text=True)
        return None


class Audience:
    """Decides, when a sequence begins, whether the drafter observes it.

    Observing costs a resting drafter a few percent of a small target's round. If hardly any round drafted at a number
    of rows (numbers up to the next power of two are counted together), several times as many of the sequences that
    begin next go unobserved. With few rows every text is tried: one may be far easier than the last.

    Clients that wait for their answers leave together and come back one by one, so that a sequence is expected to have
    as many neighbors as the latest ones had.
    """

    def __init__(self) -> None:
        self._begun, self._rounds, self._used, self._unobserved = (Counter[int]() for _ in range(4))
        self._usual = 0.0
        """The running mean of the rows of all rounds, observed or not."""

    def decoded(self, rows: int) -> None:
        """Account for any round, of `rows` rows."""
        self._usual += (rows - self._usual) / _LATEST

    def admits(self, rows: int) -> bool:
        """Whether a sequence that begins as one of `rows` is observed."""
        load = max(rows, round(self._usual)).bit_length()
        if self._unobserved[load]:
            self._unobserved[load] -= 1
            return False
        self._begun[load] += 1
        return True

    def round(self, rows: int, used: bool) -> None:
        """Account for a round of `rows` rows, some observed; whether it `used` the drafter."""
        load = rows.bit_length()
        self._rounds[load] += 1
        self._used[load] += used
        begun, rounds = self._begun[load], self._rounds[load]
        if rows >= _MANY_ROWS and begun >= rows and rounds >= _JUDGED:
            if self._used[load] <= _HARDLY * rounds:
                self._unobserved[load] = _SKIPPED * begun
            self._begun[load] = self._rounds[load] = self._used[load] = 0


class Lasting:
    """Decides whether a batch is worth a plan while nothing is drafted: once it has lasted for some rounds.

    Requests come and go one after the other, and planning for each of them takes longer than it is worth.
    """

    def __init__(self) -> None:
        self._batch: tuple[int, ...] = ()
        self._rounds = 0

    def lasts(self, batch: tuple[int, ...]) -> bool:
        """Whether a `batch` without a plan has lasted, this round included."""
        self._rounds = self._rounds + 1 if batch == self._batch else 0
        self._batch = batch
        return self._rounds >= _LASTING


class CopySearch:
    """Decides which rounds look for copies: those in which that pays, and others for a share of all time.

    Only the search itself is at stake, which takes the host's time: whether a copy is verified is decided by what its
    nodes are worth, and that is learned from every copy found.
    """

    def __init__(self) -> None:
        self._budget = Allowance(_FOR_SEARCHES)
        self._gain: float | None = None
        """Seconds that a search saves, a running mean; None = there was none."""
        self._cost = 0.0
        """Seconds that a search takes, a running mean."""
        self.looking = True
        """Whether the next round looks for copies."""

    @property
    def pays(self) -> bool:
        """Whether searches save at least the time that they take."""
        return self._gain is None or self._gain >= self._cost

    @property
    def seconds(self) -> float:
        """Seconds that searching adds to a network's draft; 0 while only few rounds search."""
        return self._cost if self.pays else 0.0

    def account(self, record: RoundRecord, copied: int, added: float, rate: float, beyond: float) -> None:
        """Account for a round of any kind, where plain rounds or those in use make `rate` tokens per second.

        `copied`: accepted tokens that no network guessed; `added`: seconds that copies' nodes added to the pass;
        `beyond`: seconds that a round that only looks up takes beyond what is measured.
        """
        self._budget.earn(record.whole)
        if record.spec is not None and (record.spec.found_only or record.lookup_seconds):
            cost = record.draft_seconds + beyond if record.spec.found_only else record.lookup_seconds
            if self._gain is None:
                self._gain, self._cost = _HOPED * cost, cost
            elif not self.pays:
                self._budget.spend(self._cost)
            self._gain = self._gain * _SEARCH_FADE + (1.0 - _SEARCH_FADE) * (copied / rate - added)
            self._cost = self._cost * _SEARCH_FADE + (1.0 - _SEARCH_FADE) * cost
        self.looking = self.pays or self._budget.affords(self._cost)


class Recordings:
    """The trees that an accelerator has recorded: recording one takes as long as dozens of passes.

    A tree's draft, a pass of its width and the reading of its pairs are recorded in the first rounds that use it.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        """`widths` are those of the beams among which a plan chooses."""
        self._widths = tuple(widths)
        self._allowance = Allowance(_FOR_RECORDING)
        self._uses = Counter[tuple[int, TreeSpec]]()  # by recurring number of rows and tree
        self._spent = defaultdict[tuple[int, TreeSpec], float](float)
        self._latest = 0.0
        """Seconds that the latest recording took; 0 = not known."""
        self.usual = 0.0
        """Seconds of a usual round that replays recordings; 0 = there was none."""

    def cost(self, wanted: Prospect, prospects: Prospects) -> float:
        """The seconds that it takes to record a shape; 0 if it is recorded already."""
        tree = wanted.recurring_tree(self._widths[wanted.shape.width], prospects.rows)
        if self._uses[recurring(prospects.rows), tree]:
            return 0.0
        return self._latest or _RECORDING * prospects.plain_seconds

    def affords(self, cost: float) -> bool:
        """Whether `cost` seconds may be spent on recording a shape other than the one in use."""
        return not cost or self._allowance.affords(cost)

    def earn(self, seconds: float) -> None:
        """Account for a round of any kind that took `seconds`."""
        self._allowance.earn(seconds)

    def learn(self, rows: int, tree: TreeSpec, seconds: float, forecast: float) -> None:
        """Learn from a round of `rows` rows with `tree` that took `seconds`, where `forecast` were expected."""
        key = recurring(rows), tree
        self._uses[key] += 1
        if self._uses[key] <= USES:
            lost = max(0.0, seconds - forecast)
            self._allowance.spend(lost)
            self._spent[key] += lost
            self._latest = max(self._spent[key], forecast)
        else:
            self.usual = seconds if not self.usual else self.usual + 0.05 * (min(seconds, 3 * self.usual) - self.usual)


class Pace:
    """Decides when to repeat some work, so that it takes no more than a share of the time."""

    def __init__(self, share: float, least: int, most: int) -> None:
        """Repeat every `least` to `most` rounds, if possible within `share` of the rounds' time; begin at once."""
        self._share, self._least, self._most = share, least, most
        self._cost = 0.0
        self._since = most
        self._seconds = 0.0

    def due(self) -> bool:
        """Whether the work should be done now."""
        affordable = self._seconds * self._share >= self._cost
        return self._since >= self._most or (self._since >= self._least and affordable)

    @property
    def cost(self) -> float:
        """The seconds that the work usually takes."""
        return self._cost

    def round(self, seconds: float) -> None:
        """Account for a decoding round that took `seconds`."""
        self._since += 1
        self._seconds += seconds

    def done(self, seconds: float) -> None:
        """Account for the work, which took `seconds`; a single outlier changes its expected cost little."""
        self._cost = seconds if self._cost == 0.0 else self._cost + 0.2 * (min(seconds, 3 * self._cost) - self._cost)
        self._since, self._seconds = 0, 0.0
