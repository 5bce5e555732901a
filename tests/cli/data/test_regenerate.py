"""`eyas data regenerate`: the three ways to be answered, and options that don't go together."""

from __future__ import annotations

import json
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eyas.cli.common import display
from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.options import DraftOptions, TargetPanel
from eyas.cli.data import regenerate as answerers
from eyas.data.regenerate.workers import EngineAnswerer
from eyas.text.chats import Chat, Message, exchange, read_chats, write_chats

from ...data.regenerate.fake_endpoint import Said, completion, echo, endpoint
from ...labs.cluster.fake import FakeExecutor
from ...pairs import Pair
from ..conftest import Run

SERVER = Path(__file__).parents[2] / "data" / "regenerate" / "server_script.py"


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
    named = f"--model {pair.model} --chats {tmp_path / 'plain.jsonl'} --output {tmp_path / 'store'}"
    assert f"next: eyas data capture {named}\n" in plain.stderr
    assert plain.stdout.splitlines()[0].split() == ["4", "chats", "written"]
    assert output.read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    assert run(*words, output, "--batch-size", 2).exit_code == 0  # nothing left to ask
    other = run(*words, output, "--temperature", 1)
    assert other.exit_code == 2
    changed = "answers made with other settings: sampling.temperature was 0.0, is 1.0 (--temperature). Restore"
    assert changed in other.stderr


def test_answers_are_as_long_as_there_is_room(run: Run, pair: Pair, chats: Path, tmp_path: Path) -> None:
    words = ("data", "regenerate", "--model", pair.model, "--chats", chats, "--ignore-eos")
    done = run(*words, "--output", tmp_path / "a.jsonl", "--max-length", 90)
    assert done.exit_code == 0, done.output
    made = list(read_chats(tmp_path / "a.jsonl"))
    assert [len(chat.tokens or ()) for chat in made] == [90] * 4
    assert [chat.cut_off for chat in made] == [(1,)] * 4
    assert "note: 4 answers cut off by the length limit: their chats are marked `cut_off`" in done.stderr
    both = run(*words, "--output", tmp_path / "b.jsonl", "--max-length", 90, "--max-new-tokens", 5)
    assert both.exit_code == 0, both.output
    assert {stop - start for chat in read_chats(tmp_path / "b.jsonl") for start, stop in chat.answers or ()} == {5}
    long = run(*words, "--output", tmp_path / "c.jsonl", "--max-length", 4)
    assert long.exit_code == 1
    assert "leaves no room for an answer within 4: raise --max-length" in long.stderr
    short = run(*words, "--output", tmp_path / "d.jsonl", "--max-new-tokens", 400)
    assert short.exit_code == 0  # no --max-length, so only the model's context bounds them
    assert {len(chat.tokens or ()) for chat in read_chats(tmp_path / "d.jsonl")} == {256}


def test_without_options_an_answer_may_fill_the_default_length(
    run: Run, pair: Pair, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answerers, "MAX_LENGTH", 70)
    words = ("data", "regenerate", "--model", pair.model, "--chats", chats, "--ignore-eos")
    assert run(*words, "--output", tmp_path / "a.jsonl").exit_code == 0
    assert {len(chat.tokens or ()) for chat in read_chats(tmp_path / "a.jsonl")} == {70}


def test_ctrl_c_says_what_is_kept_and_what_goes_on(
    run: Run, pair: Pair, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EngineAnswerer.answers

    def interrupted(self: Any, take: Any) -> Any:
        for number, reply in enumerate(real(self, take)):
            if number == 2:
                raise KeyboardInterrupt
            yield reply

    words = ("data", "regenerate", "--model", pair.model, "--chats", chats, "--max-new-tokens", 8, "--output")
    words = (*words, tmp_path / "two words.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(EngineAnswerer, "answers", interrupted)
        done = run(*words)
    assert done.exit_code == 130
    assert "stopped: every answer so far is kept in the journal next to the output." in done.stderr
    assert f"Resume with the same command: eyas data regenerate --model {pair.model} --chats {chats}" in done.stderr
    assert f"--output '{tmp_path / 'two words.jsonl'}'" in done.stderr
    assert len((tmp_path / "two words.jsonl.journal").read_text().splitlines()) == 1 + 2
    assert run(*words).exit_code == 0


def test_without_a_terminal_a_line_says_how_far_it_is(
    run: Run, pair: Pair, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "SILENCE", 0.0)
    words = ("data", "regenerate", "--model", pair.model, "--chats", chats, "--max-new-tokens", 8)
    done = run(*words, "--output", tmp_path / "out.jsonl", "--batch-size", 1)
    lines = [line for line in done.stderr.splitlines() if line.startswith("chats: ")]
    assert [line.split(",")[0] for line in lines] == [
        "chats: 1 of 4 (25%)",
        "chats: 2 of 4 (50%)",
        "chats: 3 of 4 (75%)",
    ]
    assert "tokens/s" in lines[0]


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
        assert "max_tokens" not in server.requests[0]  # as long as the endpoint allows
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
        assert "1 lines of the result files aren't results" in done.stderr
    assert "Nothing is left to ask." in run(*words, "--batch-write", tmp_path / "none.jsonl").stdout
    (chat,) = read_chats(tmp_path / "out.jsonl")
    assert all((message.content or "").startswith("<user>") for message in chat.messages[1::2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint", "http://x/v1", "--batch-write", "f.jsonl"], "different ways"),
        (["--endpoint", "http://x/v1", "--batch-size", "2"], "--batch-size would be ignored"),
        (["--endpoint", "http://x/v1", "--max-length", "9"], "--max-length would be ignored"),
        (["--endpoint", "http://x/v1", "--draft-model", "d"], "--draft-model would be ignored"),
        (["--batch-write", "f.jsonl", "--timeout", "3"], "--timeout would be ignored"),
        (["--tool-choice", "auto"], "--tool-choice would be ignored: the answers come from the engine"),
        (["--reasoning", "drop"], "--reasoning would be ignored"),
        (["--endpoint", "x:1"], "http://HOST:PORT/v1"),
        (["--endpoint", "http://x/v1", "--api-key-env", "NO_SUCH_KEY"], "no such environment variable"),
        (["--endpoint", "http://x/v1", "--tool-choice", "must"], "'must' is not one of"),
        (["--endpoint", "http://x/v1", "--extra-body", "[1]"], "must be a JSON object"),
        (["--endpoint", "http://x/v1", "--extra-body", "{"], "valid JSON"),
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


def test_chats_behind_urls(run: Run, pair: Pair, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.chdir(tmp_path)
    system = fsspec.filesystem("memory")
    try:
        system.pipe_file("/bucket/in.jsonl", chats.read_bytes())
        words = ("data", "regenerate", "--model", pair.model, "--max-new-tokens", 8)
        done = run(*words, "--chats", "memory://bucket/in.jsonl", "--output", "memory://bucket/out.jsonl")
        assert done.exit_code == 0, done.output
        assert run(*words, "--chats", chats, "--output", tmp_path / "out.jsonl").exit_code == 0
        assert system.cat_file("/bucket/out.jsonl") == (tmp_path / "out.jsonl").read_bytes()
        none = run(*words, "--chats", "memory://bucket/none", "--output", "memory://bucket/x")
        assert "there is nothing at memory://bucket/none" in none.stderr
        assert "--chats none.jsonl does not exist" in run(*words, "--chats", "none.jsonl", "--output", "x").stderr
    finally:
        system.store.clear()
        system.pseudo_dirs[:] = [""]


def test_workers_with_servers_of_their_own(
    run: Run, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is vLLM's; what it starts here is a script that understands it."""
    executor = FakeExecutor(room=1)
    monkeypatch.setattr(ClusterOptions, "connected", lambda _: nullcontext(executor))
    script = f"{sys.executable} {SERVER}"
    words = ("data", "regenerate", "--model", "m", "--chats", chats, "--on", "ray", "--engine", "vllm")
    done = run(
        *words,
        "--engine-command",
        script,
        "--engine-option",
        "--seed",
        "--engine-option",
        7,
        "--output",
        tmp_path / "out.jsonl",
    )
    assert done.exit_code == 0, done.output
    assert [chat.messages[-1].content for chat in read_chats(tmp_path / "out.jsonl")] == [
        f"m 7 <add {i}>" for i in range(4)
    ]
    for wrong, said in (
        ((*words, "--draft-model", "x"), "--draft-model would be ignored: the answers come from servers"),
        ((*words, "--endpoint", "http://x/v1"), "leave it out, or --endpoint and batch files"),
        ((*words[:-4], "--engine", "vllm"), "give --on ray, or start the server yourself and give --endpoint"),
        ((*words[:-2], "--engine-command", "x"), "--engine-command would be ignored"),
        ((*words, "--engine-command", "no-such-program"), "there is no program 'no-such-program'"),
    ):
        result = run(*wrong, "--output", tmp_path / "other.jsonl")
        assert result.exit_code == 2, result.output
        assert said in result.stderr


def test_as_many_questions_ahead_as_a_workers_server_answers() -> None:
    options = answerers.AnswererOptions(
        TargetPanel(model="org/model"),
        DraftOptions(),
        answerers.SlotOptions(),
        answerers.EndpointOptions(),
        answerers.BatchFileOptions(),
        answerers.RequestOptions(),
        answerers.AnswerSamplingOptions(),
        answerers.WorkerEngineOptions("vllm"),
    )
    assert options.ahead == 21
    sent = pickle.dumps(options.worker())
    assert b"ServerAnswererMaker" in sent
    assert b"eyas.cli" not in sent
