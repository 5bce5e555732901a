"""When a measurement can't be trusted."""

from __future__ import annotations

from eyas.bench.machine import busy, describe_machine


def test_others_at_work_are_noticed() -> None:
    quiet = describe_machine() | {"cores": 4, "threads": 4, "load_average": [4.2, 9.0, 9.0]}
    assert busy(quiet) is None
    assert busy(quiet | {"load_average": None}) is None
    warning = busy(quiet | {"load_average": [6.5, 0.0, 0.0]})
    assert warning is not None
    assert "load 6.5 on 4 cores" in warning
