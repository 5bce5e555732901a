"""What other packages add to eyas, and how everything of a kind is found by its name.

A package adds something by an entry point in its metadata, a name and where the thing is (`module:attribute`):

| group | name | is |
|---|---|---|
| `eyas.drafters` | the kind, as `shape.kind` and `--method` take it | a `Kind` of that name (`eyas.drafters.kind`) |
| `eyas.methods` | the method, as `--method` takes it | a `MakeMethod` (`eyas.drafters.weightless`) |
| `eyas.trees` | the shape in `--tree SHAPE:ARGUMENTS` | a `MakeTree` (`eyas.tree.spec`) |
| `eyas.verbs` | the command after `eyas` | a function, or a module with `VERBS` (`eyas.cli.app`) |
| `eyas.recipes` | anything | a package, whose folder holds recipes (`eyas.recipes`) |
| `eyas.features` | what a core command offers: `cluster`, ... | a callable with the protocol of that feature |

A `Registry` holds eyas's own things and those of other packages alike. Nothing is imported before it is asked for by
name, and other packages' metadata isn't read for a name of eyas's own. Experimental parts of eyas (`eyas.labs`) come
in by this door, too. Their entry points are in `labs/entry_points.txt`, not in pyproject.toml: an installed package's
metadata is as old as its installation, and a checkout that is newer would miss what has moved or come since.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from eyas.errors import PluginError, UsageError

_LOG = logging.getLogger("eyas")

WHAT = {
    "eyas.drafters": "drafter kind", "eyas.methods": "method", "eyas.trees": "tree shape", "eyas.verbs": "verb",
    "eyas.recipes": "folder of recipes", "eyas.features": "feature",
}  # fmt: skip
"""Group of entry points -> what it holds, in words."""
LABS = Path(__file__).parent / "labs"
EYAS = "eyas"
"""The name of this package as the source of its own labs."""


class Plugin(NamedTuple):
    """Something that a package adds."""

    group: str
    name: str
    value: str
    """Where it is: `module:attribute`, or a module."""
    package: str
    version: str

    def __str__(self) -> str:
        return f"the {WHAT[self.group]} {self.name!r} of the package {self.package} ({self.group}: {self.value})"

    @property
    def module(self) -> str:
        """The dotted name of its module."""
        return self.value.partition(":")[0].strip()

    def load(self) -> Any:
        """Import it. Raises PluginError, whatever its module raises."""
        try:
            return EntryPoint(self.name, self.value, self.group).load()
        except Exception as error:  # importing runs the code of another package
            raise self.broken(f"{type(error).__name__}: {error}") from error

    def docstring(self) -> str:
        """Its docstring, read from its file without importing it; empty if it can't be found."""
        path = source_of(self.module)
        name = self.value.partition(":")[2].strip()
        if path is None:
            return ""
        try:
            tree = ast.parse((path / "__init__.py" if path.is_dir() else path).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            return ""
        parts = (ast.FunctionDef, ast.ClassDef)
        found = [node for node in tree.body if isinstance(node, parts) and node.name == name] if name else [tree]
        return ast.get_docstring(found[-1]) or "" if found else ""

    def broken(self, why: str) -> PluginError:
        """The error that says why this plug-in can't be used."""
        return PluginError(f"{self} can't be used: {why}; update or uninstall {self.package}")


@cache
def installed() -> Mapping[str, tuple[Plugin, ...]]:
    """Group -> what packages add to it: eyas's labs first, then installed packages'."""
    found: dict[str, list[Plugin]] = {group: [] for group in WHAT}
    if LABS.is_dir():
        for entry in Distribution.at(LABS).entry_points:
            found[entry.group].append(Plugin(entry.group, entry.name, entry.value, EYAS, ""))
    for group in WHAT:
        for entry in entry_points(group=group):
            assert entry.dist is not None
            found[group].append(Plugin(group, entry.name, entry.value, entry.dist.name, entry.dist.version))
    return {group: tuple(dict.fromkeys(plugins)) for group, plugins in found.items()}


def others() -> list[Plugin]:
    """What packages other than eyas add."""
    return [plugin for plugins in installed().values() for plugin in plugins if plugin.package != EYAS]


def source_of(module: str) -> Path | None:
    """The file of a module, or the folder of a package, found without importing it; None if it has none."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if not places:
        return None if rest or spec.origin is None else Path(spec.origin)
    for place in (each.joinpath(*rest) for each in places):
        if place.is_dir():
            return place
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
    return None


T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """Name -> one of a kind of things: eyas's own, those of other packages, and those that a program adds.

    Each is imported when it is first asked for. `KeyError` = there is none of that name. Asking for a name raises
    PluginError if it can't be imported, isn't what its group holds, or is brought by two packages. eyas's own names
    are kept: another package's thing of such a name is left out, with a warning in the log.
    """

    def __init__(
        self,
        group: str,
        own: Mapping[str, str],
        wrong: Callable[[str, Any], str | None],
        reserved: Collection[str] = (),
    ) -> None:
        """`own` are eyas's names and where each is; `reserved` are names that mean something else.

        `wrong` says what is wrong with a plug-in of a name, if anything. It isn't asked about eyas's own.
        """
        self.group = group
        self.reserved = frozenset(reserved)
        self._own = dict(own)
        self._wrong = wrong
        self._found: dict[str, tuple[str, T]] = {}
        """Name -> where it was, and what was imported from there."""
        self._added: dict[str, T] = {}

    @property
    def own(self) -> tuple[str, ...]:
        """The names of eyas's core, which are known without reading other packages' metadata."""
        return tuple(self._own)

    @property
    def plugins(self) -> dict[str, tuple[Plugin, ...]]:
        """Name -> the plug-ins that claim it, if it isn't one of eyas's own."""
        claims: dict[str, tuple[Plugin, ...]] = {}
        for plugin in installed()[self.group]:
            claimed = claims.get(plugin.name, ())
            if (
                plugin.name in self._own
                or plugin.name in self.reserved
                or any(each.package == EYAS for each in claimed)
            ):
                _refuse(plugin)
            else:
                claims[plugin.name] = (*claimed, plugin)
        return claims

    def __contains__(self, name: object) -> bool:
        return name in self._added or name in self._own or (isinstance(name, str) and name in self.plugins)

    def claims(self, name: str) -> tuple[Plugin, ...]:
        """Where a name's thing is: once, or in all packages that bring one of that name. KeyError: nowhere."""
        if name in self._own:
            return (Plugin(self.group, name, self._own[name], EYAS, ""),)
        return self.plugins[name]

    def __getitem__(self, name: str) -> T:
        if name in self._added:
            return self._added[name]
        plugin, *further = self.claims(name)
        if name in self._own:
            return self._imported(name, plugin)
        if further:
            packages = ", ".join(each.package for each in (plugin, *further))
            raise PluginError(
                f"the {WHAT[self.group]} {name!r} is brought by several packages ({packages}): uninstall all but one"
            )
        made = self._imported(name, plugin)
        if (why := self._wrong(name, made)) is not None:
            raise plugin.broken(why)
        return made

    def _imported(self, name: str, plugin: Plugin) -> T:
        where, made = self._found.get(name, ("", None))
        if made is None or where != plugin.value:
            made = EntryPoint(*plugin[1:3], self.group).load() if name in self._own else plugin.load()
            self._found[name] = (plugin.value, made)
        return made

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self._own, *self.plugins, *self._added))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, name: str, value: T) -> None:
        """Add something in this process, as a notebook does that tries a kind of its own."""
        self._added[name] = value

    def __delitem__(self, name: str) -> None:
        """Take back what was added. Raises KeyError for anything else."""
        del self._added[name]

    def core(self) -> Iterator[T]:
        """What needs no plug-in: eyas's core, and what this process has added."""
        for name in dict.fromkeys((*self._own, *self._added)):
            yield self[name]

    def plugged(self) -> Iterator[T]:
        """All plug-ins that can be used. Others are named in the log, and affect only those who ask for them."""
        for name in self.plugins:
            try:
                yield self[name]
            except PluginError as error:
                warn_once(str(error))


FEATURES: Registry[Callable[..., Any]] = Registry(
    "eyas.features", {}, lambda _, found: None if callable(found) else f"it is a {type(found).__name__}, not callable"
)
"""What the core offers without having it: sharing work (`cluster`), and the like."""


def feature(name: str, offered: str) -> Callable[..., Any]:
    """The feature of this name. Raises UsageError that says what isn't there, `offered`, if there is none."""
    found = FEATURES.get(name)
    if found is None:
        raise UsageError(f"{offered} isn't part of this installation: it needs the feature {name!r} of eyas's labs")
    return found


@cache
def _refuse(plugin: Plugin) -> None:
    warn_once(f"{plugin} is left out: that name is eyas's own; its author must rename it")


@cache
def warn_once(message: str) -> None:
    """Log a warning, once in a process."""
    _LOG.warning("%s", message)
