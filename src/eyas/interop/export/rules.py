"""What a consumer can't represent: one rule a field, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from eyas.interop.export.drafter import DrafterToExport, lent_embedding, lent_head, own_embedding, own_head

Change = Callable[[DrafterToExport], DrafterToExport | None]
EVERY = ("eagle1", "eagle3", "mla")
FUSED = ("eagle3", "mla")
GROUPED = ("eagle1", "eagle3")


@dataclass(frozen=True)
class Refusal:
    """A field that stands in the way, and why."""

    field: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """`holds` says whether a drafter is representable; `kinds` whom the rule is about."""

    field: str
    holds: Callable[[DrafterToExport], bool]
    reason: str
    kinds: tuple[str, ...] = EVERY


@dataclass(frozen=True)
class Need:
    """Something that can perhaps be arranged: a copy of the target's part, or the part left out as the target's."""

    field: str
    change: Change
    reason: str
    kinds: tuple[str, ...] = EVERY
    when: Callable[[DrafterToExport], bool] = lambda _: True


def only(field: str, *allowed: Any, why: str, kinds: tuple[str, ...] = EVERY) -> Rule:
    """A field whose value must be one of a few; a kind without the field passes."""
    return Rule(field, lambda drafter: drafter.get(field, allowed[0]) in allowed, why, kinds)


def off(*fields: str, why: str, kinds: tuple[str, ...] = EVERY) -> list[Rule]:
    """Toggles that must be off."""
    return [only(field, False, why=f"{why} {field}", kinds=kinds) for field in fields]


def rotations(*types: str, kinds: tuple[str, ...] = EVERY) -> Rule:
    """RoPE types that are computed."""

    def holds(drafter: DrafterToExport) -> bool:
        return drafter.get("rope_parameters", {"rope_type": types[0]})["rope_type"] in types

    return Rule("rope_parameters", holds, f"it computes RoPE of type {', '.join(types)} only", kinds)


def rising_taps(lowest: int = 0, beyond: int = 0) -> list[Rule]:
    """Taps in rising order from `lowest` to the number of the target's layers less `beyond`."""

    def known(drafter: DrafterToExport) -> tuple[int, ...]:
        return drafter.config.taps or ()

    def within(drafter: DrafterToExport) -> bool:
        most = 2**30 if drafter.layers is None else drafter.layers - beyond
        return all(lowest <= tap <= most for tap in known(drafter))

    span = f"{lowest} to the number of layers" + (f" less {beyond}" if beyond else "")
    return [
        Rule("taps", lambda s: list(known(s)) == sorted(set(known(s))), "it reads taps in rising order", FUSED),
        Rule("taps", within, f"its taps lie at boundaries {span}", FUSED),
    ]


def identity_map() -> Rule:
    """A full draft vocabulary must be in the target's order: no map is read then."""
    return Rule(
        "d2t",
        lambda s: s.reduced or not bool(s.tensors["d2t"].any()),
        "it reads no vocabulary map where the draft vocabulary is full, and this one reorders it",
    )


NEEDS_OWN_EMBEDDING = Need("embedding", own_embedding, "it expects an embedding in the file: give --target to copy it")
NEEDS_OWN_HEAD = Need(
    "head", own_head, "it expects a head in the file: give --target to copy it (not one that scales or caps its logits)"
)
NEEDS_OWN_REDUCED_HEAD = Need(
    "head",
    own_head,
    "it can't take rows of the target's head for a reduced draft vocabulary: give --target to copy them (not one that "
    "scales or caps its logits)",
    when=lambda drafter: drafter.reduced,
)
NEEDS_LENT_EMBEDDING = Need(
    "embedding",
    lent_embedding,
    "it always uses the target's embedding, and this drafter's own is not known to be that: give --target to compare",
)
NEEDS_LENT_HEAD = Need(
    "head",
    lent_head,
    "it always uses the target's head, and this drafter's own is not known to be that: give --target to compare",
)


def refusals(drafter: DrafterToExport, kinds: Iterable[str], rules: Iterable[Rule]) -> list[Refusal]:
    """Every rule that a drafter breaks; one of a kind that the consumer doesn't know breaks that alone."""
    if drafter.kind.name not in kinds:
        return [Refusal("kind", f"it has no drafter of kind {drafter.kind.name}")]
    return [
        Refusal(rule.field, rule.reason)
        for rule in rules
        if drafter.kind.name in rule.kinds and not rule.holds(drafter)
    ]


def arranged(drafter: DrafterToExport, needs: Iterable[Need]) -> tuple[DrafterToExport, list[Refusal]]:
    """The drafter with every need met, and the needs that can't be."""
    unmet = []
    for need in needs:
        if drafter.kind.name not in need.kinds or not need.when(drafter):
            continue
        changed = need.change(drafter)
        if changed is None:
            unmet.append(Refusal(need.field, need.reason))
        else:
            drafter = changed
    return drafter, unmet
