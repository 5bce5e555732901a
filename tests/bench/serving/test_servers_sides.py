"""Sides as they are written on the command line."""

from __future__ import annotations

import pytest

from eyas.bench.serving.servers import Side, check_names, parse_side
from eyas.errors import UsageError


def test_sides_are_read() -> None:
    side = parse_side("off=http://h:1/v1/,speculate=false,model=m=x")
    assert side == Side("off", "http://h:1/v1", "m=x", False)
    assert side.root == "http://h:1"
    assert side.extra == {"eyas": {"speculate": False}}
    assert parse_side("a=https://h").url == "https://h/v1"
    assert parse_side("a=http://h").extra == {}
    assert parse_side("http://h:2/v1?a=b", "endpoint").name == "endpoint"


@pytest.mark.parametrize("text", ["", "a", "http://h", "a=h:1", "a=http://h,speculate=no", "a=http://h,tree=x"])
def test_wrong_sides_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"isn't a server|neither"):
        parse_side(text)


def test_names_must_differ_and_hold_the_baseline() -> None:
    check_names(["a", "b"], "b")
    with pytest.raises(UsageError, match="same name"):
        check_names(["a", "a"], "a")
    with pytest.raises(UsageError, match="isn't one of the sides"):
        check_names(["a"], "b")
