"""The drafting methods that can run for a target, each as an engine, and those that can't, with the reason.

A method is a drafter's files, the name of a weightless method, or a hybrid of both, such as `eagle3+suffix`. Which
ones exist comes from the registry of drafters.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eyas.bench.offline.runner import PLAIN
from eyas.drafters.base import Drafter
from eyas.drafters.checkpoint import PROVENANCE
from eyas.drafters.files import CONFIG, read_json
from eyas.drafters.kinds import KINDS
from eyas.drafters.loading import local_directory
from eyas.drafters.network import DraftNetwork
from eyas.drafters.options import (
    DrafterOptions,
    method_of,
    methods_without_drafter,
    needs_no_drafter,
    read_method,
)
from eyas.drafters.registry import kind_if_any
from eyas.drafters.small_lm import METHOD as SMALL_LM
from eyas.engine import Engine
from eyas.engine.controller import costs_for
from eyas.engine.default_tree import default_shape, default_tree
from eyas.errors import EyasError, UsageError
from eyas.options import EngineOptions
from eyas.session import Session
from eyas.targets import Target
from eyas.tree import is_auto

_PROGRAM_TYPES = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
)
"""Types of objects that belong to the program, not to a drafter."""
AUTO, CHAIN = "auto", 4
"""The tree that a controller sizes, and the length of the chain that it is compared with."""
HYBRID_SEPARATOR = "+"
"""Separates the two parts of a hybrid's name."""


@dataclass(frozen=True)
class MethodChoice:
    """A method to measure: its name in reports, the drafter's files if any, the method's own name, and a tree."""

    name: str
    source: str | None = None
    method: str | None = None
    """`DrafterOptions.method`; None = the one of the drafter's files."""
    tree: str | None = None
    """None = the drafter's default."""


class Skipped(NamedTuple):
    """A method that can't run here, and why."""

    name: str
    reason: str


class Seed(NamedTuple):
    """A method of the papers that eyas started from: its name there, its drafter, and its paper's tree."""

    name: str
    drafter: str
    tree: str | None
    """None = the method has only one tree, its own."""


SEEDS = (
    Seed("speculative", "draft_model", "chain:4"),
    Seed("mtp", "mtp", "chain:3"),
    Seed("medusa", "medusa", "static:mc_sim_7b_63"),
    Seed("lookahead", "lookahead", None),
    Seed("eagle1", "eagle1", "static:eagle1"),
    Seed("eagle2", "eagle1", "dynamic:6,10,59"),  # EAGLE-1's drafter, in the trees of EAGLE-2's own scripts
    Seed("eagle3", "eagle3", "dynamic:6,10,59"),
)
"""The preset `seeds`."""
PRESETS: Mapping[str, Sequence[Seed]] = {"seeds": SEEDS}
"""Name of a preset -> its methods."""


def all_choices(drafters: Mapping[str, str]) -> list[MethodChoice]:
    """Every method: all `drafters` (name -> files), all methods without weights, and hybrids."""
    chosen = [MethodChoice(name, source) for name, source in drafters.items()]
    chosen += [MethodChoice(name, method=name) for name in methods_without_drafter() if name not in drafters]
    chosen += [
        MethodChoice(f"{name}{HYBRID_SEPARATOR}suffix", source, f"{HYBRID_SEPARATOR}suffix")
        for name, source in drafters.items()
    ]
    return chosen


def without_drafter(opened: Sequence[OpenedMethod]) -> list[str]:
    """The kinds of drafters for which none was opened, judged by name and by files."""
    found = {one.kind for one in opened} | {one.choice.name for one in opened}
    return [kind for kind in (*KINDS, SMALL_LM) if kind not in found]


def named_choices(methods: Sequence[str], drafters: Mapping[str, str]) -> list[MethodChoice]:
    """The `methods` by name: from `drafters`, without weights, or hybrids of both. Raises UsageError."""
    return [_named(name, drafters) for name in dict.fromkeys(methods) if name != PLAIN]


def unused_drafters(choices: Sequence[MethodChoice], drafters: Mapping[str, str]) -> list[str]:
    """The names of drafters that none of the choices has."""
    used = {choice.source for choice in choices}
    return [name for name, source in drafters.items() if source not in used]


def preset_choices(preset: str, drafters: Mapping[str, str]) -> tuple[list[MethodChoice], list[Skipped]]:
    """The methods of a preset that have a drafter here or need none; the others are skipped."""
    chosen = list[MethodChoice]()
    skipped = list[Skipped]()
    for seed in PRESETS[preset]:
        if seed.drafter in drafters:
            chosen.append(MethodChoice(seed.name, drafters[seed.drafter], None, seed.tree))
        elif needs_no_drafter(seed.drafter):
            chosen.append(MethodChoice(seed.name, None, seed.drafter, seed.tree))
        else:
            skipped.append(Skipped(seed.name, _missing(seed.drafter)))
    return chosen, skipped


def with_trees(choices: Sequence[MethodChoice], trees: Mapping[str | None, str]) -> list[MethodChoice]:
    """Replace the choices' trees by `trees`: method name -> tree; the entry for None applies to all others.

    Raises UsageError for a name that isn't among the choices.
    """
    unknown = [name for name in trees if name is not None and name not in {choice.name for choice in choices}]
    if unknown:
        raise UsageError(f"`tree={unknown[0]}=...`: no method of that name is measured")
    return [replace(choice, tree=trees.get(choice.name, trees.get(None, choice.tree))) for choice in choices]


def _missing(drafter: str) -> str:
    return f"no drafter is given for it: add `draft_model={drafter}=PATH`"


def _named(name: str, drafters: Mapping[str, str]) -> MethodChoice:
    if name in drafters:
        return MethodChoice(name, drafters[name])
    first = name.partition(HYBRID_SEPARATOR)[0]
    if first in drafters:
        lookup = method_of(name, first)
        read_method(lookup)
        return MethodChoice(name, drafters[first], lookup)
    if read_method(name).alone:
        return MethodChoice(name, method=name)
    if len(drafters) != 1:
        raise UsageError(f"`method={name}` needs one drafter: give `draft_model={first or 'NAME'}=PATH`")
    return MethodChoice(name, next(iter(drafters.values())), name)


@dataclass
class OpenedMethod:
    """A method that can run: its engine, and what it costs besides time."""

    choice: MethodChoice
    engine: Engine
    drafter: Drafter
    tree: str
    weights: int
    """Bytes that the drafter holds beyond the target's, before it has slots."""
    cache: int = 0
    """Maximum number of bytes that its slots were found to add, by any call of `measure_memory`."""

    def measure_memory(self, target: Target) -> None:
        """Update `cache` from what the drafter holds now."""
        self.cache = max(self.cache, drafter_bytes(self.drafter, target) - self.weights)

    @property
    def kind(self) -> str | None:
        """The kind of its draft model; None without one."""
        network = getattr(self.drafter, "network", None)
        kind = kind_if_any(network.config) if isinstance(network, DraftNetwork) else None
        return None if kind is None else kind.name

    @cached_property
    def training(self) -> dict[str, Any] | None:
        """What training the drafter took, if its files record it: steps, seconds, chats."""
        if self.choice.source is None:
            return None
        folder = local_directory(self.choice.source)
        if not (folder / CONFIG).is_file():
            return None
        found = read_json(folder / CONFIG).get(PROVENANCE)
        names = ("steps", "seconds", "rows", "batch_tokens")
        kept = {name: found[name] for name in names if name in found} if isinstance(found, dict) else {}
        return kept or None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form; bytes, seconds, and names as they were given."""
        choice = self.choice
        return {
            "method": choice.name,
            "drafter": None if choice.source is None else Path(choice.source).name,
            "tree": self.tree,
            "weights_bytes": self.weights,
            "cache_bytes": self.cache,
            "training": self.training,
        }


@dataclass
class MethodOpener:
    """Opens methods for one target; drafters of the same files are loaded once."""

    session: Session
    options: EngineOptions = EngineOptions()  # noqa: RUF009  # frozen
    """Options of all engines; a choice may name another tree."""
    files: DrafterOptions = DrafterOptions()  # noqa: RUF009
    """How drafters are read and run."""
    _drafters: dict[DrafterOptions, tuple[Drafter, int]] = field(default_factory=dict)

    def open(
        self, choices: Sequence[MethodChoice], *, compare_auto: bool = False
    ) -> tuple[list[OpenedMethod], list[Skipped]]:
        """All methods that can run, and why the others can't.

        With `compare_auto`, a method without a tree is opened twice: with a tree of one size, its own or a chain, and
        as `NAME auto`.
        """
        opened = list[OpenedMethod]()
        skipped = list[Skipped]()
        for choice in choices:
            try:
                if choice.tree is None and compare_auto:
                    fixed = self._fixed_tree(choice)
                    opened.append(self._open(replace(choice, tree=fixed)))
                    if not fixed.startswith("lookahead:"):  # a method with trees of its own
                        opened.append(self._open(replace(choice, name=f"{choice.name} {AUTO}", tree=AUTO)))
                else:
                    opened.append(self._open(choice))
            except EyasError as error:
                skipped.append(Skipped(choice.name, " ".join(str(error).split())))
        return opened, skipped

    def _fixed_tree(self, choice: MethodChoice) -> str:
        """The tree that the drafter's files name, unless it is `auto`; else a chain, or the shape of a lookup."""
        drafter, _ = self._drafter(self.files.of(choice.source, choice.method))
        own = drafter.default_tree if drafter.computes else default_shape(drafter)
        return own if own is not None and not is_auto(own) else f"chain:{min(CHAIN, drafter.max_depth or CHAIN)}"

    def plain(self) -> dict[str, Engine]:
        """Plain decoding, which is always measured, as name -> engine."""
        return {PLAIN: self.session.engine(None, self.options)}

    def _open(self, choice: MethodChoice) -> OpenedMethod:
        drafter, weights = self._drafter(self.files.of(choice.source, choice.method))
        tree = choice.tree or default_tree(drafter, self.session.target.device)
        engine = self.session.engine(drafter, replace(self.options, tree=tree))
        assert engine.speculation is not None
        return OpenedMethod(choice, engine, engine.speculation.drafter, tree, weights)

    def _drafter(self, options: DrafterOptions) -> tuple[Drafter, int]:
        if options not in self._drafters:
            drafter = self.session.drafter(options)
            self._drafters[options] = drafter, drafter_bytes(drafter, self.session.target)
        return self._drafters[options]


def engines_for(
    session: Session, drafters: Mapping[str, Drafter], trees: Sequence[str], options: EngineOptions
) -> dict[tuple[str, str], Engine]:
    """Make an engine for every drafter with every tree: (name, tree) -> engine. No trees = each drafter's default."""
    engines = {}
    for name, drafter in drafters.items():
        texts = trees or [default_tree(drafter, session.target.device)]
        costs = costs_for(session.target, drafter, options.batch_size or 1) if any(map(is_auto, texts)) else None
        for text in texts:
            measured = costs if is_auto(text) else None
            engines[name, text] = session.engine(drafter, replace(options, tree=text, costs=measured))
    return engines


def drafter_bytes(drafter: Drafter, target: Target) -> int:
    """The bytes that a drafter holds beyond its target's."""
    return reachable_bytes(drafter, list(vars(target).values()), beyond=target)


def reachable_bytes(owner: object, lent: object = None, beyond: object = None) -> int:
    """The bytes of all that `owner` refers to, each counted once, without what is reachable from `lent`.

    A tensor counts with its whole storage, even if it is a view of a part. References to `beyond` are not followed.
    """
    shared = dict(_reachable(lent, beyond))
    return sum(size for key, size in dict(_reachable(owner, beyond)).items() if key not in shared)


def _reachable(root: object, beyond: object) -> Iterator[tuple[tuple[str, int], int]]:
    """Everything reachable from an object, as ((device or "object", address), bytes)."""
    seen = {id(beyond)}
    waiting = [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, _PROGRAM_TYPES):
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            yield (str(storage.device), storage.data_ptr()), storage.nbytes()
        else:
            yield ("object", id(found)), sys.getsizeof(found)
            waiting += gc.get_referents(found)
