"""eyas beside llama.cpp: which prompts are asked, what a row says, and that a stopped run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import side_by_side
from benchmarks.serving.side_by_side import Models, all_equal, cell_of, rows_of, turns_of
from eyas.bench.serving.client import LoadRun, TimedAnswer
from eyas.errors import UsageError

MODELS = Models(Path("t.gguf"), Path("s.gguf"), None, Path("llama-server"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(7)), encoding="utf-8")
    return path


def answered(texts: list[str], seconds: float) -> LoadRun:
    made = [TimedAnswer(0, 0.0, seconds, 1.0, 21, 5, text, 10.0, 11.0) for text in texts]
    return LoadRun(seconds, made)


def test_no_prompt_is_asked_twice(prompts: Path) -> None:
    turns = list(turns_of([prompts], [1, 4], 3))
    assert [(turn.clients, turn.number, len(turn.items)) for turn in turns] == [
        (1, 0, 1), (1, 1, 1), (1, 2, 1), (4, 0, 4),
    ]  # fmt: skip
    assert len({item.id for turn in turns for item in turn.items}) == 7
    with pytest.raises(UsageError, match="too few prompts"):
        list(turns_of([prompts], [1, 4], 4))


def test_a_row_compares_turns_with_plain_ones(prompts: Path) -> None:
    first, second = list(turns_of([prompts], [1], 2))
    cells = []
    for turn, fast in ((first, 2.0), (second, 3.0)):
        cells.append(cell_of(turn, "plain", answered(["a"], 6.0), 42.0, 10**9))
        cells.append(cell_of(turn, "suffix", answered(["a"], fast), 21.0, 2 * 10**9))
        cells.append(cell_of(turn, "llama", answered(["b"], 5.0), None, 10**9))
    plain, suffix, llama = rows_of(cells)
    assert (plain["over plain"], suffix["over plain"], plain["equal"], suffix["equal"]) == (1.0, 2.5, "2/2", "2/2")
    assert suffix["decode"] == pytest.approx((20 + 10) / 2)
    assert (suffix["all"], suffix["accept"], suffix["GB"], suffix["J"]) == (round(42 / 5, 1), 2.1, 2.0, 1.0)
    assert (llama["equal"], llama["J"]) == ("0/2", None)
    assert all_equal([plain, suffix, llama])
    cells[1]["answers"][0]["text"] = "c"
    assert not all_equal(rows_of(cells))


def test_a_failed_request_ends_the_run(prompts: Path) -> None:
    (turn,) = turns_of([prompts], [1], 1)
    with pytest.raises(SystemExit, match="plain, some: 500"):
        cell_of(turn, "plain", LoadRun(1.0, [TimedAnswer(0, 0.0, 1.0, error="500")]), None, 0)


def test_sides_become_servers() -> None:
    assert MODELS.sides() == [
        "plain", "suffix", "small", "small+suffix", "llama", "llama+small", "llama+ngram-simple", "llama+ngram-map-k",
        "llama+ngram-mod",
    ]  # fmt: skip
    words = {side: " ".join(MODELS.command(side, 4)) for side in (*MODELS.sides(), "suffix@chain:8")}
    assert "--draft-model s.gguf --method +suffix --tree auto" in words["small+suffix"]
    assert words["suffix@chain:8"].partition("--method")[2].startswith(" suffix --tree chain:8")
    assert "--tree" not in words["plain"]
    assert "--spec-type draft-simple -md s.gguf" in words["llama+small"]
    with pytest.raises(UsageError, match="needs --drafter"):
        MODELS.command("drafter", 1)
    with pytest.raises(UsageError, match="needs --openvino"):
        MODELS.command("openvino", 1)
    others = MODELS._replace(openvino=Path("python"))
    assert others.sides()[-2:] == ["openvino", "openvino+lookup"]
    assert [others.command(side, 4)[2:] for side in others.sides()[-2:]] == [["t.gguf"], ["t.gguf", "--lookup"]]


def test_a_stopped_run_goes_on(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept turns aren't measured again; another run's file is refused."""
    asked = list[str]()
    output = tmp_path / "out.json"

    class Server:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None: ...

        def memory_bytes(self) -> int:
            return 10**9

        def cpu_seconds(self) -> float:
            return 0.0

    async def ask(server: Any, items: Any, _tokens: int) -> LoadRun:
        if items[0].id != "hello":
            asked.append(server.name)
        if len(asked) == 3:
            asked.append("stopped")
            raise KeyboardInterrupt
        return answered(["a"] * len(items), 2.0)

    monkeypatch.setattr(Models, "server", lambda _self, name, _slots: Server(name))
    monkeypatch.setattr(side_by_side, "ask", ask)

    def run(*more: str) -> int | None:
        words = ["x", "t.gguf", "--prompts", str(prompts), "--sides", "suffix", "--count", "2", *more]
        monkeypatch.setattr("sys.argv", [*words, "--output", str(output)])
        return side_by_side.main()

    with pytest.raises(KeyboardInterrupt):
        run()
    assert run() == 0
    assert asked == ["plain", "suffix", "suffix", "stopped", "suffix", "plain"]
    assert [row["equal"] for row in json.loads(output.read_text(encoding="utf-8"))["rows"]] == ["2/2", "2/2"]
    with pytest.raises(UsageError, match="other settings"):
        run("--tokens", "9")
