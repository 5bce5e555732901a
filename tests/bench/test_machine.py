"""When a measurement can't be trusted."""

from __future__ import annotations

import pytest

from eyas.bench.machine import describe_machine
from eyas.runtime import busy, taken_by_others


def test_others_at_work_are_noticed() -> None:
    quiet = describe_machine() | {"cores": 4, "threads": 4, "load_average": [4.2, 9.0, 9.0]}
    assert busy(quiet) is None
    assert busy(quiet | {"load_average": None}) is None
    warning = busy(quiet | {"load_average": [6.5, 0.0, 0.0]})
    assert warning is not None
    assert "load 6.5 on 4 cores" in warning
    assert taken_by_others(quiet) == 0.0
    assert taken_by_others(quiet | {"load_average": [8.0, 0.0, 0.0]}) == pytest.approx(0.5)
