"""`eyas chat` with a script on its standard input, and at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eyas.engine import Engine

from ...pairs import Pair, save_target, tokenizer

Run = Callable[..., Result]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens kept in the cache, tokens of the prompt) of every turn."""
    seen: list[tuple[int, int]] = []
    stream = Engine.stream

    def spy(engine: Engine, requests: Any, stop: Any) -> Iterator[Any]:
        before = engine.state().prefix_hit_tokens_total
        yield from stream(engine, requests, stop)
        seen.append((engine.state().prefix_hit_tokens_total - before, len(requests[0].prompt)))

    monkeypatch.setattr(Engine, "stream", spy)
    return seen


def talk(run: Run, pair: Pair, lines: str, *options: Any) -> Result:
    pair_options = ("--model", pair.model, "--draft-model", pair.drafter, "--max-new-tokens", 6)
    return run("chat", *pair_options, *options, stdin=lines)


def test_turns_keep_the_cache_and_reset_drops_the_chat(run: Run, pair: Pair, kept: list[tuple[int, int]]) -> None:
    result = talk(run, pair, "In May?\n\nand then?\n/reset\nIn May?\n/exit\nnot said\n")
    assert result.exit_code == 0, result.stderr
    assert len(kept) == 3
    (first, alone), (second, grown), (third, again) = kept
    assert first == 0
    assert alone - 1 <= second < grown - 1  # the whole first prompt at least
    assert again == alone
    assert third == alone - 2  # the same words are still in the cache
    answers = [line for line in result.stdout.split("\n") if line]
    assert answers[0] == answers[-1]
    assert len(re.findall(r"6 tokens in", result.stderr)) == 3
    assert "a new conversation" in result.stderr


def test_a_system_message_opens_the_chat_and_survives_a_reset(
    run: Run, pair: Pair, kept: list[tuple[int, int]]
) -> None:
    assert talk(run, pair, "In May?\n/reset\nIn May?", "--system", "Sell clips.").exit_code == 0
    with_system = kept[:]
    kept.clear()
    talk(run, pair, "In May?")
    assert with_system[0][1] == with_system[1][1] > kept[0][1]


def test_a_turn_that_does_not_fit_is_refused_and_the_chat_goes_on(run: Run, pair: Pair) -> None:
    result = talk(run, pair, "May " * 300 + "\nIn May?\n")
    assert result.exit_code == 1
    assert "shorten the prompt (/reset starts over)" in " ".join(result.stderr.split())
    assert "6 tokens in" in result.stderr
    assert "Traceback" not in result.output


def test_a_tokenizer_without_a_chat_template_is_refused(run: Run, tmp_path: Path) -> None:
    save_target(tmp_path)
    bare = tokenizer().__class__.from_pretrained(tmp_path)
    bare.chat_template = None
    (tmp_path / "chat_template.jinja").unlink()
    bare.save_pretrained(tmp_path)
    result = run("chat", "--model", tmp_path, "--method", "none", stdin="")
    assert result.exit_code == 2
    assert "no chat template: use eyas generate" in result.stderr


def test_the_banner_says_who_answers_and_how_to_leave(run: Run, pair: Pair) -> None:
    result = talk(run, pair, "")
    assert f"chat with {pair.model}, drafted by {pair.drafter}\n" in result.stderr
    assert "/exit leaves" in result.stderr
    plain = run("chat", pair.model, stdin="")
    assert f"chat with {pair.model}\n" in plain.stderr


@pytest.mark.parametrize("line", ["/foo", "/resett", "/", "/etc/passwd is what?"])
def test_an_unknown_command_is_an_error_and_no_message(
    run: Run, pair: Pair, kept: list[tuple[int, int]], line: str
) -> None:
    result = talk(run, pair, f"{line}\nIn May?\n")
    assert result.exit_code == 1
    assert f"error: there is no command {line.split()[0]}: /help lists them" in result.stderr
    assert len(kept) == 1
    asked = kept.pop()
    assert talk(run, pair, "In May?\n").exit_code == 0
    assert asked == kept.pop()


def test_a_space_before_a_slash_makes_it_text(run: Run, pair: Pair, kept: list[tuple[int, int]]) -> None:
    assert talk(run, pair, " /foo\n").exit_code == 0
    assert len(kept) == 1


def test_help_lists_every_command(run: Run, pair: Pair, kept: list[tuple[int, int]]) -> None:
    result = talk(run, pair, "/help\n/?\n")
    for command in ("/help", "/reset", "/system TEXT", "/save FILE", "/stats", "/exit"):
        assert result.stderr.count(f"\n{command}  ") == 2, command
    assert kept == []


@pytest.mark.parametrize("leave", ["/exit", "/quit", "/bye"])
def test_what_other_programs_call_leaving(run: Run, pair: Pair, leave: str, kept: list[tuple[int, int]]) -> None:
    assert talk(run, pair, f"{leave}\nnot said\n").exit_code == 0
    assert kept == []


def test_a_system_message_set_in_the_chat_is_that_of_the_option(
    run: Run, pair: Pair, kept: list[tuple[int, int]]
) -> None:
    result = talk(run, pair, "/system\n/system Sell clips.\n/system\nIn May?\n")
    assert "no system message" in result.stderr
    assert "\nSell clips.\n" in result.stderr
    talk(run, pair, "In May?\n", "--system", "Sell clips.")
    (_, inside), (_, option) = kept
    assert inside == option


def test_saved_conversations_are_chats_that_data_prepare_reads(run: Run, pair: Pair, tmp_path: Path) -> None:
    from eyas.text.chats import read_chats

    file = tmp_path / "chats.jsonl"
    lines = f"In May?\n/save {file}\nand then?\n/save {file}\n/reset\n/save {file}\n/save\n"
    result = talk(run, pair, lines, "--system", "Sell clips.")
    assert result.exit_code == 1
    assert "error: nothing has been said yet" in result.stderr
    assert "error: /save where?" in result.stderr
    first, second = read_chats(file)
    assert [message.role for message in first.messages] == ["system", "user", "assistant"]
    assert second.messages[:3] == first.messages
    assert second.messages[3].content == "and then?"
    assert first.id != second.id
    answers = [line for line in result.stdout.split("\n") if line]
    assert "".join(message.content or "" for message in second.messages[2::2]).split() == " ".join(answers).split()
    assert "can't write" in talk(run, pair, f"In May?\n/save {tmp_path}\n").stderr


def test_the_limit_that_cut_an_answer_is_named(run: Run, pair: Pair) -> None:
    said = "(the answer was cut at 6 tokens: --max-new-tokens sets this limit)"
    assert said in talk(run, pair, "In May?\n", "--ignore-eos").stderr
    options = ("--model", pair.model, "--prompt", "In May?", "--max-new-tokens", 6, "--ignore-eos")
    assert said in run("generate", *options).stderr
    assert said not in run("generate", *options, "--json").stderr


def test_figures_of_all_answers(run: Run, pair: Pair) -> None:
    result = talk(run, pair, "/stats\nIn May?\n/reset\nand then?\n/stats\n")
    assert result.stderr.splitlines()[-1].startswith("12 tokens in ")
    assert "\n0 tokens in " in result.stderr


def test_text_of_several_lines(run: Run, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    assert talk(run, pair, f'"""In May?\n\n/reset\n"""\n/save {file}\n').exit_code == 0
    assert json.loads(file.read_text())["messages"][0]["content"] == "In May?\n\n/reset"


_SLOW = """
import sys, time
from eyas.engine.engine import Engine
advance = Engine._advance
def slowly(engine):
    time.sleep(0.1)
    advance(engine)
Engine._advance = slowly
from eyas.cli import main
main()
"""


class Terminal:
    """`eyas chat` at a pseudo-terminal, each of its steps slowed down."""

    def __init__(self, pair: Pair, *options: str) -> None:
        self._master, slave = pty.openpty()
        command = (sys.executable, "-c", _SLOW, "chat", pair.model, "--draft-model", pair.drafter, *options)
        env = os.environ | {"PROMPT_TOOLKIT_NO_CPR": "1"}  # this terminal doesn't say where its cursor is
        self.process = subprocess.Popen(
            command, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=_own_terminal
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """What matches `pattern`, which must come; what follows is left for the next call."""
        ends = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown, re.DOTALL)) is None:
            ready = select.select([self._master], [], [], max(0.0, ends - time.monotonic()))[0]
            assert ready, f"{pattern!r} didn't come: {self.shown!r}"
            try:
                self.shown += os.read(self._master, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                raise AssertionError(f"the program ended without {pattern!r}: {self.shown!r}") from None
        self.shown = self.shown[found.end() :]
        return found[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _own_terminal() -> None:
    import fcntl
    import signal
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so do its children


@pytest.fixture
def terminal(pair: Pair) -> Iterator[Terminal]:
    opened = Terminal(pair, "--max-new-tokens", "200", "--ignore-eos")
    yield opened
    opened.close()


@pytest.mark.slow  # a process of its own in a terminal
def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    terminal.wait_for("leaves.*>")
    terminal.type("In May?\n")
    terminal.wait_for("own tokens\r\n.")  # the answer has begun
    terminal.type("\x03")
    terminal.wait_for(r"\(stopped\)")
    assert 0 < int(terminal.wait_for(r"\d+ tokens in").split()[0]) < 200
    terminal.wait_for(">")
    terminal.type(f"/save {file}\n")
    terminal.wait_for("appended.*>")
    assert [each["role"] for each in json.loads(file.read_text())["messages"]] == ["user", "assistant"]
    time.sleep(0.5)  # the prompt is shown a moment before it is waited at
    terminal.type("\x03")  # one at the prompt says how to leave
    terminal.wait_for(r"\(Ctrl-C again, Ctrl-D or /exit leaves\).*>")
    terminal.type("/stats\n")  # and is forgotten when something is typed
    terminal.wait_for("tokens in.*>")
    time.sleep(0.5)
    terminal.type("\x03")
    terminal.wait_for(r"\(Ctrl-C again.*>")
    time.sleep(0.5)
    terminal.type("\x03")
    assert terminal.process.wait(60) == 0


@pytest.mark.slow
def test_a_pasted_text_is_one_message(terminal: Terminal, tmp_path: Path) -> None:
    """Whatever its lines begin with: commands, quotes."""
    pasted = ["// not a command", "/exit", '"""', "", *(f"In May, 漢{n}" for n in range(9))]
    for text in (pasted, pasted[2:]):
        file = tmp_path / "chats.jsonl"
        terminal.wait_for(">")
        terminal.type("\x1b[200~" + "\r".join(text) + "\x1b[201~")
        terminal.wait_for("漢8")
        terminal.type("\r")
        terminal.wait_for("own tokens.*tokens in.*>")
        terminal.type(f"/save {file}\r")
        terminal.wait_for("appended")
        terminal.type("/reset\r")
        terminal.wait_for("a new conversation")
        said, _ = json.loads(file.read_text().splitlines()[-1])["messages"]
        assert said["content"] == "\n".join(text).strip()


@pytest.mark.slow
def test_alt_enter_breaks_a_line(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    terminal.wait_for("leaves.*>")
    terminal.type("In May?\x1b\rOr then?\r")
    terminal.wait_for("own tokens.*tokens in.*>")
    terminal.type(f"/save {file}\r")
    terminal.wait_for("appended")
    assert json.loads(file.read_text())["messages"][0]["content"] == "In May?\nOr then?"


@pytest.mark.slow
def test_ctrl_d_at_the_prompt_leaves(terminal: Terminal) -> None:
    terminal.wait_for("leaves.*>")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
