"""The shape of the source: imports point one way, loading is strict, errors are named."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .source import FILES, SOURCE, calls, ids, importers, module, parsed

FOUNDATION = frozenset(
    {
        "types",
        "errors",
        "config",
        "files",
        "plugins",
        "urls",
        "runtime",
        "machine",
        "cache",
        "gguf",
        "gguf_companions",
        "gguf_config",
        "gguf_keys",
        "gguf_splits",
        "gguf_vocabulary",
        "gguf_tokenizer",
        "gguf_target",
        "assets",
        "hub",
        "recipes",
        "tables",
        "work",
    }
)
ENGINE = FOUNDATION | {"tree", "verify", "targets", "drafters", "engine"}
ABOVE = ENGINE | {"options", "session", "__init__"}  # options to engines; `import eyas` and its public names
ALLOWED: dict[str, frozenset[str]] = {
    "types": frozenset({"errors"}),
    "errors": frozenset(),
    "plugins": frozenset({"errors"}),
    "config": frozenset({"errors"}),
    "urls": frozenset({"errors"}),
    "files": frozenset({"errors", "urls"}),
    "runtime": frozenset(),
    "cache": frozenset({"errors", "runtime"}),
    "machine": frozenset({"cache", "files", "runtime"}),
    "gguf": frozenset({"errors"}),
    "gguf_companions": frozenset(),
    "gguf_keys": frozenset({"errors", "gguf"}),
    "gguf_config": frozenset({"errors", "gguf", "gguf_keys"}),
    "gguf_splits": frozenset(),
    "gguf_vocabulary": frozenset({"errors", "gguf", "gguf_splits"}),
    "gguf_tokenizer": frozenset({"errors", "gguf", "gguf_splits", "gguf_vocabulary"}),
    "gguf_target": frozenset(
        "errors files gguf gguf_companions gguf_config gguf_tokenizer gguf_vocabulary cache runtime".split()
    ),
    "assets": frozenset(),
    "hub": frozenset({"assets", "errors", "gguf_target"}),
    "recipes": frozenset({"config", "errors", "plugins"}),
    "tables": frozenset(),
    "work": frozenset({"config"}),
    "tree": FOUNDATION,
    "verify": FOUNDATION | {"tree", "targets"},
    "targets": FOUNDATION | {"tree"},
    "drafters": FOUNDATION | {"tree", "verify", "targets"},
    "engine": FOUNDATION | {"tree", "verify", "targets", "drafters"},
    "options": ENGINE,
    "session": ENGINE | {"options"},
    "text": ABOVE,
    "data": ABOVE | {"text"},
    "plan": ABOVE | {"data"},
    "train": ABOVE | {"text", "data"},
    "bench": ABOVE | {"text", "data"},
    "doctor": ABOVE | {"text", "data", "train"},
    "serve": ABOVE | {"text"},
    "interop": frozenset(
        {"assets", "gguf", "gguf_config", "gguf_target", "drafters", "targets", "config", "errors", "files", "hub"}
    ),
}
TOP = {"cli", "labs", "__main__", "__init__"}  # may import everything below them; nobody imports labs (test_core.py)

CIRCLES: set[str] = set()
"""Rooms in which files import each other in circles."""
RUNS_CODE = {("labs/sandbox/jail.py", "exec"): "the inside of the sandbox, which the user asks for by --execute"}
"""(file, call) -> why it may run code."""


def room(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every `eyas.X` that a file imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            head, *rest = name.split(".")
            if head == "eyas":
                known = rest and ((SOURCE / rest[0]).is_dir() or (SOURCE / f"{rest[0]}.py").is_file())
                yield (rest[0] if known else "__init__"), node.lineno


def test_the_source_is_found() -> None:
    assert {"types", "tree", "verify", "targets", "drafters", "engine"} <= {room(f) for f in FILES}


def test_every_part_has_a_place_in_the_import_order() -> None:
    new = {room(path) for path in FILES} - TOP - ALLOWED.keys()
    assert not new, "add them to docs/architecture.md and here"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{ids(path)}:{line} may not import eyas.{name}"
        for path in FILES
        if room(path) not in TOP
        for name, line in imported(parsed(path))
        if name not in ALLOWED[room(path)] | {room(path)}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_knows_what_runs_passes_as_a_backend_alone() -> None:
    """Not by the native code or the CUDA graphs (`targets/backend.py`)."""
    hidden = ("eyas.targets.native", "eyas.targets.graphs")
    wrong = [
        f"{ids(path)}:{node.lineno}"
        for path in FILES
        if room(path) == "engine"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(hidden)
    ]
    assert not wrong, wrong


def test_nothing_below_imports_the_command_line() -> None:
    assert not any("cli" in allowed for allowed in ALLOWED.values())


def test_workers_unpickle_nothing_of_the_command_line() -> None:
    """What is sent to a worker to make it, a `Maker`, lies below."""
    makers = [ids(path) for path in FILES for node in parsed(path).body if getattr(node, "name", "").endswith("Maker")]
    assert len(makers) >= 6
    assert not any(file.startswith("cli/") for file in makers)


def test_the_order_has_no_cycle() -> None:
    left = dict(ALLOWED)
    while left:
        bottom = [name for name, needs in left.items() if not needs & left.keys() - {name}]
        assert bottom, f"a cycle among {sorted(left)}"
        for name in bottom:
            del left[name]


def test_files_import_each_other_in_no_circle() -> None:
    """Also not inside functions, nor for types alone."""
    edges = {(user, file) for file, users in importers().items() for user in users if user != file}
    while True:
        starts, ends = ({edge[side] for edge in edges} for side in (0, 1))
        inner = {edge for edge in edges if edge[0] in ends and edge[1] in starts}
        if inner == edges:
            break
        edges = inner
    assert {file.split("/")[0] for edge in edges for file in edge} <= CIRCLES, sorted(edges)


def test_the_server_s_folders_lie_in_one_order() -> None:
    """Bodies and errors at the ground, routes above them, the application on top."""
    needs: dict[str, set[str]] = {}
    for file, users in importers().items():
        for user in users:
            above, below = ("/".join(one.split("/")[1:2]) for one in (user, file))
            if file.startswith("serve/") and user.startswith("serve/") and above != below:
                needs.setdefault(above, set()).add(below)
    assert {"api", "http"} <= needs["app.py"] | needs["api"]
    while ground := [part for part, others in needs.items() if not others & needs.keys()]:
        for part in ground:
            del needs[part]
    assert not needs, f"a circle among {needs}"


def test_what_is_to_know_of_a_tree_is_asked_of_it() -> None:
    """No `isinstance` on the shapes of trees outside their room."""
    shapes = {
        node.name
        for path in (SOURCE / "tree").glob("*.py")
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and "TreeSpec" in map(ast.unparse, node.bases)
    }
    assert len(shapes) == 5
    asked = [
        f"{ids(path)}:{node.lineno}"
        for path in FILES
        if room(path) != "tree"
        for name, node in calls(path)
        if name == "isinstance"
        if shapes & {ast.unparse(name).split(".")[-1] for name in ast.walk(node.args[1]) if isinstance(name, ast.expr)}
    ]
    assert not asked, f"give `TreeSpec` what these want to know: {asked}"


def test_what_is_to_know_of_a_drafter_is_asked_of_it() -> None:
    """No `isinstance` on drafters outside their room; what learns needs to know which networks it can train."""
    kinds = {
        node.name
        for path in (SOURCE / "drafters").rglob("*.py")
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Drafter")
    }
    assert {"NetworkDrafter", "LookupDrafter", "HybridDrafter"} <= kinds
    asked = {
        ids(path)
        for path in FILES
        if room(path) != "drafters"
        for name, node in calls(path)
        if name == "isinstance"
        if kinds & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
    }
    assert asked == {"labs/learn/serving.py"}, f"give `Drafter` what these want to know: {asked}"


def test_importers_are_found() -> None:
    assert "session.py" in importers()["targets/loading.py"]
    assert len(importers()["errors.py"]) > 50
    handed_on = importers()["tree/spec.py"]  # others import it from eyas.tree
    assert any(user.startswith("engine/") for user in handed_on)


def test_no_except_is_bare() -> None:
    bare = [
        f"{ids(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare, bare


def test_loading_is_strict_and_runs_no_code() -> None:
    for path in FILES:
        for name, node in calls(path):
            where = f"{ids(path)}:{node.lineno}"
            options = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in ("strict", "weights_only")}
            if name.endswith("load_state_dict"):
                assert options.get("strict", "True") == "True", f"{where}: load_state_dict isn't strict"
            if name == "torch.load":
                assert options.get("weights_only") == "True", f"{where}: torch.load runs code"
            runs_code = name in {"pickle.load", "pickle.loads", "joblib.load", "eval", "exec"}
            assert not runs_code or (ids(path), name) in RUNS_CODE, f"{where}: {name}"


def test_pickled_weights_are_read_in_one_place() -> None:
    """Drafter files named by the user."""
    callers = {ids(path) for path in FILES for name, _ in calls(path) if name == "torch.load"}
    assert callers == {"drafters/files.py"}


def test_verbs_do_not_import_verbs() -> None:
    """What two of them need is a file of its own beside them, or in `cli/common/`."""
    from eyas.cli.app import VERBS

    named = {plugin.module for name in VERBS for plugin in VERBS.claims(name)}
    parts = {module(path) for path in FILES if path.name == "verbs.py"}
    verbs = named | {
        node.module
        for path in FILES
        if module(path) in parts
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    wrong = [
        f"{user} imports {file}"
        for file, users in importers().items()
        for user in users
        if {module(SOURCE / file), module(SOURCE / user)} <= verbs - parts and file != user
    ]
    assert len(verbs) > 20
    assert not wrong, wrong
