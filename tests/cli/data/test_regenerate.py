"""`eyas data regenerate`: the three ways to be answered, and options that don't go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.text.chats import Chat, Message, exchange, read_chats, write_chats

from ...data.regenerate.fake_endpoint import Said, completion, echo, endpoint
from ...pairs import Pair
from ..conftest import Run


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    write_chats(path, [exchange(f"c{i}", f"add {i}", "old") for i in range(4)])
    return path


def test_in_process(run: Run, pair: Pair, chats: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    words = ("data", "regenerate", "--model", pair.model, "--chats", chats, "--max-new-tokens", 8, "--output")
    done = run(*words, output, "--draft-model", pair.drafter, "--tree", "chain:2", "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert (shown["chats"], shown["unanswered"]["count"]) == (4, 0)
    assert shown["this_run"]["accept_length"] >= 1
    assert all(chat.tokens for chat in read_chats(output))
    plain = run(*words, tmp_path / "plain.jsonl")
    assert plain.exit_code == 0
    assert plain.stdout.splitlines()[0].split() == ["4", "chats", "written"]
    assert output.read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    assert run(*words, output, "--batch-size", 2).exit_code == 0  # nothing left to ask
    other = run(*words, output, "--temperature", 1)
    assert other.exit_code == 2
    assert "made with other settings (sampling was" in other.stderr


def test_through_an_endpoint(run: Run, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(body: dict[str, Any], before: int) -> Said:
        if body["messages"][0]["content"] == "add 2":
            return Said(400, {"error": {"message": "too long"}})
        return echo(body, before)

    monkeypatch.setenv("KEY_OF_TEST", "abc")
    with endpoint(script) as server:
        words = ("data", "regenerate", "--endpoint", server.url, "--model", "m", "--chats", chats)
        done = run(*words, "--output", tmp_path / "out.jsonl", "--api-key-env", "KEY_OF_TEST")
        assert done.exit_code == 1
        assert "error: chat c2: " in done.stderr
        assert "1 chat got no answer (the same command tries them again)" in done.stderr
        assert server.headers[0]["Authorization"] == "Bearer abc"
        server.script = lambda *_: Said(body=completion({"content": "yes", "reasoning_content": "hm"}))
        again = run(*words, "--output", tmp_path / "out.jsonl")
        assert again.exit_code == 0
        assert len(server.requests) == 5
        dropped = run(*words, "--output", tmp_path / "o.jsonl", "--reasoning", "drop", "--extra-body", '{"x": 1}')
        assert dropped.exit_code == 0
    assert server.requests[-1]["x"] == 1
    last = [chat.messages[-1] for chat in read_chats(tmp_path / "out.jsonl")]
    assert (last[2].content, last[2].reasoning_content) == ("yes", "hm")
    assert [chat.messages[-1].reasoning_content for chat in read_chats(tmp_path / "o.jsonl")] == [None] * 4


def test_through_batch_files(run: Run, tmp_path: Path) -> None:
    roles = ("user", "assistant", "user", "assistant")
    messages = tuple(Message(role=role, content=role) for role in roles)  # type: ignore[arg-type]
    write_chats(tmp_path / "in.jsonl", [Chat(id="c", messages=messages)])
    words = ("data", "regenerate", "--model", "m", "--chats", tmp_path / "in.jsonl", "--turns", "all")
    words = (*words, "--output", tmp_path / "out.jsonl")
    for number in range(2):
        requests, results = tmp_path / f"ask{number}.jsonl", tmp_path / f"told{number}.jsonl"
        written = run(*words, "--batch-write", requests, "--json")
        assert json.loads(written.stdout) == [{"path": str(requests), "requests": 1}]
        asked = json.loads(requests.read_text())
        response = {"status_code": 200, "body": echo(asked["body"]).body}
        results.write_text(json.dumps({"custom_id": asked["custom_id"], "response": response}) + "\nnot JSON\n")
        done = run(*words, "--batch-read", results)
        assert done.exit_code == (1 if number == 0 else 0)  # a turn is still to be asked
        assert "1 lines of the result files are no results" in done.stderr
    assert "Nothing is left to ask." in run(*words, "--batch-write", tmp_path / "none.jsonl").stdout
    (chat,) = read_chats(tmp_path / "out.jsonl")
    assert all((message.content or "").startswith("<user>") for message in chat.messages[1::2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint", "http://x/v1", "--batch-write", "f.jsonl"], "different ways"),
        (["--endpoint", "http://x/v1", "--batch-size", "2"], "--batch-size would be ignored"),
        (["--endpoint", "http://x/v1", "--draft-model", "d"], "--draft-model would be ignored"),
        (["--batch-write", "f.jsonl", "--timeout", "3"], "--timeout would be ignored"),
        (["--tool-choice", "auto"], "--tool-choice would be ignored: the answers come from the engine"),
        (["--reasoning", "drop"], "--reasoning would be ignored"),
        (["--endpoint", "x:1"], "http://HOST:PORT/v1"),
        (["--endpoint", "http://x/v1", "--api-key-env", "NO_SUCH_KEY"], "no such environment variable"),
        (["--endpoint", "http://x/v1", "--tool-choice", "must"], "'must' is not one of"),
        (["--endpoint", "http://x/v1", "--extra-body", "[1]"], "must be a JSON object"),
        (["--endpoint", "http://x/v1", "--extra-body", "{"], "no JSON"),
        (["--endpoint", "http://x/v1", "--temperature", "-1"], "--temperature -1.0"),
        (["--turns", "some"], "'some' is not one of"),
        (["--unfinished", "mend"], "'mend' is not one of"),
        (["--tree", "chain:2"], "needs a drafter"),
    ],
)
def test_bad_options(run: Run, chats: Path, tmp_path: Path, options: list[str], message: str) -> None:
    done = run("data", "regenerate", "--model", "m", "--chats", chats, "--output", tmp_path / "out.jsonl", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == [chats]


def test_lossy_answers_are_refused(run: Run, pair: Pair, chats: Path, tmp_path: Path) -> None:
    words = ("data", "regenerate", "--model", pair.model, "--draft-model", pair.drafter, "--chats", chats)
    done = run(*words, "--output", tmp_path / "out.jsonl", "--acceptance", "typical")
    assert done.exit_code == 2
    assert "the target's own" in done.stderr
