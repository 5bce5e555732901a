"""What plots draw is what tables print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from eyas.bench.report import figures
from eyas.bench.report.figures import tree_figure


def _measured(name: str, nodes: int, speedup: float) -> dict[str, Any]:
    return {"name": name, "depth": 2, "top_k": 2, "nodes": nodes, "mean": {"speedup": speedup, "accept_length": 2.0}}


def test_the_map_of_trees_shows_the_last_pass_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, float] = {}
    real = figures._panel

    def panel(axes: Any, shown: Sequence[Any], name: str, *rest: Any) -> Any:
        if name == "speedup":
            drawn.update({one["name"]: one["mean"][name] for one in shown})
        return real(axes, shown, name, *rest)

    monkeypatch.setattr(figures, "_panel", panel)
    passes = [
        {"prompts": 1, "candidates": [_measured("a", 3, 1.9), _measured("b", 4, 1.2)]},
        {"prompts": 9, "candidates": [_measured("a", 3, 1.4)]},
    ]
    assert tree_figure({"passes": passes, "pick": "a"}).startswith(b"<?xml")
    assert drawn == {"a": 1.4, "b": 1.2}
