"""What the scripts share: the command line of a function, turns, paired ratios, and the report."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from rich.console import Console

from benchmarks.harness import command, interleave, paired, report, script, table


def call(monkeypatch: pytest.MonkeyPatch, run: Callable[[], int | None], line: str) -> int | None:
    monkeypatch.setattr(sys, "argv", ["script", *line.split()])
    return run()


def test_parameters_are_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {}

    def main(
        model: str,
        files: Sequence[Path] = (Path("a"),),
        *,
        prompts: Path,
        repeats: int = 3,
        bf16: bool = False,
        kinds: Sequence[Literal["x", "y"]] = ("x",),
        pair: tuple[Path, Path] | None = None,
        draft_model: Annotated[str | None, "whose drafts"] = None,
        quantize: Literal["int8"] | None = None,
    ) -> int:
        found.update(locals())
        return 3 if repeats == 0 else 0

    run = script(main)
    call(monkeypatch, run, "demo --prompts P")
    assert {name: found[name] for name in ("model", "files", "prompts", "repeats", "bf16", "kinds", "pair")} == {
        "model": "demo", "files": (Path("a"),), "prompts": Path("P"), "repeats": 3, "bf16": False, "kinds": ("x",),
        "pair": None,
    }  # fmt: skip
    call(
        monkeypatch,
        run,
        "demo b c --prompts P --repeats 5 --bf16 --kinds y x --pair d e --draft-model D --quantize int8",
    )
    assert found["files"] == [Path("b"), Path("c")]
    assert (found["repeats"], found["bf16"], found["kinds"]) == (5, True, ["y", "x"])
    assert (found["pair"], found["draft_model"], found["quantize"]) == ([Path("d"), Path("e")], "D", "int8")
    for wrong in ("demo", "--prompts P", "demo --prompts P --kinds z", "demo --prompts P --repeats x", "--pair d"):
        with pytest.raises(SystemExit) as ended:
            call(monkeypatch, run, wrong)
        assert ended.value.code == 2, wrong
    assert call(monkeypatch, run, "demo --prompts P --repeats 0") == 3
    with pytest.raises(SystemExit):
        call(monkeypatch, run, "--help")
    shown = capsys.readouterr().out
    assert "What the scripts share" in shown
    assert "whose drafts" in shown


@dataclass(frozen=True, kw_only=True)
class Options:
    tokens: int = 8
    name: str = "n"


def test_a_dataclass_stands_for_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Options] = []

    def main(options: Options) -> None:
        found.append(options)

    call(monkeypatch, script(main), "--tokens 9")
    assert found == [Options(tokens=9)]


def test_of_several_functions_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def measure(model: str) -> None:
        found.append(model)

    def simulate(*, rows: int = 4) -> None:
        found.append(rows)

    run = script(measure, simulate)
    call(monkeypatch, run, "measure m")
    call(monkeypatch, run, "simulate --rows 2")
    assert found == ["m", 2]
    with pytest.raises(SystemExit):
        call(monkeypatch, run, "other")


def test_sides_take_turns_and_the_first_turn_warms_up() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], int]:
        return lambda: order.append(name) or len(order)  # type: ignore[func-returns-value]

    assert interleave({"a": side("a"), "b": side("b")}, 2) == {"a": [4, 5], "b": [3, 6]}
    assert "".join(order) == "abbaab"


def test_ratios_are_of_the_same_turn() -> None:
    # the medians' ratio would be 3 / 2
    assert paired([3.0, 1.0, 8.0], [1.0, 2.0, 4.0]) == {"median": 2.0, "least": 0.5, "most": 3.0}
    with pytest.raises(ValueError, match="zip"):
        paired([1.0], [1.0, 2.0])


@pytest.mark.parametrize(("columns", "lines"), [(3, 1), (7, 2), (11, 2)])
def test_a_table_breaks_titles_between_words_and_cuts_nothing(
    columns: int, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"the_{index}_words" for index in range(columns)]
    Console(width=80).print(table([dict.fromkeys(names, 0.12345)]))
    *titles, cells = capsys.readouterr().out.splitlines()
    assert len(titles) == lines
    assert cells.split() == ["0.1235"] * columns
    assert Counter(" ".join(titles).split()) == Counter(" ".join(names).replace("_", " ").split())


def test_a_report_says_when_where_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "a b", "--n", "1"])
    rows = [{"tokens": 1, "seconds": {"eyas": 0.123456, "plain": 2.0}}, {"tokens": 20, "same": True}]
    report({"model": "demo"}, tmp_path / "r.json", rows)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["tokens", "seconds", "eyas", "seconds", "plain", "same"]
    assert shown[1].split() == ["1", "0.1235", "2"]
    assert max(map(len, shown)) <= 80
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["command"] == command()
    assert command().endswith(" 'a b' --n 1")
    assert written["machine"]["cpu"]
    assert len(written["date"]) == 10
    assert (written["model"], written["rows"]) == ("demo", rows)
    report({"model": "demo"})
    assert json.loads(capsys.readouterr().out)["model"] == "demo"
