"""Shared by tests on Ray: a pair, and a cluster that is started once per test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ...pairs import Pair, save_drafter, save_target
from .nodes import Nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    pytest.importorskip("ray", reason="make ray")
    made = Nodes()
    yield made
    made.cluster.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("pair")
    return Pair(save_target(path / "model"), save_drafter(path / "drafter"))
