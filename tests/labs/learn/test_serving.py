"""A server that learns, over HTTP: whose requests are kept, what metrics say, and that nobody notices swaps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest

from eyas.cli.common.options import DraftOptions
from eyas.drafters.options import DrafterOptions
from eyas.errors import UsageError
from eyas.labs.cli.serve import LearnOptions
from eyas.labs.learn import serving
from eyas.labs.learn.folder import Card
from eyas.labs.learn.serving import Learning, LearnSeries, LengthCurve
from eyas.options import EngineOptions
from eyas.serve.app import ENDPOINTS
from eyas.serve.observe.metrics import Metrics
from eyas.serve.observe.observer import Observers
from eyas.types import Limits

from ...serve.live import Live, live
from .conftest import World


class Served(NamedTuple):
    server: Live
    learning: Learning
    folder: Path


@pytest.fixture
def served(world: World, tmp_path: Path) -> Iterator[Served]:
    options = LearnOptions(
        learn=tmp_path / "learn", learn_exclude=["closed"], learn_per_key=["apart"], learn_canary=0.5
    )
    learning = options.opened()
    assert learning is not None
    learning._poll = 0.02
    drafter = DrafterOptions(world.drafter, quantize="off")
    limits = Limits(max_running=4, prefix_tokens=1024)
    engine = world.session.engine(
        world.session.drafter(drafter),
        EngineOptions(tree="chain:3", limits=limits, around=learning.wrap(drafter, str(world.model))),
    )
    assert engine.speculation is not None
    learning.start(engine.speculation.drafter)
    metrics = Metrics("tiny", ENDPOINTS)
    metrics.add(LearnSeries(learning, "tiny"))
    keys = ("open", "closed", "apart")
    with live(engine, Observers([metrics, learning]), metrics, api_keys=keys) as server:
        yield Served(server, learning, tmp_path / "learn")
    learning.close()


def ask(
    served: Served, prompt: list[int], key: str = "open", seed: int = 1, user: str = "", **headers: str
) -> list[int]:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 24, "seed": seed, "temperature": 1.0, "ignore_eos": True,
        "return_token_ids": True, "user": user,
    }  # fmt: skip
    sent = {"Authorization": f"Bearer {key}", **headers}
    answer = httpx.post(f"{served.server.url}/v1/completions", json=body, headers=sent, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def test_keys_and_headers_decide_what_is_kept(world: World, served: Served) -> None:
    prompts = [list(request.prompt) for request in world.requests(1, 6)]
    ask(served, prompts[0])
    ask(served, prompts[1], key="closed")
    ask(served, prompts[2], **{"X-Eyas-Learn": "off"})
    ask(served, prompts[3], **{"x-eyas-learn": "No"})
    ask(served, prompts[4], **{"X-Eyas-Learn": "on"})
    ask(served, prompts[5], user="private")  # a name, not a wish
    served.learning.close()
    data = b"".join(path.read_bytes() for path in served.folder.rglob("*") if path.is_file())
    kept = [np.array(prompt, dtype="<i4").tobytes() in data for prompt in prompts]
    assert kept == [True, False, False, False, True, True]
    assert b"open" not in b"".join(path.name.encode() for path in served.folder.rglob("*"))


def test_a_key_apart_has_a_folder_and_generations_of_its_own(world: World, served: Served) -> None:
    prompts = [list(request.prompt) for request in world.requests(3, 4)]
    (own,) = served.learning.apart
    assert own.folder is not None
    assert own.folder.path.parent == served.folder / "apart"
    number = own.folder.add(world.drafter, Card(number=0, made=0.0))
    own.folder.change(lambda state: state.model_copy(update={"wanted": number, "settled": number}), "promoted")
    until = time.monotonic() + 20
    while own.serving != number:
        assert time.monotonic() < until
        time.sleep(0.01)
    for prompt, key in zip(prompts, ("open", "apart", "open", "apart"), strict=True):
        ask(served, prompt, key=key)
    until = time.monotonic() + 20
    while not own.folder.busy:  # it says so every few tenths of a second, however fast the answers were
        assert time.monotonic() < until
        time.sleep(0.01)
    assert served.learning.serving == 0
    assert served.learning.drafter is not None
    assert {row.generation for row in served.learning.drafter.pairs.rows} <= {("", 0), (own.client, number)}
    served.learning.close()
    for folder, mine in ((served.folder / "traffic", (0, 2)), (own.folder.traffic, (1, 3))):
        data = b"".join(path.read_bytes() for path in folder.iterdir())
        kept = [at for at, prompt in enumerate(prompts) if np.array(prompt, dtype="<i4").tobytes() in data]
        assert tuple(kept) == mine


def test_answers_and_metrics_while_generations_come_and_go(world: World, served: Served) -> None:
    folder = served.learning.folder
    assert folder is not None
    requests = world.requests(2, 30)
    plain = world.session.engine(None, EngineOptions(batch_size=8)).generate(
        [one.__class__(one.prompt, one.params.model_copy(update={"seed": 1})) for one in requests]
    )
    for at, (request, done) in enumerate(zip(requests, plain, strict=True)):
        if at % 6 == 3:
            number = folder.add(world.drafter, Card(number=0, made=0.0))
            folder.change(lambda state, number=number: state.model_copy(update={"wanted": number}), "promoted")
            until = time.monotonic() + 20
            while not (served.learning.trial and served.learning.trial.new == number):
                assert time.monotonic() < until
                time.sleep(0.01)
        assert ask(served, list(request.prompt)) == list(done.token_ids)
    page = httpx.get(f"{served.server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("eyas:learn"))
    assert values['eyas:learn_generation{model_name="tiny"}'] == "0.0"
    assert values['eyas:learn_on_trial{model_name="tiny"}'] == "5.0"
    assert values['eyas:learn_swaps_total{model_name="tiny"}'] == "5.0"
    assert values['eyas:learn_collecting{model_name="tiny"}'] == "1.0"
    assert float(values['eyas:learn_accept_length{generation="5",model_name="tiny"}']) >= 1.0
    assert folder.busy
    shown = served.learning.overview()
    assert [card["number"] for card in shown["generations"]] == [0, 1, 2, 3, 4, 5]
    assert [one["event"] for one in shown["events"]] == ["promoted", "trial"] * 5
    assert shown["state"]["wanted"] == 5
    assert shown["curve"]
    assert all(1.0 <= point["accept_length"] <= 4.0 for point in shown["curve"])


def test_options_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give --learn DIR"):
        LearnOptions(learn_share=0.5).check(DraftOptions(draft_model="d"))
    LearnOptions().check(DraftOptions())
    assert LearnOptions().opened() is None
    learns = LearnOptions(learn=tmp_path)
    for draft, message in (
        (DraftOptions(), "give --draft-model"),
        (DraftOptions(method="ngram"), "give --draft-model"),
        (DraftOptions(draft_model="d", method="+suffix"), r"leave out \+suffix"),
        (DraftOptions(draft_model="d", acceptance="typical"), "leave out --acceptance"),
        (DraftOptions(draft_model="d", draft_weights="w.bin"), "leave out --draft-weights"),
    ):
        with pytest.raises(UsageError, match=message):
            learns.check(draft)


@pytest.mark.parametrize("rule", [{"learn_exclude": ["k"]}, {"learn_only": ["other"]}])
def test_a_key_that_is_not_learned_from_can_not_be_apart(tmp_path: Path, rule: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError, match="aren't learned from"):
        LearnOptions(learn=tmp_path, learn_per_key=["k"], **rule).check(DraftOptions(draft_model="d"))


def test_drafters_that_can_not_learn_are_refused(world: World, tmp_path: Path) -> None:
    for options, message in (
        (DrafterOptions(world.drafter, method="+suffix"), "networks with files of their own"),
        (DrafterOptions(method="ngram"), "networks with files of their own"),
    ):
        learning = LearnOptions(learn=tmp_path / "x").opened()
        assert learning is not None
        around = learning.wrap(options, str(world.model))
        with pytest.raises(UsageError, match=message):
            around(world.session.target, world.session.drafter(options))
    assert not (tmp_path / "x").exists()


def test_a_point_is_a_minute_of_one_generation() -> None:
    now = [600.0]
    made = LengthCurve(lambda: now[0])
    made.add(0, [0, 0], [0, 0])
    assert made.read() == [], "plain rounds say nothing"
    made.add(0, [3, 0], [2, 0])
    now[0] = 659.0
    made.add(0, [3, 3], [1, 3])
    made.add(1, [3], [0])
    now[0] = 660.0
    made.add(1, [3], [1])
    assert made.read() == [
        {"time": 600.0, "generation": 0, "accept_length": 3.0},
        {"time": 600.0, "generation": 1, "accept_length": 1.0},
        {"time": 660.0, "generation": 1, "accept_length": 2.0},
    ]


def test_a_day_is_kept() -> None:
    now = [0.0]
    made = LengthCurve(lambda: now[0])
    for minute in range(serving._MAX_POINTS + 5):
        now[0] = 60.0 * minute
        made.add(0, [1], [1])
    assert len(made.read()) == serving._MAX_POINTS
    assert made.read()[0]["time"] == 300.0
