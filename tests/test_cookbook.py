"""The cookbook's figures: disk and hours are what `eyas plan` says, sizes what the recipes resolve to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from eyas.data.store.layout import ShardLayout
from eyas.drafters.kinds import KINDS
from eyas.plan import costs as plan
from eyas.plan.devices import known_machine
from eyas.plan.drafters import Eagle3Plan
from eyas.targets.taps import choose_taps
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.settings import sized
from eyas.train.drafter.shape import drafter_config, with_taps
from eyas.train.recipe import load_recipe

from .doc_pages import ROOT
from .recipes.models import ConfigOnly

TEXT = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
EPOCHS = {60_000: 5, 120_000: 5, 500_000: 2}
LENGTH = 1500


def rows(heading: str) -> list[list[str]]:
    table = TEXT[TEXT.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in table]


def budget() -> dict[str, tuple[str, list[list[str]]]]:
    """Model -> its recipe, and its rows: chats, TB, hours of capture, of training, of training online."""
    found: dict[str, tuple[str, list[list[str]]]] = {}
    for model, recipe, *figures in rows("target | recipe"):
        if model:
            found[model] = (recipe, [])
        found[list(found)[-1]][1].append(figures)
    return found


@pytest.mark.parametrize("model", budget())
def test_the_budget_is_the_plan_s(model: str, tmp_path: Path) -> None:
    ConfigOnly.of(model, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    size = plan.model_size(config)
    taps = choose_taps(config)
    gpu = known_machine("H100")
    layout = ShardLayout(hidden=size.hidden, vocab=size.vocab, taps=taps, states="fp8", final="answers", top=None)
    for chats, *figures in budget()[model][1]:
        samples = int(chats.replace(",", ""))
        work = plan.Workload(samples, LENGTH, 0.5, EPOCHS[samples], 7, 32_000)
        capture = plan.capture_hours(size, work, gpu, 1)
        training = Eagle3Plan(size, len(taps), work).training_hours(gpu, 1)
        hours = (capture, training, training + work.epochs * capture)
        assert figures == [f"{layout.data_bytes(work.size) / 1e12:.2f}", *(f"{each:.1f}" for each in hours)], chats


@pytest.mark.parametrize(("model", "figures"), [(row[0], row[1:]) for row in rows("target | trained parameters")])
def test_the_memory_is_that_of_the_recipe_s_drafter(model: str, figures: list[str], tmp_path: Path) -> None:
    name = next((recipe for known, (recipe, _) in budget().items() if known == model), None)
    name = name or {"Qwen/Qwen3-8B": "eagle3_8b", "openai/gpt-oss-20b": "eagle3_moe"}[model]
    target = ConfigOnly.of(model, tmp_path)
    written = load_recipe(name, [f"drafter.target={model}"]).drafter
    assert isinstance(written, DrafterTrainConfig)
    shape = with_taps(sized(written, target, "bfloat16").shape, target, ())
    with torch.device("meta"):
        network = KINDS[written.shape.kind].network(drafter_config(shape, target))
    frozen = sum(p.numel() for name, p in network.named_parameters() if "embed" in name)
    trained = sum(p.numel() for p in network.parameters()) - frozen
    ends = 2 * target.vocab_size * target.hidden_size * 2
    whole = plan.model_size(AutoConfig.from_pretrained(tmp_path)).total * 2
    assert figures == [f"{trained:,}", *(f"{each / 1e9:.1f}" for each in (16 * trained + 4 * frozen, ends, whole))]


def test_settings_are_named_as_resolved() -> None:
    """Taps and MLP widths in the text are those of tests/recipes/test_real_models.py."""
    for fact in (
        "taps 2, 16, 29; an MLP of 14,336",
        "taps 2, 32, 61; an MLP of 25,600",
        "taps 2, 24, 45; an MLP of 6,144",
    ):
        assert fact in re.sub(r"\s+", " ", TEXT)
