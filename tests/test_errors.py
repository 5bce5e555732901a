"""The library speaks of parameters; which option sets one is known to the command line alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .source import FILES, ids, parsed

COMMAND_LINES = (
    "cli/", "labs/cli/", "interop/serving/commands.py",  # of this program, and of other engines
    "serve/app.py", "serve/errors.py",  # what a client is to ask of whoever started `eyas serve`
    "interop/publish.py", "interop/export/export.py",  # the texts beside published drafters say what makes them
)  # fmt: skip
"""Where options may be named."""
OTHERS = r"(llama-gguf-split|convert_hf_to_gguf\.py|torchrun|ray start|unshare)( \(?--?[\w-]+)+"
"""Command lines of other programs."""
OPTION = re.compile(r"(?<![\w-])--[a-z]")


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The sentences among a module's strings, f-strings in one piece, with their lines; no docstrings."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner | told:
            text = node.value
        else:
            continue
        if " " in text:  # an option alone is an argument for another program
            yield node.lineno, text


def test_messages_of_the_library_name_no_options() -> None:
    named = [
        f"{ids(path)}:{line}: {text}"
        for path in FILES
        if not ids(path).startswith(COMMAND_LINES)
        for line, text in texts(parsed(path))
        if OPTION.search(re.sub(OTHERS, "", text))
    ]
    assert not named, "\n".join(("name the parameter: `dtype=`", *named))


def test_an_option_in_a_message_is_found() -> None:
    tree = ast.parse(
        '"""Of --docs."""\nx = f"{a} tokens: use --dtype {b}"\ny = ["--port", "1"]\nz = "use torchrun --n 2"'
    )
    found = [text for _, text in texts(tree) if OPTION.search(re.sub(OTHERS, "", text))]
    assert found == ["... tokens: use --dtype ..."]
