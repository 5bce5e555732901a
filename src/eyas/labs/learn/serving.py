"""The parts of a learning server next to its engine: the collector, and a thread that swaps generations.

The thread checks the folder's state once a second. A generation that is wanted there but not served is loaded and
offered to the engine's drafter as a trial, and the trial's verdict is written back. Another thread signals the learner
five times a second that the server is at work, even while a drafter is loaded. The engine's thread does no disk I/O.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector as SeriesCollector

from eyas.data.capture.capture import captured_target
from eyas.drafters.base import Drafter
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import local_directory, make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.errors import EyasError, UsageError
from eyas.labs.learn.collect import Collector, LearnRule, digest_of
from eyas.labs.learn.folder import LearnFolder, LearnState, new_settings
from eyas.labs.learn.swap import SwapDrafter
from eyas.labs.learn.traffic import TrafficStore
from eyas.labs.learn.trial import Canary
from eyas.serve.learner import Learner
from eyas.targets import Target
from eyas.targets.tokenizers import eos_token_ids, load_tokenizer, turn_end_ids

if TYPE_CHECKING:
    from prometheus_client import Metric

    from eyas.engine.controller import ControllerState
    from eyas.engine.round import RoundOutput
    from eyas.types import EngineState

POLL_SECONDS = 1.0
"""Seconds between two checks of the folder."""
_HEARTBEAT_SECONDS = 0.2
"""Seconds between two busy signals to the learner."""
_MINUTE = 60.0
_MAX_POINTS = 1440
"""Maximum points of the curve: a day of minutes."""

log = logging.getLogger("eyas.serve.learn")


@dataclass(frozen=True)
class LearnConfig:
    """What a server learns from, and how it swaps."""

    folder: Path
    rule: LearnRule = field(default_factory=LearnRule)
    limit: int = 4 << 30
    """Maximum bytes of traffic on disk."""
    canary: float = 0.1
    """The share of rows that a generation on trial gets."""
    apart: tuple[str, ...] = ()
    """Clients with generations of their own, which learn only from their requests and serve only them."""


class _Point(NamedTuple):
    """The drafted rounds of a minute."""

    minute: int
    generation: int
    rounds: int
    accepted: int


class LengthCurve:
    """Accept length over time, one point per minute, in memory only. One thread adds rounds, others read."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._points: deque[_Point] = deque(maxlen=_MAX_POINTS)

    def add(self, generation: int, offered: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a round whose rows were offered trees of these depths, while this generation served."""
        counts = [count for depth, count in zip(offered, accepted, strict=True) if depth]
        if not counts:
            return
        minute = int(self._clock() // _MINUTE)
        points = self._points
        more = _Point(minute, generation, len(counts), sum(counts))
        if points and points[-1][:2] == more[:2]:
            more = _Point(minute, generation, points[-1].rounds + more.rounds, points[-1].accepted + more.accepted)
            points[-1] = more
        else:
            points.append(more)

    def read(self) -> list[dict[str, Any]]:
        """The points, oldest first; `time` in seconds since the epoch."""
        return [
            {
                "time": one.minute * _MINUTE,
                "generation": one.generation,
                "accept_length": round(1.0 + one.accepted / one.rounds, 3),
            }
            for one in list(self._points)
        ]


class Learning(Learner):
    """Wraps an engine's drafter, collects its rows, and swaps it. `start` after the engine is made, `close` at the end.

    As an observer it signals the learner when the server is at work. Each client in `apart` has a `Learning` of its
    own, in a subfolder.
    """

    def __init__(self, config: LearnConfig, poll: float = POLL_SECONDS, client: str = "") -> None:
        """`client`: the owner of these generations; "" = all clients that aren't apart."""
        self.config = config
        self.client = client
        self.apart: list[Learning] = []
        self._first: NetworkDrafter | None = None
        self._poll = poll
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="learn", daemon=True)
        self._load: Callable[[Path], NetworkDrafter] = _no_engine
        self._heartbeat = threading.Thread(target=self._beat, name="learn-signs", daemon=True)
        self._worked = threading.Event()
        self._working = False
        self.folder: LearnFolder | None = None
        self.collector: Collector | None = None
        self.drafter: SwapDrafter | None = None
        self.trial: Canary | None = None
        self.serving = 0
        """The generation of rows that aren't on trial."""
        self.swaps = 0
        self.curve = LengthCurve()

    def wrap(self, options: DrafterOptions, model: str) -> Callable[[Target, Drafter], Drafter]:
        """The wrapper for the drafter that these options made. It raises UsageError for drafters that can't learn."""

        def around(target: Target, drafter: Drafter) -> Drafter:
            if not isinstance(drafter, NetworkDrafter) or options.source is None:
                raise UsageError("`learn=` is for drafters that are networks with files of their own (`draft_model=`)")
            source = local_directory(options.source)
            final = target.num_layers + 1
            if not source.is_dir():
                raise UsageError(f"`learn=` needs the drafter as a folder, and {source} is a file: convert it first")
            facts = captured_target(target, Path(model).name or model)
            sizes = target.hidden_size, target.vocab_size
            wanted = new_settings(model, source, facts, drafter.taps, sizes)
            load = _loader(options, target, model, drafter)
            store = self._open(LearnFolder.prepare(self.config.folder, source, wanted), load, drafter)
            assert self.folder is not None
            salt = bytes.fromhex(self.folder.settings.salt)
            stores = {}
            for client in self.config.apart:
                name = digest_of(client, salt)
                path = self.config.folder / "apart" / name
                one = Learning(replace(self.config, folder=path, apart=()), self._poll, client)
                stores[name] = one._open(LearnFolder.prepare(path, source, wanted), load, drafter)
                self.apart.append(one)
            end_ids = {*eos_token_ids(target.model), *turn_end_ids(load_tokenizer(model))}
            self.collector = Collector(store, self.config.rule, end_ids, salt=salt, apart=stores)
            assert self._first is not None
            return SwapDrafter(self.serving, self._first, final, self.collector)

        return around

    def _open(
        self, folder: LearnFolder, load: Callable[[Path], NetworkDrafter], drafter: NetworkDrafter
    ) -> TrafficStore:
        """Begin with the folder's settled generation, or the first `drafter`; returns the store for its rows."""
        self.folder = folder
        self._load = load
        self._first = self._settled(folder.state.settled) or drafter
        return TrafficStore(folder.traffic, folder.settings.layout, self.config.limit)

    def _settled(self, number: int) -> NetworkDrafter | None:
        """The drafter that served last; None if that was the first, or if it can't be loaded and is reverted."""
        assert self.folder is not None
        if not number:
            return None
        try:
            found = self._load(self.folder.generation(number))
        except (EyasError, OSError) as error:
            self._revert(number, f"it can't be served: {error}")
            return None
        self.serving = number
        return found

    def start(self, drafter: Drafter) -> None:
        """Begin to swap the engine's drafter, which `wrap` made."""
        assert isinstance(drafter, SwapDrafter)
        self.drafter = drafter
        for one in self.apart:
            assert one._first is not None
            drafter.generations.offer(one.serving, one._first, client=one.client)
            one.start(drafter)
            log.info("learning separately for one API key in %s", one.config.folder)
        self._thread.start()
        self._heartbeat.start()

    def close(self) -> None:
        """End the threads and write the collected rows."""
        for one in self.apart:
            one.close()
        self._ended.set()
        for thread in (self._thread, self._heartbeat):
            if thread.is_alive():
                thread.join(10)
        if self.collector is not None:
            self.collector.close()

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        """Note that the server is at work, and add the step's round to the curve."""
        self._working = bool(state.running or state.prefilling or state.waiting)
        self._worked.set()
        for one in self.apart:
            one.stepped(state, controller, None)
        if outcome is not None:
            self.curve.add(self.serving, outcome.offered, outcome.accepted)

    def overview(self) -> dict[str, Any]:
        """What the playground shows: the folder's overview and the curve. Reads the disk."""
        assert self.folder is not None
        return {**self.folder.overview(), "curve": self.curve.read()}

    def series(self, model_name: str) -> LearnSeries:
        """The Prometheus series of this server."""
        return LearnSeries(self, model_name)

    # The threads

    def _beat(self) -> None:
        """Signal that the server is at work while it makes steps or has requests left."""
        assert self.folder is not None
        while not self._ended.wait(_HEARTBEAT_SECONDS):
            if self._working or self._worked.is_set():
                self._worked.clear()
                self.folder.mark_busy()

    def _run(self) -> None:
        while not self._ended.wait(self._poll):
            try:
                self.look()
            except (EyasError, OSError) as error:
                log.warning("learning: %s", error)

    def look(self) -> None:
        """Write a verdict back, then begin the wanted generation. Called by the thread, or by a test in its place."""
        assert self.folder is not None
        if self.trial is not None and self.trial.report is not None:
            self._conclude(self.trial)
        state, trial = self.folder.state, self.trial
        if state.wanted != (self.serving if trial is None else trial.new):
            self._begin(state.wanted, at_once=state.wanted == state.settled)

    def _begin(self, wanted: int, at_once: bool) -> None:
        """Serve a generation: immediately if it is the settled one, else on trial next to the one in service."""
        assert self.folder is not None
        assert self.drafter is not None
        if wanted == self.serving:  # the trial was called off
            self.trial = None
            self.drafter.generations.serve_only(wanted, self.client)
            log.info("learning: generation %d serves alone again", wanted)
            return
        try:
            drafter = self._load(self.folder.generation(wanted))
        except (EyasError, OSError) as error:
            self._revert(wanted, f"it can't be served: {error}")
            return
        self.swaps += 1
        if at_once:
            self.trial = None
            self.serving = wanted
            self.drafter.generations.offer(wanted, drafter, client=self.client)
            log.info("learning: generation %d serves", wanted)
            return
        self.trial = Canary(self.serving, wanted, self.config.canary)
        self.drafter.generations.offer(wanted, drafter, self.trial, self.client)
        self.folder.note("trial", generation=wanted, beside=self.serving)
        log.info("learning: generation %d is tried on %.0f%% of rows", wanted, 100 * self.config.canary)

    def _conclude(self, trial: Canary) -> None:
        assert self.folder is not None
        assert self.drafter is not None
        assert trial.report is not None
        self.trial = None
        if trial.report.verdict == "revert":
            self.drafter.generations.serve_only(trial.old, self.client)
            self._revert(trial.new, trial.report.reason)
            return
        self.serving = trial.new
        self.drafter.generations.serve_only(trial.new, self.client)

        def settle(state: LearnState) -> LearnState | None:
            if state.wanted != trial.new:  # changed by hand meanwhile: it begins next
                return None
            return state.model_copy(update={"settled": trial.new})

        self.folder.change(settle, "settled", generation=trial.new, reason=trial.report.reason)
        log.info("learning: generation %d stays: %s", trial.new, trial.report.reason)

    def _revert(self, number: int, reason: str) -> None:
        assert self.folder is not None

        def back(state: LearnState) -> LearnState:
            wanted, settled = (self.serving if one == number else one for one in (state.wanted, state.settled))
            refused = {**state.refused, number: reason}
            return state.model_copy(update={"wanted": wanted, "settled": settled, "refused": refused})

        self.folder.change(back, "reverted", generation=number, reason=reason)
        log.warning("reverted generation %d: %s", number, reason)


def _no_engine(path: Path) -> NetworkDrafter:
    raise UsageError(f"{path} can't be loaded: there is no engine yet")


def _loader(
    options: DrafterOptions, target: Target, model: str, like: NetworkDrafter
) -> Callable[[Path], NetworkDrafter]:
    """A function that loads generations as the first drafter was, with EyasError for one of another form."""

    def load(path: Path) -> NetworkDrafter:
        made = make_drafter(options.of(path, options.method), target, model=model)
        if not isinstance(made, NetworkDrafter) or made.network.config != like.network.config or made.taps != like.taps:
            raise UsageError(f"{path} has another form than the drafter in service (sizes, taps or vocabulary)")
        return made

    return load


class LearnSeries(SeriesCollector):
    """The Prometheus series of a learning server."""

    def __init__(self, learning: Learning, model_name: str) -> None:
        self._learning = learning
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        """The series of generations, collected rows and the trial."""
        learning = self._learning
        labels = ["model_name"]
        collector, trial = learning.collector, learning.trial
        counts = {} if collector is None else collector.counts
        gauges = {
            "learn_generation": ("The generation of the drafter in service.", learning.serving),
            "learn_on_trial": ("The generation on trial; 0 = none.", 0 if trial is None else trial.new),
            "learn_collecting": (
                "Whether rows are collected.",
                int(collector is not None and collector.stopped is None),
            ),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(f"eyas:{name}", text, labels=labels)
            family.add_metric([self._model], value)
            yield family
        totals = {
            "learn_rows": ("Rows of traffic written to disk.", counts.get("rows", 0)),
            "learn_tokens": ("Tokens in the rows written to disk.", counts.get("tokens", 0)),
            "learn_rows_dropped": ("Rows left out because the disk was too slow.", counts.get("dropped", 0)),
            "learn_swaps": ("Generations loaded while serving.", learning.swaps),
        }
        for name, (text, value) in totals.items():
            counter = CounterMetricFamily(f"eyas:{name}", text, labels=labels)
            counter.add_metric([self._model], value)
            yield counter
        lengths = GaugeMetricFamily(
            "eyas:learn_accept_length", "Accept length of drafted rounds on trial.", labels=[*labels, "generation"]
        )
        for generation, arm in ({} if trial is None else trial.arms).items():
            lengths.add_metric([self._model, str(generation)], arm.accept_length)
        yield lengths
