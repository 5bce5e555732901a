"""What other packages add: found by name, imported when asked for, refused by name, in nobody else's way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas import plugins
from eyas.cli.app import VERBS, app
from eyas.drafters.kinds import KINDS
from eyas.drafters.options import DrafterOptions, read_method
from eyas.drafters.registry import kind_name
from eyas.drafters.weightless import METHODS
from eyas.errors import ConfigError, PluginError, UsageError
from eyas.recipes import FOLDER, find_recipe, known_recipes
from eyas.tree import parse_tree
from eyas.tree.spec import read_tree
from eyas.tree.static import StaticTree

from .packages import install, on_the_path

GOOD = '''
"""Say it loudly."""

from typing import Annotated

import typer
from eyas.errors import UsageError
from eyas.tree.static import StaticTree


def shout(word: Annotated[str, typer.Option(help="What to say.")] = "hello") -> None:
    """Say a word loudly.

    Examples:
        eyas shout --word hi
    """
    if word == "quiet":
        raise UsageError("say something louder")
    print(word.upper())


VERBS = {"loudly": shout}


def pair(arguments):
    """Two children of the root."""
    return StaticTree(((0,), (1,)))
'''
GROUPS = ("eyas.drafters", "eyas.methods", "eyas.trees", "eyas.verbs")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder with a package that adds two verbs and a tree shape, and one that can't be imported."""
    folder = tmp_path / "site"
    verbs = {"shout": "good_one:shout", "say": "good_one"}
    install(folder, "good-one", {"eyas.verbs": verbs, "eyas.trees": {"pair": "good_one:pair"}}, good_one=GOOD)
    broken = {group: {"broken": "broken_one:nothing"} for group in GROUPS}
    install(folder, "broken-one", broken, broken_one='"""It is broken."""\nraise RuntimeError("no such library")\n')
    with on_the_path(folder):
        yield folder


def eyas(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_a_verb_of_another_package_is_one_of_eyas(site: Path) -> None:  # noqa: ARG001
    assert eyas("shout", "--word", "hi").stdout == "HI\n"
    assert eyas("say", "loudly").stdout == "HELLO\n"
    refused = eyas("shout", "--word", "quiet")
    assert (refused.exit_code, refused.stderr) == (2, "error: say something louder\n")
    assert "eyas shout --word hi" in eyas("shout", "--help").stdout


def test_the_help_names_it_and_imports_nothing(site: Path) -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom eyas.cli.app import app\n"
        "print(CliRunner().invoke(app, ['--help']).stdout)\n"
        "print(CliRunner().invoke(app, ['--version']).stdout)\n"
        "assert not {'good_one', 'broken_one', 'torch'} & set(sys.modules)\n"
        "assert not [name for name in sys.modules if name.startswith('eyas.labs')]\n"
    )
    source = str(Path(str(plugins.__file__)).parents[1])
    line = [sys.executable, "-c", script]
    done = subprocess.run(
        line, capture_output=True, text=True, env={"PYTHONPATH": f"{site}:{source}", "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    shown = {tuple(text.split(maxsplit=1)) for text in done.stdout.splitlines() if text.strip()}
    assert {("shout", "Say a word loudly."), ("say", "Say it loudly."), ("broken", "A verb of broken-one.")} <= shown
    assert ("sweep", "Train a recipe with many settings; rank them (experimental).") in shown
    assert "  good-one 1.0: verb shout" in done.stdout
    assert "  broken-one 1.0: drafter kind broken" in done.stdout


def test_a_tree_shape_of_another_package_is_made_by_its_name(site: Path) -> None:  # noqa: ARG001
    assert read_tree("pair:2").kind == "pair"
    made = parse_tree("pair")
    assert isinstance(made, StaticTree)
    assert (made.max_nodes, made.depth) == (2, 1)
    with pytest.raises(UsageError, match=r"unknown tree 'bush': write chain:K.*, pair:\.\.\."):
        parse_tree("bush")


def test_a_broken_one_is_named_where_it_is_asked_for_and_nowhere_else(site: Path) -> None:  # noqa: ARG001
    for registry in (KINDS, METHODS):
        with pytest.raises(PluginError, match=r"'broken' of the package broken-one \(eyas\.\w+: broken_one:nothing\)"):
            registry["broken"]
    with pytest.raises(PluginError, match="RuntimeError: no such library; update or uninstall broken-one"):
        parse_tree("broken:1")
    refused = eyas("broken")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: the verb 'broken' of the package broken-one (eyas.verbs: broken_one:")
    assert eyas("shout").exit_code == 0
    assert read_method("suffix").lookup == "suffix"
    assert kind_name({"architectures": ["DominoDraftModel"]}, ["prefix_gru.weight_ih_l0"]) == "domino"


@pytest.mark.parametrize(
    ("group", "name", "registry"),
    [("eyas.drafters", "eagle3", KINDS), ("eyas.drafters", "domino", KINDS), ("eyas.methods", "eagle3", METHODS),
     ("eyas.methods", "prediction", METHODS), ("eyas.verbs", "serve", VERBS), ("eyas.verbs", "sweep", VERBS)],
)  # fmt: skip
def test_a_name_of_eyas_is_kept(
    group: str, name: str, registry: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = registry.get(name)
    with on_the_path(install(tmp_path / "site", f"thief-{name}", {group: {name: "thief:KIND"}}, thief="KIND = 1\n")):
        assert registry.get(name) is before
        assert name not in registry.plugins or registry.plugins[name][0].package == "eyas"
    assert f"'{name}' of the package thief-{name}" in caplog.text
    assert "its author must rename it" in caplog.text


def test_a_name_that_two_packages_have_is_refused(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for package in ("first", "second"):
        install(site, package, {group: {"taken": f"{package}:MADE"} for group in GROUPS}, **{package: "MADE = print\n"})
    with on_the_path(site):
        for registry in (KINDS, METHODS, VERBS):
            with pytest.raises(PluginError, match=r"is brought by several packages \((first, second|second, first)\)"):
                registry["taken"]
        assert "uninstall one" in " ".join(eyas("--help").stdout.split())
        with pytest.raises(UsageError, match="both a drafter kind and a method"):
            read_method("taken")


def test_what_isn_t_what_its_group_holds_is_refused(tmp_path: Path) -> None:
    named = {
        "eyas.drafters": {"odd": "odd:KIND"},
        "eyas.methods": {"odd_method": "odd:KIND"},
        "eyas.verbs": {"odd": "odd"},
    }
    with on_the_path(install(tmp_path / "site", "odd", named, odd="KIND = 1\n")):
        for registry, name, why in (
            (KINDS, "odd", "it is a int, not a Kind"),
            (METHODS, "odd_method", "it is a int, not a function"),
            (VERBS, "odd", "its module has no VERBS"),
        ):
            with pytest.raises(PluginError, match=why):
                registry[name]


def test_recipes_of_other_packages_are_found_by_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for package in ("one", "two"):
        install(site, package, {"eyas.recipes": {package: f"{package}_recipes"}})
        folder = site / f"{package}_recipes"
        folder.mkdir()
        for name in (package, "both", "eagle3"):
            (folder / f"{name}.yaml").write_text("extends: eagle3\n")
    install(site, "gone", {"eyas.recipes": {"gone": "gone_recipes"}})
    with on_the_path(site):
        assert find_recipe("one") == site / "one_recipes" / "one.yaml"
        assert find_recipe("eagle3") == FOLDER / "eagle3.yaml"
        assert {"one", "two", "domino", "smollm2/domino"} <= known_recipes().keys()
        with pytest.raises(ConfigError, match="several packages bring a recipe both: name one of"):
            find_recipe("both")


def test_a_lookup_that_cannot_be_combined_is_said_not_to(tmp_path: Path) -> None:
    from eyas.drafters.loading import make_drafter

    from . import tiny

    made = "from eyas.drafters.weightless.lookahead import make\n"
    with on_the_path(
        install(tmp_path / "site", "alone", {"eyas.methods": {"alone": "alone_one:make"}}, alone_one=made)
    ):
        assert make_drafter(DrafterOptions(method="alone"), tiny.target()).fixed_tree == "lookahead:15,5,15"
        with pytest.raises(UsageError, match="method alone can't be combined with a draft model: use it alone"):
            make_drafter(DrafterOptions(source=tmp_path, method="+alone"), tiny.target())


def test_a_feature_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="--fly isn't part of this installation: it needs the feature 'wings'"):
        plugins.feature("wings", "--fly")
    assert plugins.feature("cluster", "--on").__name__ == "RayExecutor"


def test_labs_are_in_their_own_file() -> None:
    """Whatever was installed when, a checkout finds the labs that it has."""
    labs = [plugin for found in plugins.installed().values() for plugin in found if plugin.package == plugins.EYAS]
    assert {plugin.name for plugin in labs} >= {"domino", "xpress", "lilicorr", "sweep", "learn", "cluster"}
    for plugin in labs:
        assert plugin.module.startswith("eyas.labs.")
        assert plugin.group == "eyas.recipes" or plugin.load() is not None
        assert plugin.group == "eyas.recipes" or plugin.docstring() or plugin.value.endswith(":KIND")
