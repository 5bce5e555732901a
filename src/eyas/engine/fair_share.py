"""Fair shares: every client gets an equal part of each scarce resource, however many requests it sends.

A client is an API key, or an address; its users share what it gets. There is one mechanism for each resource: turns in
the queue (`FairQueue`), slots (`Scheduler.crowded_out`), and the time of passes (`FairTime`). The server also uses the
first of them for the order in which it parses request bodies (`eyas.serve.fair_turns`).

`FairQueue` is start-time fair queueing (Goyal, Vin, Cheng 1996) in two levels: clients share the turns, and the users
of a client share what it gets. A key's start tag is the level's virtual time, or the virtual time at which its last
request ends if that is later. The smallest tag goes first. A request's virtual duration is its maximum cost, so keys
that keep the queue filled get equal shares of cost, and a new key is served next, however many requests of another key
wait. Many users don't enlarge a client's share, because a client can invent them at no cost.

Preempted sequences come before their user's other sequences, oldest first, and aren't charged again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from eyas.errors import QueueFullError


class Queued(Protocol):
    """What can wait in a `FairQueue`."""

    index: int
    """Its number in the order of arrival."""
    key: str
    """`CLIENT`, or `CLIENT/USER`."""

    @property
    def longest(self) -> int:
        """Its maximum cost, in tokens or characters."""


_MANY = 4
"""A client has many requests if it has this many times those of another active, or recently active, client."""
_REMEMBERED = 5.0
"""Seconds for which a client without requests still counts as active."""
_CREDIT = 1.0
"""Seconds of used time by which newcomers are behind all others, so that short answers don't wait for large rounds."""
_MIN_STEP_SECONDS = 0.05
"""Seconds that a step may always take, even if other clients wait."""

T = TypeVar("T", bound=Queued)


def client_of(key: str) -> str:
    """The client of a queue key."""
    return key.partition("/")[0]


class FairQueue(Generic[T]):
    """Items that wait for their turn, in the order in which they get one."""

    def __init__(self) -> None:
        self._waiting: dict[int, T] = {}
        self._clients: dict[str, _Client[T]] = {}
        self._turns = _Turns()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return iter(self._waiting.values())

    def __contains__(self, one: T) -> bool:
        return self._waiting.get(one.index) is one

    @property
    def clients(self) -> Collection[str]:
        """The clients that have anything waiting."""
        return self._clients.keys()

    def count(self, client: str) -> int:
        """The number of a client's waiting items."""
        return self._clients[client].count if client in self._clients else 0

    def push(self, one: T) -> None:
        """Queue a new item behind its user's others."""
        self._enter(one, paid=False)

    def push_front(self, one: T) -> None:
        """Queue a preempted item again, before its user's others."""
        self._enter(one, paid=True)

    def peek(self, held: Mapping[str, int] | None = None, among: Collection[str] | None = None) -> T | None:
        """The next item `among` some clients (None = all); None if nothing waits.

        Clients that hold fewer items come first; `held` says how many each holds.
        """
        names = self._clients.keys() if among is None else [name for name in among if name in self._clients]
        if not names:
            return None
        in_hand = held or {}

        def order(name: str) -> tuple[int, float, int]:
            return in_hand.get(name, 0), self._turns.start(name), self._clients[name].head.index

        return self._clients[min(names, key=order)].head

    def take(self, one: T) -> None:
        """Remove an item whose turn it is, and charge its keys."""
        client = self._clients[client_of(one.key)]
        if one.index not in client.paid:
            self._turns.charge(client_of(one.key), one.longest)
            client.turns.charge(one.key, one.longest)
        self.remove(one)

    def pop(self) -> T:
        """Remove and return the next item. Raises IndexError if nothing waits."""
        one = self.peek()
        if one is None:
            raise IndexError("nothing waits")
        self.take(one)
        return one

    def remove(self, one: T) -> None:
        """Remove an item from anywhere in the queue."""
        del self._waiting[one.index]
        client = self._clients[client_of(one.key)]
        client.remove(one)
        if not client.count:
            del self._clients[client_of(one.key)]
        if not self._waiting:
            self._turns = _Turns()

    def _enter(self, one: T, paid: bool) -> None:
        self._waiting[one.index] = one
        self._clients.setdefault(client_of(one.key), _Client()).add(one, paid)


class WaitingQueue(FairQueue[T]):
    """Items that wait to be admitted; new ones are refused when too many wait."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._most = most
        self._pace: float | None = None  # seconds between admissions while some wait
        self._admitted_at: float | None = None

    def submit(self, one: T, free: int) -> None:
        """Queue a new item; `free` of those waiting can be admitted now. Raises QueueFullError if too many wait."""
        most = self._most
        waiting = len(self)
        client = client_of(one.key)
        if most is not None:
            most += free
            share = most // len({*self.clients, client})  # of a full queue
            if waiting >= most and (0 < share <= self.count(client) or waiting >= 2 * most):
                raise QueueFullError(f"{waiting} requests are waiting already: try again later", self.retry_after())
        self.push(one)

    def retry_after(self) -> float:
        """Seconds after which about a quarter of the queue should have been admitted, between 1 and 60."""
        return min(60.0, max(1.0, (self._pace or 0.0) * len(self) / 4))

    def admit(self, one: T, now: float) -> None:
        """`take` an item at time `now`."""
        self.take(one)
        if self._admitted_at is not None and self:
            gap = now - self._admitted_at
            self._pace = gap if self._pace is None else 0.9 * self._pace + 0.1 * gap
        self._admitted_at = now


class _Client(Generic[T]):
    """The waiting items of one client: a queue for each user."""

    def __init__(self) -> None:
        self.count = 0
        self.paid: set[int] = set()
        self.turns = _Turns()
        self._queues: dict[str, list[T]] = {}
        self._head: T | None = None

    @property
    def head(self) -> T:
        """The item to run next: the first one of the user whose turn starts earliest."""
        if self._head is None:
            queues = self._queues.values()
            self._head = min((queue[0] for queue in queues), key=lambda one: (self.turns.start(one.key), one.index))
        return self._head

    def add(self, one: T, paid: bool) -> None:
        # an old item that comes back sorts before all new ones, whose indexes only increase
        insort(self._queues.setdefault(one.key, []), one, key=lambda each: each.index)
        if paid:
            self.paid.add(one.index)
        self.count += 1
        self._head = None

    def remove(self, one: T) -> None:
        queue = self._queues[one.key]
        queue.remove(one)
        if not queue:
            del self._queues[one.key]
        self.paid.discard(one.index)
        self.count -= 1
        self._head = None


class _Turns:
    """The virtual time of one level, and when the last request of each key ends in it."""

    def __init__(self) -> None:
        self._time = 0.0
        self._finishes: dict[str, float] = {}
        self._most = 64

    def start(self, key: str) -> float:
        """The start tag that a key's next request has now."""
        return max(self._time, self._finishes.get(key, 0.0))

    def charge(self, key: str, cost: int) -> None:
        """Charge a key for a request whose turn it is."""
        self._time = max(self._time, self.start(key))
        self._finishes[key] = self.start(key) + cost
        if len(self._finishes) > self._most:  # ends in the past no longer matter
            self._finishes = {key: end for key, end in self._finishes.items() if end > self._time}
            self._most = 64 + 2 * len(self._finishes)


class StepPlan(NamedTuple):
    """The clients that a step of the engine is for, and whether it has to be short."""

    alone: frozenset[str] = frozenset()
    """The step is for these clients alone; empty = for all."""
    crowded: bool = False
    """One client has so many more requests than others that its part of a step is bounded."""
    greedy: str = ""
    """That client."""


class FairTime:
    """The time that passes have taken for each client, and how a step is shared. Newcomers begin a little behind.

    Every row slows a round down, and a prompt takes seconds. So while one client has many requests and another few, or
    none at the moment, the many are processed in pieces: a step with them lasts about `_MIN_STEP_SECONDS`, or twice as
    long as a round of the few alone if that is longer. As long as passes have taken less time for the few, steps are
    for them alone. Between clients with about equally many requests, steps for all are cheaper.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._floor = 0.0  # the used time that newcomers begin with
        self._seen: dict[str, float] = {}  # when a client last had anything to do
        self._round = 0.0  # what a round of the few alone takes
        self.rows = Fitting(1)
        self.tokens = Fitting(16)

    def plan(self, requests: Mapping[str, int], now: float) -> StepPlan:
        """Plan a step at time `now`; `requests` says how many each client has waiting or in slots."""
        known = [self._seconds[client] for client in requests if client in self._seconds]
        self._floor = max(self._floor, min(known) - _CREDIT) if known else self._floor
        # clients at the floor are forgotten, because they would begin there again
        ahead = {client: seconds for client, seconds in self._seconds.items() if seconds > self._floor}
        self._seconds = ahead | {client: ahead.get(client, self._floor) for client in requests}
        self._seen = {client: at for client, at in self._seen.items() if at > now - _REMEMBERED}
        self._seen |= dict.fromkeys(requests, now)
        greedy = max(requests, key=lambda client: (requests[client], self._seconds[client]), default="")
        others = [self._seconds[client] for client in self._seen if client != greedy and client in self._seconds]
        if greedy and others:  # a client with many requests is never behind, not even a new one
            self._seconds[greedy] = max(self._seconds[greedy], min(others))
        few = [client for client in self._seen if _MANY * max(1, requests.get(client, 0)) <= requests.get(greedy, 0)]
        behind = (one for one in few if requests.get(one) and self._seconds[one] < self._seconds[greedy])
        return StepPlan(frozenset(behind), bool(few), greedy)

    def charge(self, parts: Mapping[str, float], seconds: float) -> None:
        """Charge clients for a pass of `seconds`, in proportion to their `parts`."""
        whole = sum(parts.values())
        for client, part in parts.items():
            self._seconds[client] = self._seconds.get(client, self._floor) + seconds * part / whole

    def learn(self, step: StepPlan, rows: int, tokens: int, seconds: float) -> None:
        """Update how much fits into a step, from a pass over `tokens` prompt tokens or a round of `rows` rows."""
        if step.alone and rows:
            self._round += 0.25 * (seconds - self._round) if self._round else seconds
        elif step.crowded and not step.alone:
            fitting, count = (self.rows, rows) if rows else (self.tokens, tokens)
            fitting.learn(count, seconds, max(_MIN_STEP_SECONDS, 2.0 * self._round))

    def before(self, some: Collection[str], others: Collection[str]) -> bool:
        """Whether one of `some` clients has had less time than all the `others`."""
        least, theirs = (
            min((self._seconds.get(client, self._floor) for client in clients), default=None)
            for clients in (some, others)
        )
        return least is not None and theirs is not None and least < theirs


class Fitting:
    """How many rows or tokens fit into a step's time, as learned from earlier steps; it at most doubles at a time."""

    def __init__(self, least: int) -> None:
        self._least = least
        self.most = 4 * least

    def learn(self, count: int, seconds: float, allowed: float) -> None:
        """Learn from a step of `count` rows or tokens that took `seconds`, when it should take `allowed` seconds."""
        fitting = max(self._least, int(count * allowed / max(seconds, 1e-6)))
        if fitting < self.most:
            self.most = max(fitting, self.most // 2, self._least)
        elif count >= self.most:
            self.most = min(fitting, 2 * self.most)
