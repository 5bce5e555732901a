"""A day of traffic whose kind shifts, made from seeds so that every engine gets the same requests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from eyas.session import Session
from eyas.text.chats import Message
from eyas.text.prompts import PromptRow, read_prompts
from eyas.text.template import encode_chat
from eyas.types import Request, SamplingParams

PLACES = "Lisbon Oslo Quito Hanoi Bergen Turin Austin Nairobi Kyoto Seville Dublin Lima Accra Perth".split()
PEOPLE = "Ada Bela Carlos Dana Emeka Farah Goran Hana Ivo Jun Kira Leo Mina Nils Olga Petra".split()
THINGS = "lamp desk kettle drill tent printer guitar jacket scooter camera rug blender chair bicycle".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SHOTS = 4
"""Number of solved examples before the question, the same for all requests of a kind, as an application sends them."""
LONGEST = 800
"""Maximum number of characters of a known prompt."""
TOKENS = 48
"""Maximum number of tokens of an answer."""


def tool_call(rng: random.Random) -> tuple[str, str]:
    """A user's request and the function call that answers it."""
    place, who, thing, day = (rng.choice(words) for words in (PLACES, PEOPLE, THINGS, DAYS))
    count, price = rng.randint(2, 99), rng.randint(5, 900)
    wish, name, arguments = rng.choice([
        (f"How warm will it be in {place} on {day}?", "get_weather", {"city": place, "day": day, "unit": "celsius"}),
        (f"Book {count} seats to {place} on {day} for {who}.", "book_flight",
         {"destination": place, "day": day, "passengers": count, "name": who}),
        (f"{who} wants {count} of the {thing} sent to {place}.", "create_order",
         {"customer": who, "item": thing, "quantity": count, "city": place}),
        (f"Tell {who} that the {thing} costs {price} euros.", "send_message",
         {"recipient": who, "text": f"The {thing} costs {price} euros."}),
        (f"Set the price of the {thing} in {place} to {price}.", "update_price",
         {"item": thing, "city": place, "price": price, "currency": "EUR"}),
    ])  # fmt: skip
    return wish, json.dumps({"name": name, "arguments": arguments})


_JOIN = "FROM orders AS o\nJOIN customers AS c ON c.customer_id = o.customer_id\n"


def query(rng: random.Random) -> tuple[str, str]:
    """A question about a shop and the SQL that answers it, in a house style."""
    place, who, thing = (rng.choice(words) for words in (PLACES, PEOPLE, THINGS))
    count, price = rng.randint(2, 99), rng.randint(5, 900)
    return rng.choice([
        (f"customers in {place} with more than {count} orders",
         f"SELECT c.customer_id, c.name\nFROM customers AS c\nWHERE c.city = '{place}' AND c.order_count > {count}\n"
         "ORDER BY c.name;"),
        (f"how many of the {thing} {who} bought",
         f"SELECT SUM(o.quantity) AS total_quantity\n{_JOIN}WHERE c.name = '{who}' AND o.item = '{thing}';"),
        (f"the {count} dearest items below {price}",
         f"SELECT i.item_id, i.name, i.price\nFROM items AS i\nWHERE i.price < {price}\nORDER BY i.price DESC\n"
         f"LIMIT {count};"),
        (f"turnover by city for the {thing}",
         f"SELECT c.city, SUM(o.quantity * o.price) AS turnover\n{_JOIN}WHERE o.item = '{thing}'\nGROUP BY c.city\n"
         "ORDER BY turnover DESC;"),
    ])  # fmt: skip


_SYSTEMS: dict[str, tuple[Callable[[random.Random], tuple[str, str]], str]] = {
    "tools": (tool_call, "Answer with one function call as JSON, nothing else."),
    "queries": (query, "Write one SQL query, nothing else. Tables: customers, orders, items."),
}


def asked(kind: str, rng: random.Random) -> list[Message]:
    """A chat that an application of this kind sends."""
    make, system = _SYSTEMS[kind]
    fixed, shots = random.Random(7), []
    for _ in range(SHOTS):
        wish, answer = make(fixed)
        shots += [Message(role="user", content=wish), Message(role="assistant", content=answer)]
    return [Message(role="system", content=system), *shots, Message(role="user", content=make(rng)[0])]


class Phase(NamedTuple):
    """A part of the day; if it has several kinds, they take turns."""

    name: str
    kinds: tuple[str, ...]
    requests: int


DAY = (
    Phase("known", ("mix",), 250),
    Phase("tools", ("tools",), 500),
    Phase("back", ("unseen",), 250),
    Phase("swaps", ("mix", "tools", "queries"), 250),
    Phase("queries", ("queries",), 450),
    Phase("all", ("mix", "tools", "queries"), 300),
)
"""`mix`: prompts of the drafter's training mix; `unseen`: prompts of the same kinds that it hasn't seen."""
WINDOW = 50
"""Number of requests that are served together."""


class Traffic:
    """The day's requests, a window at a time. Request n is the same for every engine; odd requests are sampled."""

    def __init__(self, session: Session, mix: Sequence[Path], unseen: Sequence[Path]) -> None:
        self._session = session
        self._prompts = {"mix": _chats(mix), "unseen": _chats(unseen)}

    def __len__(self) -> int:
        return sum(phase.requests for phase in DAY) // WINDOW

    def phase(self, window: int) -> str:
        """The name of a window's phase."""
        return self._phase(window)[0].name

    def _phase(self, window: int) -> tuple[Phase, int]:
        first = 0
        for phase in DAY:
            if window * WINDOW < first + phase.requests:
                return phase, window * WINDOW - first
            first += phase.requests
        raise IndexError(window)

    def window(self, window: int) -> list[Request]:
        """The requests of a window."""
        phase, first = self._phase(window)
        rng, made = random.Random(window), []
        for at in range(WINDOW):
            kind = phase.kinds[at % len(phase.kinds)]
            known = self._prompts.get(kind)
            if known is None:
                chat = asked(kind, rng)
            else:
                chat = known[(first + at) % len(known)] if kind == "unseen" else rng.choice(known)
            number = window * WINDOW + at
            params = SamplingParams(max_tokens=TOKENS, temperature=float(at % 2), seed=number)
            made.append(Request(tuple(encode_chat(self._session.tokenizer, chat)), params, chat=True))
        return made


def _chats(files: Sequence[Path]) -> list[list[Message]]:
    """The first questions of prompt files as chats, in random order; long ones are left out."""
    rows = [row for path in files for row in read_prompts(path) if isinstance(row, PromptRow)]
    said = [row.messages[0].content if row.messages else row.said for row in rows]
    chats = [[Message(role="user", content=one)] for one in said if one and len(one) < LONGEST]
    random.Random(0).shuffle(chats)
    return chats
