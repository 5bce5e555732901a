"""Groups answered by an engine here and by servers: what is asked turn by turn, and what is heard."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eyas.bench.offline.external import Endpoint, run_engine_as_client
from eyas.bench.serving.client import LoadRun
from eyas.bench.serving.servers import Side
from eyas.engine import Engine
from eyas.errors import EndpointError
from eyas.session import load
from eyas.text.chats import Message
from eyas.text.prompts import PromptRow
from eyas.types import SamplingParams

from ...pairs import Pair, save_drafter, save_target, tokenizer
from ..serving.fake_server import FakeServer, event, serving, stream

PARAMS = SamplingParams(max_tokens=6, seed=3)
ROWS = [
    PromptRow("a", "f:1", turns=("48/2?", "and then?")),
    PromptRow("b", "f:2", prompt="clips", raw=True),
    PromptRow("c", "f:3", messages=(Message(role="user", content="def"),)),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("pair")
    return Pair(save_target(path / "model"), save_drafter(path / "drafter"))


def answer(body: dict[str, Any]) -> list[bytes]:
    """What was asked last, as an answer."""
    if "messages" in body:
        return stream([body["messages"][-1]["content"], "!"], timings={"draft_n": 6, "draft_n_accepted": 2})
    return [event({"choices": [{"text": "t"}], "usage": {"completion_tokens": 1}})]


def heard(server: FakeServer, **options: Any) -> LoadRun:
    with Endpoint(Side("endpoint", server.url), PARAMS, 20, **options) as endpoint:
        return endpoint.run(ROWS)


def test_turns_go_on_with_the_answers() -> None:
    with serving(answer, pause=0.05) as server:
        run = heard(server)
    assert [(one.item, one.text, one.error) for one in run.answers] == [
        (0, "48/2?!", None),
        (1, "t", None),
        (2, "def!", None),
        (3, "and then?!", None),  # turn 1 of three rows
    ]
    chats = [body["messages"] for path, body in server.asked if path.endswith("/chat/completions")]
    assert [message["content"] for message in chats[-1]] == ["48/2?", "48/2?!", "and then?"]
    assert {body["seed"] for _, body in server.asked} == {3}  # as `eyas generate` has it
    assert server.most_at_once > 1
    assert (run.answers[0].passes, run.answers[0].accepted) == (2.0, 2.0)
    assert run.seconds >= max(one.seconds for one in run.answers[:3]) + run.answers[3].seconds


def test_token_ids_where_they_are_taken() -> None:
    with serving(answer) as server, Endpoint(Side("e", server.url), PARAMS, 20, tokenizer=tokenizer()) as endpoint:
        assert endpoint.sends_ids
        endpoint.run(ROWS)
        assert {path for path, _ in server.asked} == {"/v1/completions"}
        assert all(isinstance(body["prompt"][0], int) for _, body in server.asked)


def test_text_where_they_are_not() -> None:
    def script(body: dict[str, Any]) -> list[bytes] | int:
        return 400 if isinstance(body.get("prompt"), list) else answer(body)

    with serving(script) as server:
        with Endpoint(Side("e", server.url), PARAMS, 20, tokenizer=tokenizer()) as endpoint:
            assert not endpoint.sends_ids
            assert [one.error for one in endpoint.run(ROWS).answers] == [None] * 4
        server.script = lambda _: 401
        with (
            pytest.raises(EndpointError, match="answers 401"),
            Endpoint(Side("e", server.url), PARAMS, 20, tokenizer=tokenizer()),
        ):
            pass


def test_a_row_that_fails_ends_there() -> None:
    def script(body: dict[str, Any]) -> list[bytes] | int:
        return 500 if "messages" in body and body["messages"][-1]["content"] == "48/2?" else answer(body)

    with serving(script) as server:
        run = heard(server)
    assert [(one.item, one.error is None) for one in run.answers] == [(0, False), (1, True), (2, True)]


def test_the_servers_counters() -> None:
    page = 'eyas:spec_decode_num_drafts_total{{m="x"}} {0}\neyas:spec_decode_num_accepted_tokens_total {0}\n'
    with serving(answer, page.format(2)) as server:
        server.script = lambda body: setattr(server, "metrics", page.format(6)) or answer(body)
        assert heard(server).counted.accept_length == 2.0
        server.metrics = ""
        server.script = answer
        server.info = json.dumps({"internal_states": [{"avg_spec_accept_length": 2.5}]})
        assert heard(server).counted.accept_length == 2.5
        server.info = "no JSON"
        assert heard(server).counted.accept_length is None


def test_an_engine_is_heard_as_it_counts_itself(pair: Pair) -> None:
    engine = load(pair.model, pair.drafter, tree="chain:2", batch_size=3)
    run = run_engine_as_client(engine, ROWS, PARAMS)
    assert [one.item for one in run.answers] == [0, 1, 2, 3]
    assert all(one.tokens == 6 and one.first_seconds is not None for one in run.answers)
    assert all(0 < (one.first_seconds or 0) <= one.seconds for one in run.answers)
    assert run.answers[3].started >= max(one.seconds for one in run.answers[:3])
    assert run.seconds == pytest.approx(run.answers[3].started + run.answers[3].seconds)
    assert sum(one.passes for one in run.answers) == run.counted.drafts
    assert sum(one.accepted for one in run.answers) == run.counted.accepted == sum(run.counted.by_position)


def test_a_row_that_cant_run_here_is_an_error(pair: Pair) -> None:
    engine: Engine = load(pair.model, None, method=None, batch_size=2)
    run = run_engine_as_client(engine, [PromptRow("x", "f:9", token_ids=(9999,)), ROWS[1]], PARAMS)
    assert [(one.item, one.error is None) for one in run.answers] == [(0, False), (1, True)]
    assert "f:9" in str(run.answers[0].error)
