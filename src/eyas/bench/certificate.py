"""The losslessness certificate: runs with and without speculation over a grid, compared token by token.

The reference is plain decoding one row at a time. Each cell of the grid is another way to get the same tokens: a
tree and a batch size, at a temperature. Plain decoding in larger batches is a cell too (tree `none`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from eyas.bench.ties import RELATIVE, Divergence, first_difference, judge, scores_after
from eyas.data.dialogue import Dialogue, converse
from eyas.data.prompts import BadRow, PromptRow
from eyas.drafters import Drafter
from eyas.engine import Engine, Speculation
from eyas.target import Target
from eyas.tree import TreeSpec
from eyas.types import SamplingParams, Stats
from eyas.verify import WalkRule

NO_TREE = "none"


@dataclass(frozen=True)
class Grid:
    """What is tried."""

    temperatures: Sequence[float]
    trees: Mapping[str, TreeSpec]
    batch_sizes: Sequence[int]


@dataclass
class Cell:
    """One combination and how it compared."""

    temperature: float
    tree: str
    batch_size: int
    rows: int = 0
    tokens: int = 0
    accept_length: float = 0.0
    divergences: list[Divergence] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Rows, or later turns of rows, that could not be run."""

    @property
    def real(self) -> int:
        """Differences that rounding doesn't excuse."""
        return sum(not divergence.tie for divergence in self.divergences)

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.rows:
            return "nothing to compare"
        if not self.divergences:
            return "equal"
        ties = len(self.divergences) - self.real
        if not self.real:
            return f"equal but for {ties} near-tie{'s' * (ties > 1)}"
        return f"DIFFERENT in {self.real} of {self.rows} rows"

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the cell."""
        row = {name: value for name, value in vars(self).items() if name != "divergences"}
        divergences = [asdict(divergence) | {"tie": divergence.tie} for divergence in self.divergences]
        return row | {"verdict": self.verdict, "divergences": divergences}


@dataclass(frozen=True)
class Certifier:
    """The pair to be judged and how it is run."""

    target: Target
    tokenizer: Any
    drafter: Drafter
    params: SamplingParams
    coupled: bool = True
    rule: WalkRule | None = None
    """Verification rule under test; None = the default one."""

    def cells(self, rows: Sequence[PromptRow | BadRow], grid: Grid) -> Iterator[Cell]:
        """Fill the grid, cell by cell."""
        for temperature in grid.temperatures:
            params = SamplingParams(**(self.params.model_dump() | {"temperature": temperature}))
            plain = self._run(rows, params, None, 1)
            for tree, batch_size in self._combinations(grid):
                speculation = None if tree == NO_TREE else Speculation(self.drafter, grid.trees[tree], self.coupled)
                other = self._run(rows, params, speculation, batch_size)
                yield self._compare(Cell(temperature, tree, batch_size), params, plain, other)

    @staticmethod
    def _combinations(grid: Grid) -> Iterator[tuple[str, int]]:
        for batch_size in grid.batch_sizes:
            if batch_size > 1:
                yield NO_TREE, batch_size
            for tree in grid.trees:
                yield tree, batch_size

    def _run(
        self,
        rows: Sequence[PromptRow | BadRow],
        params: SamplingParams,
        speculation: Speculation | None,
        batch_size: int,
    ) -> list[Dialogue]:
        engine = self._engine(speculation, batch_size)
        dialogues = [Dialogue(row) for row in rows]
        for _ in converse(engine, dialogues, params):
            pass
        return dialogues

    def _engine(self, speculation: Speculation | None, batch_size: int) -> Engine:
        return Engine(self.target, self.tokenizer, speculation, batch_size=batch_size, rule=self.rule)

    def _compare(
        self, cell: Cell, params: SamplingParams, plain: Sequence[Dialogue], other: Sequence[Dialogue]
    ) -> Cell:
        pooled = Stats()
        for reference, candidate in zip(plain, other, strict=True):
            if reference.error is not None:
                cell.errors.append(reference.error)
            if not reference.completions:
                continue
            cell.rows += 1
            pooled.merge(candidate.stats())
            divergence = self._divergence(params, reference, candidate)
            if divergence is not None:
                cell.divergences.append(divergence)
        cell.tokens, cell.accept_length = pooled.tokens, round(pooled.accept_length, 4)
        return cell

    def _divergence(self, params: SamplingParams, plain: Dialogue, other: Dialogue) -> Divergence | None:
        for turn, (a, b) in enumerate(zip(plain.completions, other.completions, strict=False)):
            at = first_difference(a.token_ids, b.token_ids)
            if at is None:
                continue
            left, right = (c.token_ids[at] if at < len(c.token_ids) else None for c in (a, b))
            scores = scores_after(
                self.target, params, plain.prompts[turn], a.token_ids[:at], self._engine(None, 1).eos_ids
            )
            gap, tolerance = judge(scores, left, right, self.target.dtype)
            return Divergence(plain.id, turn, at, left, right, gap, tolerance)
        return None


@dataclass(frozen=True)
class Certificate:
    """All cells, and what they were held against."""

    model: str
    draft_model: str
    dtype: torch.dtype
    cells: Sequence[Cell]

    @property
    def equal(self) -> bool:
        """No cell has a difference that rounding doesn't excuse, and something was compared."""
        return any(cell.rows for cell in self.cells) and not any(cell.real for cell in self.cells)

    @property
    def errors(self) -> list[str]:
        """Rows that could not be run, each once."""
        return list(dict.fromkeys(error for cell in self.cells for error in cell.errors))

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "model": self.model,
            "draft_model": self.draft_model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "promise": promise(self.dtype),
            "near_tie_relative": RELATIVE[self.dtype],
            "equal": self.equal,
            "errors": self.errors,
            "cells": [cell.as_dict() for cell in self.cells],
        }


def promise(dtype: torch.dtype) -> str:
    """What eyas promises in this precision."""
    if dtype == torch.float32:
        return "float32: every token equal; only a near-tie of two logits may part two runs"
    return (
        f"{str(dtype).removeprefix('torch.')}: batch shape moves last bits, so two correct runs may part at a near-tie "
        "of two logits; any other difference is a bug"
    )
