"""`eyas chat` with a script on its standard input."""

from __future__ import annotations

import re
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

    def spy(engine: Engine, requests: Any) -> Iterator[Any]:
        before = engine.state().prefix_hit_tokens_total
        yield from stream(engine, requests)
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
