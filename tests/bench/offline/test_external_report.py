"""Methods timed from outside: medians, comparison, and the lines of the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eyas.bench.offline.external import external_errors, external_lines, measure_external
from eyas.bench.offline.report import line_dict, means, table_of
from eyas.bench.offline.runner import Plan, Task
from eyas.bench.serving.client import LoadRun, TimedAnswer
from eyas.bench.serving.servers import SpeculationCounts
from eyas.text.prompts import PromptRow

TASK = Task("t", [[PromptRow("a", "f:1", prompt="x")], [PromptRow("b", "f:2", prompt="x")]])


def method(*runs: LoadRun) -> Any:
    left: Iterator[LoadRun] = iter(runs)
    return lambda _group: next(left)


def run(seconds: float, text: str = "x", error: str | None = None, **more: Any) -> LoadRun:
    """Ten tokens, the first after a tenth of the time."""
    answer = (
        TimedAnswer(0, 0.0, seconds, seconds / 10, 10, 3, text)
        if error is None
        else TimedAnswer(0, 0.0, seconds, error=error)
    )
    return LoadRun(seconds, [answer], SpeculationCounts(**more))


def test_medians_ratios_and_identical_answers() -> None:
    counted = {"drafts": 4.0, "accepted": 6.0, "by_position": (4.0, 2.0)}
    methods = {
        "baseline": method(*(run(s) for s in (99, 2, 8, 4, 1, 1, 1))),  # one to warm up, three of each group
        "endpoint": method(run(99), run(1), run(2), run(9), run(0.5), run(0.5, "y"), run(0.5, **counted)),
    }
    steps: list[int] = []
    heard = measure_external(TASK, methods, "baseline", Plan(3, 1), lambda: steps.append(0))
    base, end = external_lines("t", heard, "baseline")
    assert len(steps) == 12
    assert (base.tokens_per_second, end.tokens_per_second) == (20 / 5, 20 / 2.5)
    assert (base.speedup, end.speedup, base.efficiency) == (1.0, 2.0, None)
    assert ((base.same, base.answers), (end.same, end.answers)) == ((2, 2), (1, 2))
    assert end.ttft_ms == pytest.approx(125.0)  # 200 and 50
    assert end.tpot_ms == pytest.approx(125.0)  # 1.8 s and 0.45 s for nine tokens
    assert heard["endpoint"].as_dict()["tokens"] == 20


def test_accept_length_and_positions_come_from_the_median_runs() -> None:
    counted = {"drafts": 4.0, "accepted": 6.0, "by_position": (4.0, 2.0)}
    heard = measure_external(TASK, {"endpoint": method(run(1, **counted), run(1, **counted))}, None, Plan(1, 0))
    (line,) = external_lines("t", heard, None)
    assert (line.accept_length, line.by_position) == (2.5, [1.0, 0.5])
    assert (line.speedup, line.efficiency, line.answers) == (None, None, 0)
    assert line_dict(line)["speedup"] is None
    (mean,) = means([line, line_of_another_file(line)])
    assert (mean.speedup, mean.accept_length, mean.tpot_ms) == (None, 2.5, line.tpot_ms)
    table = table_of([line], "title")
    assert [column.header for column in table.columns][6:8] == ["TTFT ms", "TPOT ms"]
    assert [next(iter(column.cells)) for column in table.columns][3:6] == ["", "2.50", ""]


def line_of_another_file(line: Any) -> Any:
    return type(line)(**{**vars(line), "task": "u"})


@pytest.mark.parametrize(("accepted", "efficiency"), [(0.0, 0.4), (6.0, None)])
def test_efficiency_is_told_against_plain_decoding_only(accepted: float, efficiency: float | None) -> None:
    base = run(1, drafts=4.0, accepted=accepted) if accepted else run(1)
    methods = {"baseline": method(base, base), "endpoint": method(*[run(1, drafts=4.0, accepted=6.0)] * 2)}
    lines = external_lines("t", measure_external(TASK, methods, "baseline", Plan(1, 0)), "baseline")
    assert [line.efficiency for line in lines] == [None, efficiency]


def test_errors_are_counted_and_never_identical() -> None:
    methods = {"none": method(run(1), run(1)), "endpoint": method(run(1, error="429: full"), run(1))}
    heard = measure_external(TASK, methods, "none", Plan(1, 0))
    _, end = external_lines("t", heard, "none")
    assert (end.same, end.answers, end.tokens_per_second) == (1, 2, 5.0)
    assert external_errors({"t": heard}) == ["t, endpoint: 1 times 429: full"]
