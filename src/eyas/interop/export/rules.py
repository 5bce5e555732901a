"""Rules for what a consumer can represent, each with the field that it concerns and a reason for users."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from eyas.drafters.kind import DFLASH, DSPARK, EAGLE, EAGLE3, EAGLE3_MLA, PEAGLE, Family
from eyas.interop.export.drafter import (
    DrafterToExport,
    copy_embedding,
    copy_head,
    leave_out_embedding,
    leave_out_head,
)

Families = tuple[Family, ...]
EAGLES: Families = (EAGLE, EAGLE3, EAGLE3_MLA)
FUSED: Families = (EAGLE3, EAGLE3_MLA)
GROUPED: Families = (EAGLE, EAGLE3)
BLOCK: Families = (DFLASH, DSPARK)
EVERY: Families = (*EAGLES, PEAGLE, *BLOCK)


@dataclass(frozen=True)
class Refusal:
    """A field that prevents a consumer from representing a drafter, and why."""

    field: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """A condition on one field that a consumer requires."""

    field: str
    holds: Callable[[DrafterToExport], bool]
    """Whether a drafter meets the condition."""
    reason: str
    families: Families = EVERY
    """The families of drafters that it applies to."""


@dataclass(frozen=True)
class Need:
    """A requirement that can be met by a change: copying or removing an embedding or a head."""

    field: str
    change: Callable[[DrafterToExport], DrafterToExport | None]
    """Returns the changed drafter, the drafter itself if no change is needed, or None if the change is impossible."""
    reason: str
    families: Families = EVERY
    """The families of drafters that it applies to."""
    when: Callable[[DrafterToExport], bool] = lambda _: True
    """Whether it applies to a drafter of these families."""


def only(field: str, *allowed: Any, why: str, families: Families = EVERY) -> Rule:
    """A rule that a field has one of the allowed values; kinds without the field pass."""
    return Rule(field, lambda drafter: drafter.get(field, allowed[0]) in allowed, why, families)


def off(*fields: str, why: str, families: Families = EVERY) -> list[Rule]:
    """Rules that toggles are off; the reason is `why` followed by the field's name."""
    return [only(field, False, why=f"{why} {field}", families=families) for field in fields]


def rotations(*types: str, families: Families = EVERY) -> Rule:
    """A rule that RoPE has one of these types."""

    def holds(drafter: DrafterToExport) -> bool:
        return drafter.get("rope_parameters", {"rope_type": types[0]})["rope_type"] in types

    return Rule("rope_parameters", holds, f"it computes RoPE of type {', '.join(types)} only", families)


def rising_taps(lowest: int = 0, beyond: int = 0, families: Families = (*FUSED, PEAGLE, *BLOCK)) -> list[Rule]:
    """Rules that taps ascend, from at least `lowest` to at most the target's number of layers minus `beyond`."""

    def known(drafter: DrafterToExport) -> tuple[int, ...]:
        return drafter.config.taps or ()

    def within(drafter: DrafterToExport) -> bool:
        most = 2**30 if drafter.layers is None else drafter.layers - beyond
        return all(lowest <= tap <= most for tap in known(drafter))

    span = f"{lowest} to the number of layers" + (f" minus {beyond}" if beyond else "")
    return [
        Rule("taps", lambda d: list(known(d)) == sorted(set(known(d))), "it reads taps in ascending order", families),
        Rule("taps", within, f"its taps lie at boundaries {span}", families),
    ]


def identity_map() -> Rule:
    """A rule that a full draft vocabulary has the target's order, because consumers don't read a map for it."""
    return Rule(
        "d2t",
        lambda d: d.reduced or not bool(d.tensors["d2t"].any()),
        "it doesn't read the vocabulary map of a full draft vocabulary, but this one reorders tokens",
    )


def as_wide_as_the_target(why: str, families: Families = EVERY) -> Rule:
    """A rule that the drafter's states are as wide as the target's."""
    return Rule("hidden_size", lambda d: d.config.hidden_size == d.config.target_hidden_size, why, families)


NEEDS_OWN_EMBEDDING = Need("embedding", copy_embedding, "it expects an embedding in the file: give --model to copy it")
NEEDS_OWN_HEAD = Need(
    "head",
    copy_head,
    "it expects a head in the file: give --model to copy it (impossible if the target scales or caps its logits)",
)
NEEDS_OWN_REDUCED_HEAD = Need(
    "head",
    copy_head,
    "it can't use rows of the target's head for a reduced draft vocabulary: give --model to copy them (impossible if "
    "the target scales or caps its logits)",
    when=lambda drafter: drafter.reduced,
)
NEEDS_SHARED_EMBEDDING = Need(
    "embedding",
    leave_out_embedding,
    "it always uses the target's embedding, but this drafter has its own: give --model to compare the two",
)
NEEDS_SHARED_HEAD = Need(
    "head",
    leave_out_head,
    "it always uses the target's head, but this drafter has its own: give --model to compare the two",
)


_NO_WINDOW = only(
    "draft_window", None,
    why="it attends to all pairs, and this drafter to sinks and a window: remove draft_window from config.json to "
    "export it for contexts as short as its window",
)  # fmt: skip


def refusals(drafter: DrafterToExport, families: Families, rules: Iterable[Rule]) -> list[Refusal]:
    """A refusal for every rule that a drafter breaks; for kinds outside `families` only one, for the field `kind`."""
    if drafter.kind.family not in families:
        return [Refusal("kind", f"it doesn't support drafters of kind {drafter.kind.name}")]
    return [
        Refusal(rule.field, rule.reason)
        for rule in (_NO_WINDOW, *rules)
        if drafter.kind.family in rule.families and not rule.holds(drafter)
    ]


def meet_needs(drafter: DrafterToExport, needs: Iterable[Need]) -> tuple[DrafterToExport, list[Refusal]]:
    """The drafter changed to meet all needs, and a refusal for each need that can't be met."""
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
