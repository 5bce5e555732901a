"""The standard-library corpus: prompt and answer are the function, cut in two."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from eyas.data.chats.stdlib import BODY_LINES, COMPLETE, LibraryModule, chats_of, library_modules

TEXT = '''"""A module whose docstring is long enough to be an answer by itself."""

def documented(x, *, y=1):
    """Return x and y, added to each other in the usual manner."""
    total = x
    total += y
    return total


class Thing:
    """A thing that exists so that its methods can be cut out and dedented."""

    @property
    def name(self):
        # a comment before the first statement
        value = self._name

        return value

    def short(self): return 1

    def only(self):
        """A docstring and nothing else, which leaves no body to complete."""

    async def wait(
        self,
        seconds: float,
    ) -> None:
        await sleep(seconds)
        self.done = True
'''


def cut(text: str = TEXT) -> dict[str, tuple[str, str]]:
    chats = list(chats_of(LibraryModule("pkg.mod", text, ast.parse(text))))
    return {c.id: (c.messages[0].content, c.messages[1].content) for c in chats}


def test_completions_are_the_function_cut_in_two() -> None:
    code = {k.split(":")[0]: v for k, v in cut().items() if k.startswith("stdlib-code-")}
    assert code["stdlib-code-pkg.mod.documented"] == (
        COMPLETE + 'def documented(x, *, y=1):\n    """Return x and y, added to each other in the usual manner."""\n',
        "    total = x\n    total += y\n    return total\n",
    )
    prompt, answer = code["stdlib-code-pkg.mod.Thing.wait"]
    assert prompt == COMPLETE + "async def wait(\n    self,\n    seconds: float,\n) -> None:\n"
    assert answer == "    await sleep(seconds)\n    self.done = True\n"
    assert "stdlib-code-pkg.mod.Thing.only" not in code
    assert "stdlib-code-pkg.mod.Thing.short" not in code


def test_a_comment_between_signature_and_body_is_kept() -> None:
    prompt, answer = next(v for k, v in cut().items() if "Thing.name:" in k)
    whole = prompt.removeprefix(COMPLETE) + answer
    assert ast.dump(ast.parse(whole)) == ast.dump(
        ast.parse("def name(self):\n    value = self._name\n    return value")
    )
    assert "# a comment" in whole


def test_questions_are_answered_by_docstrings() -> None:
    questions = {k: v for k, v in cut().items() if k.startswith("stdlib-ask-")}
    assert set(questions) == {
        "stdlib-ask-pkg.mod",
        "stdlib-ask-pkg.mod.documented",
        "stdlib-ask-pkg.mod.Thing",
        "stdlib-ask-pkg.mod.Thing.only",
    }
    question, answer = questions["stdlib-ask-pkg.mod.Thing"]
    assert "`pkg.mod.Thing`" in question
    assert answer == "A thing that exists so that its methods can be cut out and dedented."


def test_files_that_do_not_parse_or_are_tests_are_skipped(tmp_path: Path) -> None:
    for name, text in {
        "good.py": "x = 1",
        "bad.py": "def (",
        "test/test_x.py": "y = 1",
        "pkg/__init__.py": "z = 1",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [s.name for s in library_modules(tmp_path)] == ["good", "pkg"]


@pytest.mark.slow
def test_the_real_library_yields_usable_chats() -> None:
    modules = [s for s in library_modules() if s.name in {"textwrap", "heapq", "json.encoder"}]
    assert len(modules) == 3
    chats = [chat for module in modules for chat in chats_of(module)]
    code = [c for c in chats if c.id.startswith("stdlib-code-")]
    assert len(code) > 20
    for chat in code:
        prompt, answer = (m.content for m in chat.messages)
        ast.parse(prompt.removeprefix(COMPLETE) + answer)
        assert len(answer.splitlines()) in BODY_LINES
