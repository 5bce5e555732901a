"""The certificate: equal pairs pass, broken ones are caught, and only rounding is excused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.bench.offline.certificate import (
    RELATIVE,
    Cell,
    Certificate,
    CertificateGrid,
    Certifier,
    Divergence,
    SamplerScores,
    first_difference,
    judge,
    own_modules,
    promise,
    scores_after,
)
from eyas.bench.offline.external import TransformersBaseline
from eyas.engine import Engine
from eyas.targets import Target, load_target
from eyas.targets.native.decoder import NativeDecoder
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.slots import SlotCache
from eyas.text.prompts import BadRow, PromptRow
from eyas.tree import DraftTree, NodeLogits
from eyas.types import SamplingParams
from eyas.verify import Sampler, SeededWalk, Walk, WalkRule

from ... import tiny
from ...engine.test_auto import Restless

TOKENS = 10
PROMPTS = tiny.prompts(5, 9)
ROWS: list[PromptRow | BadRow] = [
    PromptRow(f"r{i}", f"f:{i}", token_ids=tuple(prompt)) for i, prompt in enumerate(PROMPTS)
]
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
TREE = ["dynamic:4,3,9"]


class Oracle(tiny.OracleDrafter):
    """Often right, so that a round keeps paths from all over its tree; lost where the text is not the recorded one."""

    def _ahead(self, slot: int) -> list[int] | None:
        try:
            return super()._ahead(slot)
        except AssertionError:
            return []


def oracle(model: Any) -> Oracle:
    return Oracle([p + tiny.continuation(model, p, TOKENS + 6) for p in PROMPTS], (1, 2))


def cells(target: Target, rule: WalkRule | None = None, heats: Sequence[float] = (0.0,), size: int = 1) -> list[Cell]:
    certifier = Certifier(target, None, oracle(target.model), GREEDY, rule=rule)
    return list(certifier.cells(ROWS, CertificateGrid(heats, TREE, [size])))


def test_a_correct_engine_is_equal() -> None:
    plain, tree = cells(tiny.target(), size=2)
    assert (plain.tree, tree.tree) == ("none", "dynamic:4,3,9")
    for cell in (plain, tree):
        assert (cell.verdict, cell.rows, cell.tokens) == ("equal", 2, 2 * TOKENS)
    assert (plain.accept_length, tree.accept_length > 1.5) == (1.0, True)
    assert Certificate("m", "d", torch.float32, [plain, tree]).equal


def test_bad_rows_are_told_once_and_nothing_is_no_proof() -> None:
    certifier = Certifier(tiny.target(), None, tiny.eagle3_drafter(), GREEDY)
    bad: list[PromptRow | BadRow] = [BadRow("1", "f:1: broken"), PromptRow("2", "f:2", token_ids=(999,))]
    made = list(certifier.cells(bad, CertificateGrid([0.0, 1.0], ["chain:1"], [1])))
    certificate = Certificate("m", "d", torch.float32, made)
    assert [cell.verdict for cell in made] == ["nothing to compare"] * 2
    assert not certificate.equal
    assert len(certificate.errors) == 2
    assert "f:2: prompt has token id 999" in certificate.errors[1]


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native passes that nobody tries."""
    monkeypatch.setattr("eyas.targets.loading.best_layout", lambda *_: NativeLinear)
    monkeypatch.setattr("eyas.targets.trials.refusal", lambda *_: None)
    monkeypatch.setattr("eyas.targets.trials.PassTrial.passed", lambda _: True)


def without_rope_in_a_layer(native: NativeDecoder) -> None:
    native._layers[1].rope = -1


def scaled_behind_a_position(native: NativeDecoder) -> None:
    tables = native._ropes[0]

    def scaled(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factor = 1 + 0.5 * (positions > 7).unsqueeze(-1)
        return tuple(part * factor for part in tables(positions))  # type: ignore[return-value]

    native._ropes = [scaled]
    native._tables = (torch.empty(1, 0, 0),) * 2


@pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("broken", [None, without_rope_in_a_layer, scaled_behind_a_position])
def test_wrong_kernels_are_found(broken: Callable[[NativeDecoder], None] | None, tmp_path: Path) -> None:
    tiny.build_model("llama", head_dim=16).save_pretrained(tmp_path)
    target = load_target(tmp_path, device="cpu")
    assert target.native is not None
    if broken is not None:
        broken(target.native)
    modules = own_modules(str(tmp_path), target)
    assert modules.native is None
    baseline = TransformersBaseline(tmp_path, Engine(target))
    certifier = Certifier(target, None, oracle(modules.model), GREEDY, modules=modules, baseline=baseline)
    found = {cell.tree: cell for cell in certifier.cells(ROWS, CertificateGrid([0.0], TREE, [1]))}
    certificate = Certificate("m", "d", torch.float32, list(found.values()))
    assert certificate.equal is (broken is None)
    assert found["dynamic:4,3,9"].real == 0  # speculation follows what is broken
    assert [found[name].real > 0 for name in ("modules", "transformers")] == [broken is not None] * 2
    assert len(certificate.compared_with) == 3


class FirstChild:
    """A broken rule: the root's first child is accepted unseen."""

    lossless = seeded = True

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        walk = SeededWalk()(logits, tree, sampler, rows)
        if not tree.size:
            return walk
        child = tree.tokens[:, :1]
        after = logits.best()[:, 1:2]
        rest = torch.full_like(walk.tokens[:, 2:], -1)
        path = torch.zeros_like(walk.path)
        path[:, 1] = 1
        tokens = torch.cat((child, after, rest), 1)
        return walk.replaced(tokens=tokens, path=path, accepted=torch.ones_like(walk.accepted))


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_broken_rule_is_a_real_difference(heat: float) -> None:
    (cell,) = cells(tiny.target(), FirstChild(), [heat])
    assert cell.real == 2
    assert cell.verdict == "DIFFERENT in 2 of 2 rows"
    for parted in cell.divergences:
        assert parted.gap is not None
        assert parted.tolerance is not None
        assert parted.gap > 100 * parted.tolerance
    assert not Certificate("m", "d", torch.float32, [cell]).equal


def test_a_broken_cache_is_a_real_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target()
    commit = SlotCache.commit
    monkeypatch.setattr(
        SlotCache, "commit", lambda cache, rows, paths: commit(cache, rows, [list(range(len(p))) for p in paths])
    )
    (cell,) = cells(target)
    assert cell.real > 0
    assert all(parted.position > 0 for parted in cell.divergences)


class Swapped:
    """The right walk, but for one token that becomes another."""

    lossless = seeded = True

    def __init__(self, token: int, twin: int) -> None:
        self.token = token
        self.twin = twin

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        walk = SeededWalk()(logits, tree, sampler, rows)
        if not tree.size:
            return walk
        return walk.replaced(tokens=torch.where(walk.tokens == self.token, self.twin, walk.tokens))


@pytest.mark.parametrize(("whisker", "tie"), [(0.0, True), (3e-6, True), (1e-4, False)])
def test_only_a_near_tie_is_excused(whisker: float, tie: bool) -> None:
    """Two tokens with nearly the same row in the head."""
    model = tiny.build_model("llama")
    token = tiny.continuation(model, PROMPTS[0], 2)[1]  # the first one comes out of prefill
    twin = next(t for t in range(tiny.VOCAB - 1, token, -1))
    model.lm_head.weight[twin] = model.lm_head.weight[token] * (1 - whisker)
    (cell,) = cells(Target(model), Swapped(token, twin))
    parted = cell.divergences[0]
    assert (parted.row, parted.position, parted.plain, parted.speculative) == ("r0", 1, token, twin)
    assert parted.tie is tie
    row = cell.as_dict()["divergences"][0]
    assert (row["tie"], row["gap"]) == (tie, parted.gap)
    if tie and not cell.real:
        assert cell.verdict.startswith("equal but for")
        assert Certificate("m", "d", torch.float32, [cell]).equal


def test_a_gap_is_measured_from_the_best_score() -> None:
    scores = SamplerScores(torch.tensor([5.0, 4.9999, 4.0, 3.9999, float("-inf")]), torch.tensor([8.0]))
    gap, tolerance = judge(scores, 0, 1, torch.float32)
    assert gap == pytest.approx(1e-4, rel=1e-2)
    assert tolerance == pytest.approx(8e-5)
    both_wrong = judge(scores, 2, 3, torch.float32)[0]
    assert both_wrong == pytest.approx(1.0001, abs=1e-5)  # near each other, but neither near the best
    assert judge(scores, 0, 4, torch.bfloat16)[0] == float("inf")
    assert judge(scores, 0, None, torch.float32) == (None, None)
    assert not Divergence("r", 0, 3, 1, None, None, None).tie
    assert RELATIVE[torch.float32] < RELATIVE[torch.float16] < RELATIVE[torch.bfloat16]


def test_the_scores_are_those_the_sampler_chose_by() -> None:
    target = tiny.target()
    prompt = PROMPTS[1]
    answer = tiny.continuation(target.model, prompt, 3)
    scores = scores_after(target, GREEDY, prompt, answer[:2], ())
    truth = tiny.full_forward(target.model, [*prompt, *answer[:2]]).logits[0, -1]
    torch.testing.assert_close(scores.values, truth, rtol=1e-4, atol=1e-4)
    assert scores.scale == pytest.approx(float(truth.abs().max()), rel=1e-4)
    assert int(scores.values.argmax()) == answer[2]


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == first_difference([1], [1, 2]) == 1
    assert first_difference([], [4]) == 0


def test_what_is_promised() -> None:
    assert promise(torch.float32).startswith("float32: every token equal")
    assert promise(torch.bfloat16).startswith("bfloat16: batch shape changes last bits")


def test_a_controller_s_trees_are_certified_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Restless] = []

    def planner(*of: Any, experienced: bool) -> Restless:
        assert of[2:] == ("auto", 2, None)
        assert experienced
        made.append(Restless(0.001))
        return made[-1]

    monkeypatch.setattr("eyas.session.make_controller", planner)
    certifier = Certifier(tiny.target(), None, tiny.eagle3_drafter(), GREEDY)
    plain, auto = certifier.cells(ROWS, CertificateGrid([0.0], ["auto"], [2]))
    assert [(cell.tree, cell.verdict, cell.rows) for cell in (plain, auto)] == [
        ("none", "equal", 2),
        ("auto", "equal", 2),
    ]
    (controller,) = made
    assert any(tree is not None for tree in controller.planned)
