"""The losslessness certificate: runs with and without speculation over a grid, compared token by token.

The reference is plain decoding one row at a time. Each cell of the grid is another way to get the same tokens: a
tree and a batch size, at a temperature. Plain decoding in larger batches is a cell too (tree `none`). A wrong kernel
would be wrong in all of these, so the reference itself is compared with the model's own modules, run by PyTorch's
kernels (tree `modules`), and on request with `transformers.generate` (tree `transformers`).

Where two runs of a request diverge, the cause is either rounding or a bug: two correct runs may choose differently only
where the target scores two tokens almost alike. So plain decoding runs the common prefix again, and *both* tokens must
score close to the best score there: the gap, in logits, must not exceed `RELATIVE[dtype]` times the greatest logit. A
token that a broken rule let through exceeds that by orders of magnitude. Tokens that a filter ruled out never tie.
Where the target runs as modules, the gap may also be up to twice the change in its logits when the inputs of its
products move by a rounding: PyTorch's kernels sum in a different order for every batch shape, and ours round elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.bench.offline.external import TransformersBaseline
from eyas.drafters.base import Drafter
from eyas.engine import Engine
from eyas.hub import find_target
from eyas.options import EngineOptions
from eyas.session import Session
from eyas.targets import Target
from eyas.targets.loading import read_config, read_model
from eyas.targets.parameters import weight_formats
from eyas.targets.quantization import dequantize_at_load
from eyas.targets.roundings import perturbed_by_rounding
from eyas.text.dialogue import Dialogue, converse
from eyas.text.prompts import BadRow, PromptRow
from eyas.tree import DraftTree
from eyas.types import SamplingParams, Stats
from eyas.verify import Sampler, WalkRule

NO_TREE = "none"
"""The name of plain decoding among the trees of a grid."""
MODULES, TRANSFORMERS = "modules", "transformers"
"""The names of the model's own modules and of `transformers.generate` among the trees."""
RELATIVE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Near-tie threshold of a dtype, relative to the greatest absolute logit.

A few units in the last place of a logit (bfloat16, float16, where logits themselves are rounded), or the error that
sums in another order accumulate over tens of layers (float32).
"""


@dataclass(frozen=True)
class CertificateGrid:
    """The combinations to compare: every temperature with every tree and every batch size."""

    temperatures: Sequence[float]
    trees: Sequence[str]
    """Their names, such as `chain:4` or `auto`."""
    batch_sizes: Sequence[int]


@dataclass
class Cell:
    """One combination of the grid, and how its answers compare with the reference."""

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
        """The number of differences that rounding doesn't explain."""
        return sum(not divergence.tie for divergence in self.divergences)

    @property
    def verdict(self) -> str:
        """The result in words, such as `equal` or `DIFFERENT in 2 of 8 rows`."""
        if not self.rows:
            return "nothing to compare"
        if not self.divergences:
            return "equal"
        ties = len(self.divergences) - self.real
        if not self.real:
            return f"equal but for {ties} near-tie{'s' * (ties > 1)}"
        return f"DIFFERENT in {self.real} of {self.rows} rows"

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, with the verdict and every divergence."""
        row = {name: value for name, value in vars(self).items() if name != "divergences"}
        divergences = [asdict(divergence) | {"tie": divergence.tie} for divergence in self.divergences]
        return row | {"verdict": self.verdict, "divergences": divergences}


@dataclass(frozen=True)
class Certifier:
    """The target and drafter that are compared, and how they are run."""

    target: Target
    tokenizer: Any
    drafter: Drafter
    params: SamplingParams
    coupled: bool = True
    rule: WalkRule | None = None
    """Verification rule under test; None = the default one."""
    modules: Target | None = None
    """The model's own modules, from `own_modules`, with which plain decoding is compared."""
    baseline: TransformersBaseline | None = None
    """A second reference for greedy plain decoding; needs `modules` to judge where the two diverge."""

    def cells(self, rows: Sequence[PromptRow | BadRow], grid: CertificateGrid) -> Iterator[Cell]:
        """Run and compare every combination; yields each cell as soon as it is done."""
        for temperature in grid.temperatures:
            params = SamplingParams(**(self.params.model_dump() | {"temperature": temperature}))
            plain = self._run(rows, params, self._engine(1))
            yield from self._against_modules(rows, params, plain)
            for tree, batch_size in self._combinations(grid):
                other = self._run(rows, params, self._engine(batch_size, None if tree == NO_TREE else tree))
                yield self._compare(Cell(temperature, tree, batch_size), params, plain, other)

    def _against_modules(
        self, rows: Sequence[PromptRow | BadRow], params: SamplingParams, plain: Sequence[Dialogue]
    ) -> Iterator[Cell]:
        """Compare plain decoding with the modules and, if greedy, with `transformers.generate`."""
        if self.modules is None:
            return
        judge = replace(self, target=self.modules)
        yield judge._compare(
            Cell(params.temperature, MODULES, 1), params, judge._run(rows, params, judge._engine(1)), plain
        )
        if self.baseline is not None and not params.temperature:
            theirs = [Dialogue(row) for row in rows]
            for dialogue in theirs:
                self.baseline.answer([dialogue], params)
            yield judge._compare(Cell(params.temperature, TRANSFORMERS, 1), params, theirs, plain)

    @staticmethod
    def _combinations(grid: CertificateGrid) -> Iterator[tuple[str, int]]:
        for batch_size in grid.batch_sizes:
            if batch_size > 1:
                yield NO_TREE, batch_size
            for tree in grid.trees:
                yield tree, batch_size

    @staticmethod
    def _run(rows: Sequence[PromptRow | BadRow], params: SamplingParams, engine: Engine) -> list[Dialogue]:
        dialogues = [Dialogue(row) for row in rows]
        for _ in converse(engine, dialogues, params):
            pass
        return dialogues

    def _engine(self, batch_size: int, tree: str | None = None) -> Engine:
        """An engine that drafts the `tree` of this name; None = plain decoding."""
        options = EngineOptions(tree, coupled=self.coupled, rule=self.rule, batch_size=batch_size)
        return Session(self.target, self.tokenizer).engine(None if tree is None else self.drafter, options)

    def _compare(
        self, cell: Cell, params: SamplingParams, plain: Sequence[Dialogue], other: Sequence[Dialogue]
    ) -> Cell:
        pooled = Stats()
        plain_engine = self._engine(1)
        for reference, candidate in zip(plain, other, strict=True):
            if reference.error is not None:
                cell.errors.append(reference.error)
            if not reference.completions:
                continue
            cell.rows += 1
            pooled.merge(candidate.stats())
            divergence = first_divergence(plain_engine, params, reference, candidate)
            if divergence is not None:
                cell.divergences.append(divergence)
        cell.tokens = pooled.tokens
        cell.accept_length = round(pooled.accept_length, 4)
        return cell


@dataclass(frozen=True)
class Certificate:
    """All cells of the grid, and the pair they are about."""

    model: str
    draft_model: str
    dtype: torch.dtype
    cells: Sequence[Cell]
    weights: str | None = None
    """The 4- and 8-bit formats in which weights are multiplied; None: the dtype."""

    @property
    def equal(self) -> bool:
        """Whether something was compared and every difference is explained by rounding."""
        return any(cell.rows for cell in self.cells) and not any(cell.real for cell in self.cells)

    @property
    def errors(self) -> list[str]:
        """Why rows could not be run, each reason once."""
        return list(dict.fromkeys(error for cell in self.cells for error in cell.errors))

    @property
    def compared_with(self) -> list[str]:
        """What answers were compared with, in words."""
        found = {cell.tree for cell in self.cells}
        return ["plain decoding of one row at a time", *(text for tree, text in _REFERENCES.items() if tree in found)]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, with the promise for the dtype and the near-tie threshold."""
        return {
            "model": self.model,
            "draft_model": self.draft_model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "weights": self.weights,
            "promise": promise(self.dtype),
            "near_tie_relative": RELATIVE[self.dtype],
            "equal": self.equal,
            "errors": self.errors,
            "compared_with": self.compared_with,
            "cells": [cell.as_dict() for cell in self.cells],
        }


_REFERENCES = {
    MODULES: "the model's own modules, run by PyTorch's kernels",
    TRANSFORMERS: "transformers.generate, greedily",
}


def own_modules(model: str, target: Target) -> Target:
    """A target's model as transformers runs it: without our native passes, weight layouts and attention.

    It is loaded a second time, unless its weights are in 4 or 8 bits here: then the target's own modules run.
    """
    if weight_formats(target.model):
        made = Target(target.model, ragged=False)
    else:
        files = find_target(model)
        config = read_config(files)
        dequantize_at_load(config, target.device)
        loaded = read_model(files, config, target.dtype)
        made = Target(loaded.to(target.device).eval().requires_grad_(False), ragged=False)
    made.kv_in_codes = target.kv_in_codes
    return made


def promise(dtype: torch.dtype) -> str:
    """What eyas promises about tokens in this precision, as a sentence."""
    if dtype == torch.float32:
        return "float32: every token equal; two runs may diverge only at a near-tie of two logits"
    return (
        f"{str(dtype).removeprefix('torch.')}: batch shape changes last bits, so two correct runs may diverge at a "
        "near-tie of two logits; any other difference is a bug"
    )


@dataclass(frozen=True)
class Divergence:
    """The first position at which two runs of a row differ; beyond it, the texts can't be compared."""

    row: str
    turn: int
    position: int
    """Index of the token in the answer."""
    plain: int | None
    """The token of plain decoding; None = its answer ended here."""
    speculative: int | None
    gap: float | None
    """In logits: how far the lower-scoring of the two tokens is below the best; None if one answer ended."""
    tolerance: float | None

    @property
    def tie(self) -> bool:
        """Whether rounding explains the difference: the gap is within the tolerance."""
        return self.gap is not None and self.tolerance is not None and self.gap <= self.tolerance

    def describe(self) -> str:
        """Describe the two tokens and whether the difference is real."""
        tokens = f"plain {self.plain}, here {self.speculative}"
        if self.gap is None:
            return f"{tokens}: only one answer ends there: a real difference"
        kind = "near-tie" if self.tie else "a real difference"
        return f"{tokens}; gap {self.gap:.3g} logits, near-tie up to {self.tolerance:.3g}: {kind}"


def first_divergence(engine: Engine, params: SamplingParams, plain: Dialogue, other: Dialogue) -> Divergence | None:
    """Where two runs of a row diverge; None if equal. The target of `engine`, which decodes plainly, is the judge."""
    for turn, (a, b) in enumerate(zip(plain.completions, other.completions, strict=False)):
        at = first_difference(a.token_ids, b.token_ids)
        if at is None:
            continue
        left, right = (c.token_ids[at] if at < len(c.token_ids) else None for c in (a, b))
        request = plain.requests[turn]
        given = engine.target, params, request.prompt, a.token_ids[:at], engine.end_ids(request)
        scores = scores_after(*given)
        gap, tolerance = judge(scores, left, right, engine.target.dtype)
        if tolerance is not None:  # no effect on native passes, which run none of the moved modules
            with perturbed_by_rounding(engine.target.layers, engine.target.dtype):
                moved = scores_after(*given).logits
            tolerance = max(tolerance, 2 * float((moved - scores.logits).abs().max()))
        return Divergence(plain.id, turn, at, left, right, gap, tolerance)
    return None


class SamplerScores(NamedTuple):
    """The scores by which the sampler chooses the token of one position."""

    values: Tensor  # [V] scores, noise included, in units of logits; -inf = ruled out
    logits: Tensor  # [V]

    @property
    def scale(self) -> float:
        """The greatest absolute logit, to which rounding is relative."""
        return float(self.logits.abs().max())


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two answers differ in a token or in where they end."""
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


@torch.inference_mode()
def scores_after(
    target: Target, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], eos_ids: Sequence[int]
) -> SamplerScores:
    """Scores for the token after `prompt` and `answer`, from a plain forward pass over both."""
    rows = range(1)
    cache = target.allocate(1)
    tokens = [*prompt, *answer]
    for _ in target.prefill(cache, rows, [tokens], ()):
        pass
    root = torch.tensor(tokens[-1:], device=target.device)
    logits = target.verify(cache, rows, root, DraftTree.empty(1, target.device), ()).logits.rows
    sampler = Sampler(1, target.vocab_size, target.device)
    sampler.admit(0, params, prompt, eos_ids)
    if answer:
        emitted = torch.tensor([list(answer)], device=target.device)
        sampler.commit(rows, emitted, torch.tensor([len(answer)], device=target.device))
    path = sampler.path(rows)
    scores = path.scores(path.warped(logits))[0]
    if path.needs.noise:
        scores = scores * params.temperature
    return SamplerScores(scores, logits[0].float())


def judge(
    scores: SamplerScores, plain: int | None, other: int | None, dtype: torch.dtype
) -> tuple[float | None, float | None]:
    """Gap and tolerance, in logits, of two tokens chosen at one position; None if a run had ended."""
    if plain is None or other is None:
        return None, None
    values = scores.values
    gap = float(values.max() - torch.minimum(values[plain], values[other]))
    return gap, RELATIVE[dtype] * max(scores.scale, torch.finfo(torch.float32).tiny)
