"""Schemathesis against `/openapi.json`: whatever it makes up, no 5xx, only documented statuses and bodies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.generation.meta import TestPhase
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance

from eyas.serve.app import ENDPOINTS, create_app
from eyas.serve.context import ServeSettings
from eyas.serve.engine_thread import EngineThread
from eyas.serve.observe.metrics import Metrics

from ..fakes import FakeEngine


def app() -> Any:
    thread = EngineThread(lambda: FakeEngine("Natalia"))
    thread.start()
    while thread.status == "loading":
        time.sleep(0.001)
    settings = ServeSettings(model_names=("tiny",), allowed_hosts=("testserver",))
    return create_app(thread, settings, metrics=Metrics("tiny", ENDPOINTS))


EVERY = 11
"""Of the thousands of requests that leave out or change one thing after the other, one of so many is always sent."""
EVERY_OPERATION = 5
"""One of so many of the API's operations is always tried."""


@pytest.fixture(scope="module")
def schema() -> BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", app())


def operations(schema: BaseSchema) -> list[APIOperation]:
    return [found.ok() for found in schema.get_all_operations()]


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def check(case: Any) -> None:
    """Rules between fields, and what a vocabulary holds, are no JSON schema: valid requests may be refused."""
    model = case.body.get("model") if isinstance(case.body, dict) else None
    if isinstance(model, str) and len(model) <= 256:
        case.body["model"] = "tiny"
    response = case.call_and_validate(excluded_checks=[positive_data_acceptance])
    assert response.status_code < 500


def try_out(operation: APIOperation, check: Callable[..., None]) -> None:
    """Send requests that are made up: systematically, and a few at random.

    `schema.parametrize` would make them up while tests are collected, in every process of pytest-xdist.
    """
    modes = list(HypothesisTestMode)
    config = HypothesisTestConfig(operation.schema.config, modes, explicit_settings=bounded(2))
    create_test(operation=operation, test_func=check, config=config)()


def test_whatever_is_made_up_is_answered_as_documented(schema: BaseSchema) -> None:
    systematic = itertools.count()

    def check_some(case: Any) -> None:
        if case.meta is None or case.meta.phase.name != TestPhase.COVERAGE or next(systematic) % EVERY == 0:
            check(case)

    for operation in operations(schema)[::EVERY_OPERATION]:
        try_out(operation, check_some)
    assert next(systematic) > 100 * EVERY


@pytest.mark.slow
def test_whatever_is_made_up_systematically_is_answered_as_documented(schema: BaseSchema) -> None:
    for operation in operations(schema):
        try_out(operation, check)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "a", "stream": True}),
        ("/v1/responses", {"model": "tiny", "input": "a", "stream": True}),
        (
            "/v1/messages",
            {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": True},
        ),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": True}),
    ],
)
def test_streams_are_as_documented(schema: BaseSchema, path: str, body: dict[str, Any]) -> None:
    """Hardly ever made up: most streams that are asked for ask for something else that is wrong."""
    response = schema[path]["POST"].Case(body=body, media_type="application/json").call_and_validate()
    assert response.headers["content-type"][0].startswith("text/event-stream")


@pytest.mark.parametrize(
    "named", [[], [""], ["content"], ["timings"], ["timings/prompt_n", "generation_settings/seed", "tokens", "none/x"]]
)
def test_chosen_fields_are_as_documented(schema: BaseSchema, named: list[str]) -> None:
    body = {"prompt": "a", "n_predict": 4, "response_fields": named}
    schema["/completion"]["POST"].Case(body=body, media_type="application/json").call_and_validate()


def test_a_gap_s_chosen_fields_are_documented_likewise(schema: BaseSchema) -> None:
    """By the same schema: filling a gap needs a model with tokens for it, which this one hasn't."""
    described = (schema.raw_schema["paths"][path]["post"]["responses"]["200"] for path in ("/completion", "/infill"))
    completion, infill = (each["content"]["application/json"]["schema"]["anyOf"] for each in described)
    assert completion == infill


@pytest.mark.slow
def test_for_longer(schema: BaseSchema) -> None:
    for operation in operations(schema):
        bounded(150)(given(operation.as_strategy())(check))()
