"""Measurements without drawing."""

from __future__ import annotations

import pytest

from eyas.bench.report import figures


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render no figure, which takes longer than many measurements: the tests of `eyas bench report` show real ones."""
    blank = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"/>'
    monkeypatch.setattr(figures, "svg", lambda _figure: blank)
