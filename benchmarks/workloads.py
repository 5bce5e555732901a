"""Workloads in which answers copy: edits of code, and agents' loops, made from Python's standard library.

`editing.jsonl`: a function or a short file and an instruction; the reference answer repeats most of it. `agents.jsonl`:
turns of an agent that reads code, changes it and runs a check, whose outputs repeat one another; the references are its
answers. Both are prompt files for `eyas generate`, `verify` and `bench`; `benchmarks.replay` reads the references, too.
The same seed and the same Python give the same files.

    python -m benchmarks.workloads FOLDER [--count 64] [--seed 0] [--longest 2000]
"""

from __future__ import annotations

import ast
import json
import platform
import random
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness import script
from eyas.data.chats.stdlib import library_modules
from eyas.files import write_text

SHORTEST_LINES, FEWEST_USES = 8, 3
NEW_NAMES = ("entry", "current", "value_found", "chunk", "record", "buffer_part", "candidate", "element")


@dataclass(frozen=True)
class Code:
    """A function, or a short file, with its name."""

    name: str
    text: str
    is_file: bool

    @property
    def what(self) -> str:
        """What it is, in words."""
        return "file" if self.is_file else "function"


@dataclass(frozen=True)
class Edit:
    """An instruction, and the code after it."""

    kind: str
    instruction: str
    result: str


def pieces(longest: int) -> Iterator[Code]:
    """All functions of the library, and its files, that are of a good length; in a stable order."""
    for module in library_modules():
        if not module.text.isascii() or "\t" in module.text or "```" in module.text:
            continue
        if len(module.text) <= longest and module.text.count("\n") >= SHORTEST_LINES:
            yield Code(module.name, module.text.strip("\n") + "\n", True)
        lines = module.text.splitlines()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
                if len(text) <= longest and text.count("\n") >= SHORTEST_LINES and _parses(text):
                    yield Code(f"{module.name}.{node.name}", text, False)


def edits(code: Code, draw: random.Random) -> list[Edit]:
    """The edits that fit a piece of code, one of each kind at most."""
    tree = ast.parse(code.text)
    found = (_renaming(code, tree, draw), _default(code, tree, draw), _docstring(code, tree))
    return [edit for edit in found if edit is not None and _parses(edit.result)]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _renaming(code: Code, tree: ast.Module, draw: random.Random) -> Edit | None:
    """Another name for a variable that is used several times."""
    spans: dict[str, list[tuple[int, int]]] = {}
    stored: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            spans.setdefault(node.id, []).append((node.lineno, node.col_offset))
            if isinstance(node.ctx, ast.Store):
                stored.add(node.id)
    strings = " ".join(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)
                       and isinstance(getattr(node, "value", None), str))  # fmt: skip
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg | ast.keyword)}
    outer = {name for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    names = sorted(
        name for name in stored - bound - outer if len(spans[name]) >= FEWEST_USES and name not in strings.split()
    )
    free = [name for name in NEW_NAMES if name not in spans and name not in bound]
    if not names or not free:
        return None
    old, new = draw.choice(names), draw.choice(free)
    lines = code.text.splitlines()
    for line, column in sorted(spans[old], reverse=True):
        before = lines[line - 1]
        lines[line - 1] = before[:column] + new + before[column + len(old) :]
    instruction = f"Rename the variable `{old}` to `{new}`."
    return Edit("rename", instruction, "\n".join(lines) + "\n")


def _default(code: Code, tree: ast.Module, draw: random.Random) -> Edit | None:
    """Another default for an argument that has a plain one."""
    choices = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            named = [*node.args.posonlyargs, *node.args.args]
            with_default = named[len(named) - len(node.args.defaults) :]
            choices += [(node, *pair) for pair in zip(with_default, node.args.defaults, strict=True)]
    plain = [
        (function, argument, default) for function, argument, default in choices
        if isinstance(default, ast.Constant) and default.lineno == default.end_lineno
        and (default.value is None or isinstance(default.value, bool | int))
    ]  # fmt: skip
    if not plain:
        return None
    function, argument, default = draw.choice(plain)
    value = default.value
    new = (
        "True" if value is None else str(not value) if isinstance(value, bool) else str(int(value) + draw.randint(1, 9))
    )
    lines = code.text.splitlines()
    line = lines[default.lineno - 1]
    lines[default.lineno - 1] = line[: default.col_offset] + new + line[default.end_col_offset :]
    return Edit(
        "default",
        f"Change the default of the argument `{argument.arg}` of `{function.name}` to `{new}`.",
        "\n".join(lines) + "\n",
    )


def _docstring(code: Code, tree: ast.Module) -> Edit | None:
    """A docstring for the first function that has none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is None:
            first = node.body[0]
            if first.lineno == node.lineno or getattr(first, "decorator_list", None):
                continue
            words = node.name.strip("_").replace("_", " ")
            said = f"{words[:1].upper()}{words[1:]}, as its callers expect."
            lines = code.text.splitlines()
            above = first.lineno - 1
            lines.insert(above, f'{" " * first.col_offset}"""{said}"""')
            return Edit("docstring", f'Give `{node.name}` the docstring "{said}"', "\n".join(lines) + "\n")
    return None


def editing_set(codes: list[Code], count: int, draw: random.Random) -> list[dict[str, Any]]:
    """`count` edits of different pieces of code, the kinds in turn."""
    rows: list[dict[str, Any]] = []
    done: Counter[str] = Counter()
    for code in codes:
        possible = edits(code, draw)
        if len(rows) == count or not possible:
            continue
        edit = min(possible, key=lambda each: done[each.kind])  # the rarest so far
        done[edit.kind] += 1
        prompt = f"{edit.instruction} Answer with the whole {code.what} and nothing else.\n\n{_fenced(code.text)}"
        rows.append(
            {"id": f"{edit.kind}-{code.name}", "kind": edit.kind, "prompt": prompt, "reference": _fenced(edit.result)}
        )
    return rows


def agent_loops(codes: list[Code], count: int, draw: random.Random) -> list[dict[str, Any]]:
    """`count` loops of five turns: read, change, check (which fails), look again and change, check."""
    rows = []
    for code in codes:
        possible = edits(code, draw)
        if len(rows) == count or len(possible) < 2:
            continue
        first, second = possible[0], possible[1]
        both = edits(Code(code.name, first.result, code.is_file), random.Random(0))
        path = f"src/{code.name.replace('.', '/')}.py"
        check = f"python -m unittest -v tests.test_{code.name.replace('.', '_')}"
        listing = "\n".join(f"{number:>4}  {line}" for number, line in enumerate(code.text.splitlines(), start=1))
        second_result = next((each.result for each in both if each.kind == second.kind), first.result)
        failure = (
            f"$ {check}\ntest_behaviour ... ok\ntest_interface ... FAIL\n\nTraceback (most recent call last):\n"
            f'  File "{path}", line {draw.randint(2, 9)}, in test_interface\n    self.assertEqual(found, expected)\n'
            f"AssertionError: {second.instruction}\n\nRan 2 tests in 0.0{draw.randint(11, 99)}s\nFAILED (failures=1)"
        )
        turns = [
            f"You change code with the tools read(path), write(path, text) and run(command); answer with one call.\n"
            f"Task: in {path}: {first.instruction} Then `{check}` must pass.",
            f"Output of read:\n{listing}",
            "Output of write:\nok",
            f"Output of run:\n{failure}",
            "Output of write:\nok",
            f"Output of run:\n$ {check}\ntest_behaviour ... ok\ntest_interface ... ok\n\nRan 2 tests in 0.018s\nOK",
        ]
        references = [
            f'read("{path}")',
            f'write("{path}")\n{_fenced(first.result)}',
            f'run("{check}")',
            f"The check says: {second.instruction}\n" + f'write("{path}")\n{_fenced(second_result)}',
            f'run("{check}")',
            f"Done. {first.instruction} {second.instruction} `{check}` passes.",
        ]
        rows.append({"id": f"agent-{code.name}", "turns": turns, "references": references})
    return rows


def _fenced(text: str) -> str:
    return f"```python\n{text}```"


@script
def main(
    folder: Path,
    *,
    count: Annotated[int, "rows of each file"] = 64,
    seed: int = 0,
    longest: Annotated[int, "the most characters of code in a row"] = 2000,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    codes = list(pieces(longest))
    draw.shuffle(codes)
    half = len(codes) // 2  # no code is in both files
    for name, make, part in (("editing", editing_set, codes[:half]), ("agents", agent_loops, codes[half:])):
        rows, path = make(part, count, draw), folder / f"{name}.jsonl"
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} rows, of Python {platform.python_version()}'s library")


if __name__ == "__main__":
    raise SystemExit(main())
