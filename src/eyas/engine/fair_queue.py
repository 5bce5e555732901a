"""Fair queueing in two levels: clients share, and the users of a client share what it gets.

Each level is start-time fair queueing (Goyal, Vin, Cheng 1996). A key's start tag is the level's virtual time, or the
moment its last request ends on that clock if that is later. The smallest tag goes first. A request lasts as long as
it may cost, so keys that keep the queue filled are served in equal shares of cost, and a key that comes new is served
next, however many of another's wait. A name of a user costs nothing, so it can't enlarge its client's share.

Sequences that were preempted come before their own user's others, oldest first, and aren't charged again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What can wait in a `FairQueue`."""

    index: int
    """Its number in the order of arrival."""
    key: str
    """`CLIENT`, or `CLIENT/USER`."""

    @property
    def longest(self) -> int:
        """What it may cost: tokens, or characters."""


_FEW = 4
"""Rounds for some clients alone are worth it where those have at most one in so many of the rows."""
_CREDIT = 1.0
"""Seconds by which newcomers are behind: short answers wait for no round that is large."""

T = TypeVar("T", bound=Queued)


def client_of(key: str) -> str:
    """The client of a queue key."""
    return key.partition("/")[0]


class FairQueue(Generic[T]):
    """Whatever waits for its turn, in the order in which it gets one."""

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
        """The clients of which anything waits."""
        return self._clients.keys()

    def count(self, client: str) -> int:
        """How much waits of a client."""
        return self._clients[client].count if client in self._clients else 0

    def push(self, one: T) -> None:
        """Queue something new behind its user's others."""
        self._enter(one, paid=False)

    def push_front(self, one: T) -> None:
        """Queue something that had its turn and lost it, before its user's others."""
        self._enter(one, paid=True)

    def peek(self, held: Mapping[str, int] | None = None) -> T | None:
        """What is next, None if nothing waits; clients that have fewer in hand come first, `held` says how many."""
        if not self._waiting:
            return None
        in_hand = held or {}

        def order(name: str) -> tuple[int, float, int]:
            return in_hand.get(name, 0), self._turns.start(name), self._clients[name].head.index

        return self._clients[min(self._clients, key=order)].head

    def take(self, one: T) -> None:
        """Remove something whose turn it is, and charge its keys."""
        client = self._clients[client_of(one.key)]
        if one.index not in client.paid:
            self._turns.charge(client_of(one.key), one.longest)
            client.turns.charge(one.key, one.longest)
        self.remove(one)

    def pop(self) -> T:
        """Remove and return what is next. IndexError if nothing waits."""
        one = self.peek()
        if one is None:
            raise IndexError("nothing waits")
        self.take(one)
        return one

    def remove(self, one: T) -> None:
        """Remove something wherever it stands."""
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


class _Client(Generic[T]):
    """What waits of one client: a queue for each user."""

    def __init__(self) -> None:
        self.count = 0
        self.paid: set[int] = set()
        self.turns = _Turns()
        self._queues: dict[str, list[T]] = {}
        self._head: T | None = None

    @property
    def head(self) -> T:
        """What is next of this client."""
        if self._head is None:
            queues = self._queues.values()
            self._head = min((queue[0] for queue in queues), key=lambda one: (self.turns.start(one.key), one.index))
        return self._head

    def add(self, one: T, paid: bool) -> None:
        # an old one that comes back is before all new ones: those come with ever higher indexes
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
    """The clock of one level, and when the last request of each key ends on it."""

    def __init__(self) -> None:
        self._time = 0.0
        self._finishes: dict[str, float] = {}
        self._most = 64

    def start(self, key: str) -> float:
        """The start tag that a key's next request has now."""
        return max(self._time, self._finishes.get(key, 0.0))

    def charge(self, key: str, cost: int) -> None:
        """A request of this key has its turn."""
        self._time = max(self._time, self.start(key))
        self._finishes[key] = self.start(key) + cost
        if len(self._finishes) > self._most:  # those in the past say nothing any more
            self._finishes = {key: end for key, end in self._finishes.items() if end > self._time}
            self._most = 64 + 2 * len(self._finishes)


class TimeShares:
    """How much time passes have taken for each client. One that comes new, or back, begins a little behind the rest."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._floor = 0.0  # where newcomers begin

    def charge(self, clients: Sequence[str], seconds: float) -> None:
        """So many seconds went to these clients in equal parts; a client may be among them several times."""
        for client in clients:
            self._seconds[client] = self._seconds.get(client, self._floor) + seconds / len(clients)

    def before(self, some: Collection[str], others: Collection[str]) -> bool:
        """Whether one of these clients has had less time than all others."""
        least, theirs = (
            min((self._seconds.get(client, self._floor) for client in clients), default=None)
            for clients in (some, others)
        )
        return least is not None and theirs is not None and least < theirs

    def turn(self, decoding: Sequence[Queued], clients: Collection[str]) -> slice:
        """Which neighbours of those that decode have the next round; `clients` are all that have any slot.

        A round is as slow as its rows are many. So where one client has most of them, the others have rounds of their
        own, until passes have taken as much time for them; between equals a round for all is cheaper.
        """
        known = [self._seconds[client] for client in clients if client in self._seconds]
        self._floor = max(self._floor, min(known) - _CREDIT) if known else self._floor
        now = {client: seconds for client, seconds in self._seconds.items() if seconds > self._floor}
        self._seconds = now | {client: now.get(client, self._floor) for client in clients}
        most = max((self._seconds[client] for client in clients), default=0.0)
        behind = [at for at, one in enumerate(decoding) if self._seconds[client_of(one.key)] < most]
        if not behind or _FEW * (behind[-1] + 1 - behind[0]) > len(decoding):
            return slice(len(decoding))
        return slice(behind[0], behind[-1] + 1)
