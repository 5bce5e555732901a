"""Rules about what a consumer can represent, each about one field and with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from eyas.drafters.kind import EAGLE, EAGLE3, EAGLE3_MLA, Family
from eyas.interop.export.drafter import (
    DrafterToExport,
    copy_embedding,
    copy_head,
    leave_out_embedding,
    leave_out_head,
)

Families = tuple[Family, ...]
EVERY: Families = (EAGLE, EAGLE3, EAGLE3_MLA)
FUSED: Families = (EAGLE3, EAGLE3_MLA)
GROUPED: Families = (EAGLE, EAGLE3)


@dataclass(frozen=True)
class Refusal:
    """A field that keeps a consumer from representing a drafter."""

    field: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """A condition on one field that a consumer needs."""

    field: str
    holds: Callable[[DrafterToExport], bool]
    """Whether a drafter meets the condition."""
    reason: str
    families: Families = EVERY
    """The drafters that it is about; it holds for all others."""


@dataclass(frozen=True)
class Need:
    """A condition that a change of the drafter can meet: the target's embedding or head copied, or left out."""

    field: str
    change: Callable[[DrafterToExport], DrafterToExport | None]
    """Returns the drafter itself if it meets the condition already, None if it can't be changed so."""
    reason: str
    families: Families = EVERY
    """The drafters that it is about."""
    when: Callable[[DrafterToExport], bool] = lambda _: True
    """Which drafters of these families it is about."""


def only(field: str, *allowed: Any, why: str, families: Families = EVERY) -> Rule:
    """A rule that a field has one of a few values; a kind without the field passes."""
    return Rule(field, lambda drafter: drafter.get(field, allowed[0]) in allowed, why, families)


def off(*fields: str, why: str, families: Families = EVERY) -> list[Rule]:
    """Rules that toggles are off; `why` is completed by the name of the field."""
    return [only(field, False, why=f"{why} {field}", families=families) for field in fields]


def rotations(*types: str, families: Families = EVERY) -> Rule:
    """A rule that RoPE is of one of these types."""

    def holds(drafter: DrafterToExport) -> bool:
        return drafter.get("rope_parameters", {"rope_type": types[0]})["rope_type"] in types

    return Rule("rope_parameters", holds, f"it computes RoPE of type {', '.join(types)} only", families)


def rising_taps(lowest: int = 0, beyond: int = 0) -> list[Rule]:
    """Rules that taps rise and lie between `lowest` and the target's number of layers less `beyond`."""

    def known(drafter: DrafterToExport) -> tuple[int, ...]:
        return drafter.config.taps or ()

    def within(drafter: DrafterToExport) -> bool:
        most = 2**30 if drafter.layers is None else drafter.layers - beyond
        return all(lowest <= tap <= most for tap in known(drafter))

    span = f"{lowest} to the number of layers" + (f" less {beyond}" if beyond else "")
    return [
        Rule("taps", lambda d: list(known(d)) == sorted(set(known(d))), "it reads taps in rising order", FUSED),
        Rule("taps", within, f"its taps lie at boundaries {span}", FUSED),
    ]


def identity_map() -> Rule:
    """A rule that a full draft vocabulary is in the target's order: consumers read no map then."""
    return Rule(
        "d2t",
        lambda d: d.reduced or not bool(d.tensors["d2t"].any()),
        "it reads no vocabulary map where the draft vocabulary is full, and this one reorders it",
    )


NEEDS_OWN_EMBEDDING = Need("embedding", copy_embedding, "it expects an embedding in the file: give --target to copy it")
NEEDS_OWN_HEAD = Need(
    "head",
    copy_head,
    "it expects a head in the file: give --target to copy it (not one that scales or caps its logits)",
)
NEEDS_OWN_REDUCED_HEAD = Need(
    "head",
    copy_head,
    "it can't take rows of the target's head for a reduced draft vocabulary: give --target to copy them (not one that "
    "scales or caps its logits)",
    when=lambda drafter: drafter.reduced,
)
NEEDS_SHARED_EMBEDDING = Need(
    "embedding",
    leave_out_embedding,
    "it always uses the target's embedding, and this drafter's own is not known to be that: give --target to compare",
)
NEEDS_SHARED_HEAD = Need(
    "head",
    leave_out_head,
    "it always uses the target's head, and this drafter's own is not known to be that: give --target to compare",
)


def refusals(drafter: DrafterToExport, families: Families, rules: Iterable[Rule]) -> list[Refusal]:
    """A refusal for every rule that a drafter breaks; for a kind outside `families` just one, of the field `kind`."""
    if drafter.kind.family not in families:
        return [Refusal("kind", f"it has no drafter of kind {drafter.kind.name}")]
    return [
        Refusal(rule.field, rule.reason)
        for rule in rules
        if drafter.kind.family in rule.families and not rule.holds(drafter)
    ]


def meet_needs(drafter: DrafterToExport, needs: Iterable[Need]) -> tuple[DrafterToExport, list[Refusal]]:
    """The drafter changed to meet every need, and a refusal for each need that can't be met."""
    unmet = []
    for need in needs:
        if drafter.kind.family not in need.families or not need.when(drafter):
            continue
        changed = need.change(drafter)
        if changed is None:
            unmet.append(Refusal(need.field, need.reason))
        else:
            drafter = changed
    return drafter, unmet
