"""`eyas sweep`."""

from __future__ import annotations

import json

import yaml
from typer.testing import CliRunner

from eyas.bench.report.page import render
from eyas.cli.app import app
from eyas.labs.sweep.report import sweep_section

from .conftest import Setup


def test_table_results_and_plots(setup: Setup) -> None:
    config = setup.config(knobs={"drafter.loop.seed": [0, 7, 1]}).model_dump(mode="json")
    file = setup.folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({**config, "knobs": {"drafter.loop.seed": [0, 7, 1]}}))
    result = CliRunner().invoke(app, ["sweep", str(file), "timing.repeats=1"])
    assert result.exit_code == 1  # a trial failed
    assert "no such drafter" in result.stderr
    assert result.stderr.count(": training, see ") == 3
    report = json.loads((setup.folder / "sweep" / "results.json").read_text())
    good, failed = report["trials"][:2], report["trials"][2:]
    assert [row["values"]["drafter.loop.seed"] for row in failed] == [7]
    assert good[0]["accept_length"] >= good[1]["accept_length"]
    assert all(row["tokens_per_second"] > 0 for row in good)
    assert report["choice"]["pick"] == good[0]["trial"]
    assert f"Best: {good[0]['trial']} has the best mean accept length" in result.stdout
    assert (setup.folder / "sweep" / "knobs.svg").is_file()
    assert (setup.folder / "sweep" / "trade.svg").is_file()
    page = render("Sweep", [], [sweep_section(report)])
    assert good[0]["trial"] in page
    assert page.count("data:image/svg+xml") == 2
    again = CliRunner().invoke(app, ["sweep", str(file), "knob=1"])
    assert (again.exit_code, "knob: there is no such key" in again.stderr) == (2, True)
