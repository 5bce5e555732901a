"""The pages: every command is one its program takes, Python blocks run, recipes are valid, links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from inspect import getdoc
from pathlib import Path
from typing import Any

import pytest
import yaml

import eyas
from eyas.cli.common.aliases import REFUSED
from eyas.cli.common.verb import described
from eyas.config import validated
from eyas.labs.sweep.search import SweepConfig
from eyas.plugins import WHAT as GROUPS_OF_PLUGINS
from eyas.targets import load_target
from eyas.train.recipe import Recipe

from .doc_pages import PAGES, ROOT, Block, blocks, commands, commented_commands, named_verb, parse, parse_script
from .packages import build_and_install, on_the_path
from .verbs import DEFAULTED, GROUPS, VERBS

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
RECIPES = sorted(
    path for folder in ("recipes", "labs/recipes") for path in (ROOT / "src/eyas" / folder).rglob("*.yaml")
)
FOLDERS = ("recipes/", "benchmarks/", "docs/", "src/", "tests/", "examples/")
"""Paths that begin so are files of this repository."""


@pytest.fixture(scope="module", autouse=True)
def _the_example_is_installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As on the page that tells how."""
    site = tmp_path_factory.mktemp("example") / "site"
    with on_the_path(build_and_install(ROOT / "examples" / "two_layer", site)):
        yield


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def all_commands() -> list[tuple[Block, list[str]]]:
    shown = [block for page in PAGES for block in blocks(page)] + [commented_commands(recipe) for recipe in RECIPES]
    return [(block, words) for block in shown for words in commands(block)]


def wrong_eyas(words: list[str]) -> str:
    if words[:1] != ["train"]:  # a bare `...` stands for further options
        words = [word for at, word in enumerate(words) if word != "..." or words[at - 1].startswith("-")]
    return parse(words)


def wrong_python(words: list[str]) -> str:
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return ""
    if words[:2] == ["-m", "eyas"]:
        return wrong_eyas(words[2:])
    if words[:2] == ["-m", "venv"]:
        return ""
    name, rest = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
    return parse_script(name, rest)


def wrong_torchrun(words: list[str]) -> str:
    at = words.index("-m")
    known = r"--(nproc-per-node|nnodes|node-rank|master-addr|master-port)(=\S+)?|\d+"
    odd = [word for word in words[:at] if not re.fullmatch(known, word)]
    return f"options of torchrun: {odd}" if odd else wrong_python(words[at:])


def wrong_make(words: list[str]) -> str:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    targets = [word for word in words if "=" not in word]
    unknown = sorted(set(targets) - set(phony.split()))
    variables = [word.split("=")[0] for word in words if "=" in word]
    unused = [name for name in variables if f"$({name})" not in MAKEFILE]
    return f"the Makefile has no {unknown + unused}" if unknown or unused else ""


def wrong_pip(words: list[str]) -> str:
    """Eyas or this folder with extras that it has, or packages of others with their versions."""
    packages = [word for word in words[1:] if not word.startswith((":", "-"))]
    extras = {name for each in packages for name in re.findall(r"[\w-]+", each.removeprefix("eyas")) if "[" in each}
    unknown = extras - set(re.findall(r"^(\w+) = \[", PROJECT.partition("optional-dependencies]")[2], re.MULTILINE))
    if unknown:
        return f"no such extras: {unknown}"
    gone = [each for each in packages if each.startswith("./") and not (ROOT / each / "pyproject.toml").is_file()]
    if gone:
        return f"no such projects: {gone}"
    loose = [each for each in packages if not each.startswith(("eyas", ".[", "./")) and "==" not in each]
    return f"without a version: {loose}" if loose and words[0] != "uninstall" else ""


def wrong_curl(words: list[str]) -> str:
    data = words[words.index("-d") + 1] if "-d" in words else "{}"
    json.loads(data)
    served = re.findall(r"`(?:GET|POST) (/\S*)`", (ROOT / "docs" / "serve.md").read_text(encoding="utf-8"))
    (address,) = [word for word in words if word.startswith("http")]
    path = re.sub(r"https?://[^/]+", "", address)
    return "" if path in served else f"no route {path}"


def wrong_hf(words: list[str]) -> str:
    return "" if words[0] == "download" or words[:2] == ["auth", "login"] else f"unknown: hf {words}"


def wrong_source(words: list[str]) -> str:
    return "" if words == [".venv/bin/activate"] else f"no such script: {words}"


CHECKS: dict[str, Callable[[list[str]], str]] = {
    "eyas": wrong_eyas,
    "python": wrong_python,
    "torchrun": wrong_torchrun,
    "make": wrong_make,
    "pip": wrong_pip,
    "curl": wrong_curl,
    "hf": wrong_hf,
    "source": wrong_source,
    **dict.fromkeys(("tar", "cmake", "ninja"), lambda _: ""),  # that build other engines
}


EXAMPLES = {
    name: described(getdoc(function) or "")[1]
    for name, function in (
        *VERBS.items(),
        *((f"{group} {verb}", function) for group, (_, verbs) in GROUPS.items() for verb, function in verbs.items()),
    )
}
"""Verb -> the examples of its help."""


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=name_of)
def test_every_command_is_one_that_its_program_takes(page: Path) -> None:
    wrong = []
    for block, words in all_commands():
        if block.page != page:
            continue
        check = CHECKS.get(Path(words[0]).name)
        found = f"a program that no test knows: {words[0]}" if check is None else check(words[1:])
        missing = [word for word in words if word.startswith(FOLDERS) and not repository_path(word)]
        if found or missing:
            wrong.append(f"{block}: {' '.join(words)}\n{found}{missing or ''}")
    assert not wrong, "\n\n".join(wrong)


def repository_path(word: str) -> bool:
    """Whether such a file is there, or may be: a name in capitals is the reader's to choose."""
    return (ROOT / word).exists() or any(part.isupper() for part in Path(word).with_suffix("").parts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_verb_has_examples_that_it_takes(name: str) -> None:
    """Of its own, which its help shows."""
    examples = EXAMPLES[name]
    assert len(examples) >= 2
    for example in examples:
        program, *words = shlex.split(example)
        assert program == "eyas"
        group, _, verb = name.partition(" ")
        own = [group] if group in DEFAULTED and verb == next(iter(GROUPS[group][1])) else name.split()
        assert words[: len(own)] == own
        assert not wrong_eyas(words), example


def test_commands_are_found() -> None:
    """As many as a reader counts, so that no page is passed over."""
    found = [name_of(block.page) for block, _ in all_commands()]
    assert len(found) > 100
    for page in (
        "README.md",
        "docs/quickstart.md",
        "docs/train.md",
        "docs/cookbook.md",
        "src/eyas/recipes/eagle3.yaml",
    ):
        assert found.count(page) >= 2, page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "MODEL", "--draft-modle", "D"], "No such option: --draft-modle"),
        (["generate", "--draft-model", "D", "--prompt", "Hi"], "which target?"),
        (["generate", "MODEL", "--tree", "chain:0"], "length must be at least 1"),
        (["generat", "MODEL"], "No such command"),
        (["serve", "MODEL", "--tensor-parallel-size", "2"], "eyas serve --engine vllm"),
        (["verify", "MODEL", "--draft-model", "D"], "Missing option '--prompt-file'"),
        (["train", "eagle3", "drafter.targt=M", "drafter.store=S", "drafter.output=R"], "targt"),
        (["train", "eagle9"], "no recipe of that name"),
        (["plan", "MODEL", "--samples", "10", "--length", "10", "--states", "fp4"], "'fp4' is not one of"),
    ],
)
def test_a_wrong_command_is_seen(words: list[str], message: str) -> None:
    assert message in parse(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_verbs_and_options_in_sentences_exist(page: Path) -> None:
    """`eyas VERB --option` in the middle of a sentence or table, where the rest of a command is left out."""
    for text in re.findall(r"`((?:python -m )?eyas [^`\n]*)`", page.read_text(encoding="utf-8")):
        words = text.removeprefix("python -m ").split()[1:]
        verbs = [word for word in words if re.fullmatch(r"[a-z]+", word)][:2]
        if not verbs or words[0].startswith("-"):
            continue
        command = named_verb(words)
        options = {option for parameter in command.params for option in parameter.opts} if command else set()
        for word in words:
            if word.startswith("--") and not word.startswith("--engine-option="):
                assert word.split("=")[0] in options | set(REFUSED), f"{name_of(page)}: {text}"


def test_troubleshooting_quotes_messages_and_whole_commands() -> None:
    """First column: texts that eyas prints. Last column: commands that their programs take."""
    page = ROOT / "docs" / "troubleshooting.md"
    printed = source_texts()
    rows = [line.split("|")[1:-1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    wrong = []
    quoted = 0
    parsed = 0
    for symptom, _, command in rows:
        for message in re.findall(r"`([^`]+)`", symptom):
            if len(message.split()) > 2:
                quoted += 1
                wrong += [] if any(message in text for text in printed) else [f"eyas never prints {message!r}"]
        for text in re.findall(r"`([^`]+)`", command):
            name, *words = shlex.split(text)
            if name in CHECKS and not all(word.islower() and word.isalpha() for word in words):  # a verb's name
                parsed += 1
                found = CHECKS[name](words)
                wrong += [f"{text}\n{found}"] if found else []
    assert not wrong, "\n".join(wrong)
    assert quoted > 15
    assert parsed > 20


def source_texts() -> set[str]:
    """Every string constant of the package, parts of f-strings too."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src" / "eyas").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_names_in_sentences_exist(page: Path) -> None:
    """`tests/test_docs.py`, `round.py` or `eyas.types.Stats`: of today's tree, wherever a page puts code."""
    if page.name == "CHANGELOG.md":  # what was true at the time
        return
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    missing = []
    for code in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w./-]+\.(py|svg|yaml|md)|(src|tests|docs|recipes|benchmarks)/[\w./-]+", code):
            missing += [] if file_exists(code) else [code]
        elif re.fullmatch(r"eyas(\.\w+)+(\(\))?", code) and code not in REQUEST_FIELDS | GROUPS_OF_PLUGINS.keys():
            missing += [] if name_exists(code.removesuffix("()")) else [code]
    assert not missing, f"{name_of(page)}: {missing}"


def file_exists(name: str) -> bool:
    """Whether there is such a file or folder, by its path from the root, the package or the benchmarks, or by name."""
    if "/" not in name:
        return name in SAMPLES or any(name in names for names in file_names())
    return repository_path(name) or any((ROOT / folder / name).exists() for folder in ("src/eyas", "benchmarks"))


SAMPLES = {"config.yaml", "sweep.yaml", "prompts.yaml", "convert_hf_to_gguf.py"}
"""Files that eyas, a reader or another engine writes or has."""


REQUEST_FIELDS = {"eyas.seed", "eyas.speculate", "eyas.trace"}
"""Of the server's API."""


@cache
def file_names() -> list[set[str]]:
    return [{path.name for path in (ROOT / folder).rglob("*")} for folder in FOLDERS]


def name_exists(dotted: str) -> bool:
    """Whether `eyas.a.B.c` can be imported, or reached from what can."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


once_loaded = cache(load_target)
"""Pages load the same target."""


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page that loads `smollm2` are run in order, as one program; those of others compile."""
    shown = [block for block in blocks(page) if block.language == "python"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eyas.session.load_target", once_loaded)
    runs = any('eyas.load("smollm2"' in block.text for block in shown)
    names: dict[str, Any] = {"__name__": "page"}
    for block in shown:
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        if runs:
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_data_blocks_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            values = yaml.safe_load(block.text)
            validated(SweepConfig if "recipe" in values else Recipe, values, str(block))
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "mermaid":
            shown = re.findall(r'\["([\w/]+(?:/|\.py))', block.text)
            assert shown
            assert not [name for name in shown if not (ROOT / "src/eyas" / name).exists()], str(block)
        else:
            assert block.language in ("", "bash", "python", "text"), f"{block}: a block of {block.language}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(anchor if anchor not in found else f"{anchor}-1")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{name_of(page)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_lies_apart(page: Path) -> None:
    """Every page is linked from another one."""
    linked = {
        (other.parent / link.partition("#")[0]).resolve()
        for other in PAGES
        for link in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)", other.read_text(encoding="utf-8"))
        if other != page
    }
    assert page in linked or page.name in ("README.md", "CHANGELOG.md")


def test_set_up_is_two_commands() -> None:
    readme = ROOT / "README.md"
    first = next(block for block in blocks(readme) if block.language == "bash")
    assert list(commands(first)) == [["make", "demo"], ["make", "test"]]


def test_metadata() -> None:
    """What the project says of itself: its name as author, and no addresses until there are any."""
    assert f'version = "{eyas.__version__}"' in PROJECT
    assert 'authors = [{ name = "eyas" }]' in PROJECT
    assert "keywords = [" in PROJECT
    assert "classifiers = [" in PROJECT
    assert "urls" not in PROJECT
