"""Load against servers in this process: what is asked of whom, in which order, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.serving.client import Client, Item, Load, read_items
from eyas.bench.serving.run import Results, ServePlan, measure_sides
from eyas.bench.serving.servers import Side
from eyas.errors import DataError, EndpointError
from eyas.types import SamplingParams

from ...pairs import tokenizer, write_rows
from .fake_server import FakeServer, serving, stream

ITEMS = [Item(str(i), "/chat/completions", {"messages": [{"role": "user", "content": f"q{i}"}]}) for i in range(5)]


def echo(body: dict[str, Any]) -> list[bytes]:
    return stream([body["messages"][0]["content"], str(body["seed"])], usage={"eyas": {"target_passes": 2}})


def measure(*sides: Side, loads: tuple[Load, ...] = (Load("closed", 2),), **plan: Any) -> Results:
    settings = ServePlan(**{"repeats": 1, "requests": 4, "per_client": 1, "warmup": 0, **plan})
    connect = partial(Client, params=SamplingParams(max_tokens=3, seed=10), timeout=20)
    return asyncio.run(measure_sides(sides, loads, ITEMS, connect, settings))


def prompts(server: FakeServer) -> list[str]:
    return sorted(body["messages"][0]["content"] for _, body in server.asked)


def test_all_sides_answer_the_same_requests() -> None:
    with serving(echo) as one, serving(echo) as two:
        results = measure(Side("a", one.url), Side("b", two.url, "named", False), repeats=2)
        assert [[answer.text for answer in run.answers] for run in results[Load("closed", 2)]["a"]] == [
            ["q010", "q111", "q212", "q313"],
            ["q414", "q015", "q116", "q217"],  # the next repeat goes on where this one ended
        ]
        assert prompts(one) == prompts(two)
        assert {body["model"] for _, body in one.asked} == {"fake"}
        assert {body["model"] for _, body in two.asked} == {"named"}
        assert {body["eyas"]["speculate"] for _, body in two.asked} == {False}
        assert all("eyas" not in body and body["max_tokens"] == 3 and body["stream"] for _, body in one.asked)
        assert one.most_at_once <= 2


def test_one_side_at_a_time_in_turn() -> None:
    order: list[str] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        order.append(name)
        yield

    with serving(echo) as server:
        sides = [Side(name, server.url) for name in "abc"]
        plan = ServePlan(repeats=3, requests=1, per_client=1, warmup=0)
        connect = partial(Client, params=SamplingParams(), timeout=20)
        asyncio.run(measure_sides(sides, [Load("closed", 1)], ITEMS, connect, plan, around=around))
    assert "".join(order) == "abcbcacab"


def test_warming_up_is_not_counted() -> None:
    with serving(echo) as server:
        results = measure(Side("a", server.url), warmup=2, requests=3)
        assert len(server.asked) == 2 * 2 + 3
        assert [answer.text for answer in results[Load("closed", 2)]["a"][0].answers] == ["q414", "q015", "q116"]


def test_refusals_and_broken_connections_are_counted_not_raised() -> None:
    def script(body: dict[str, Any]) -> list[bytes] | int:
        return {"q0": 429, "q1": 0}.get(body["messages"][0]["content"], echo(body))

    with serving(script) as server:
        (run,) = measure(Side("a", server.url))[Load("closed", 2)]["a"]
    full, gone, *good = run.answers
    assert str(full.error).startswith("429")
    assert "Error" in str(gone.error)
    assert [(answer.error, answer.passes) for answer in good] == [(None, 2.0)] * 2


def test_first_text_is_timed() -> None:
    with serving(echo, pause=0.05) as server:
        (run,) = measure(Side("a", server.url), requests=1)[Load("closed", 2)]["a"]
    answer = run.answers[0]
    assert answer.first_seconds is not None
    assert 0.1 <= answer.first_seconds < answer.seconds  # the role at 0.05, the first word at 0.1


def test_counters_grow_while_a_run_lasts() -> None:
    page = 'vllm:spec_decode_num_drafts_total{{engine="0"}} {0}\nvllm:spec_decode_num_accepted_tokens_total {0}e1\n'
    with serving(echo, page.format(3)) as server:
        server.script = lambda body: setattr(server, "metrics", page.format(7)) or echo(body)
        (run,) = measure(Side("a", server.url))[Load("closed", 2)]["a"]
    assert (run.counted.drafts, run.counted.accepted) == (4.0, 40.0)


def test_a_side_that_is_not_there() -> None:
    with pytest.raises(EndpointError, match=r"gone: .* can't be reached"):
        measure(Side("gone", "http://127.0.0.1:9/v1"))


def test_items_of_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": "p"}, {"turns": ["one", "two"]}, {"token_ids": [5, 6]}, {"prompt": "p", "raw": True}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    by_name = {item.id: item for item in read_items([path], None, 0)}
    assert by_name["rows:1"].prompt == {"messages": [{"role": "user", "content": "p"}]}
    assert by_name["rows:4"].prompt == {"prompt": "p"}
    assert by_name["rows:2"].prompt == {"messages": [{"role": "user", "content": "one"}]}
    assert by_name["rows:3"].prompt == {"prompt": [5, 6]}
    here = {item.id: item for item in read_items([path], None, 0, tokenizer())}
    assert {item.path for item in here.values()} == {"/completions"}
    assert here["rows:1"].prompt["stop_token_ids"] == [tokenizer().eos_token_id]
    assert "stop_token_ids" not in here["rows:4"].prompt | here["rows:3"].prompt
    assert len(read_items([path], 2, 0)) == 2
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        read_items([write_rows(path, ["{"])], None, 0)


def test_an_item_may_say_how_long_its_answer_is() -> None:
    own, usual = (Item("i", "/completions", {"prompt": "p"}, tokens).body("m", SamplingParams(max_tokens=9), 0)
                  for tokens in (4, None))  # fmt: skip
    assert (own["max_tokens"], usual["max_tokens"]) == (4, 9)
