"""Which methods are measured, by what name, what their files say, and what they hold in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eyas.bench.offline.methods import (
    MethodChoice,
    MethodOpener,
    all_choices,
    named_choices,
    preset_choices,
    reachable_bytes,
    with_trees,
    without_drafter,
)
from eyas.drafters.kinds import KINDS
from eyas.drafters.options import read_method
from eyas.drafters.weightless import METHODS as WEIGHTLESS
from eyas.errors import UsageError
from eyas.session import Session
from eyas.targets import load_target
from eyas.types import Request, SamplingParams

from ...pairs import save_drafter, save_target, tokenizer


def test_all_are_the_drafters_and_whatever_needs_none() -> None:
    chosen = all_choices({"mine": "m", "eagle3": "e"})
    assert chosen[:2] == [MethodChoice("mine", "m"), MethodChoice("eagle3", "e")]
    assert {choice.name for choice in chosen[2:]} >= set(WEIGHTLESS)
    assert {"mine+suffix", "eagle3+suffix", "mtp"} <= {choice.name for choice in chosen}
    for choice in chosen:
        if choice.method is not None:
            read_method(choice.method)  # every one is a method, with no stray file among them


def test_a_kind_is_without_a_drafter_unless_one_is_named_so_or_is_one(tmp_path: Path) -> None:
    target = load_target(save_target(tmp_path / "model"))
    opener = MethodOpener(Session(target, tokenizer(), tmp_path / "model"))
    opened, _ = opener.open([MethodChoice("pick", str(save_drafter(tmp_path / "pick")))])
    assert opened[0].kind == "eagle3"
    assert without_drafter(opened) == [kind for kind in (*KINDS, "draft_model") if kind != "eagle3"]


def test_a_name_is_a_drafters_a_kind_or_two_of_them() -> None:
    one = {"mine": "m"}
    assert named_choices(["mine", "ngram", "mine"], one) == [
        MethodChoice("mine", "m"),
        MethodChoice("ngram", None, "ngram"),
    ]
    assert named_choices(["eagle3+suffix"], one) == [MethodChoice("eagle3+suffix", "m", "eagle3+suffix")]
    two = {"eagle3": "e", "mla": "l"}
    assert named_choices(["mla+suffix", "mla"], two) == [
        MethodChoice("mla+suffix", "l", "+suffix"),
        MethodChoice("mla", "l"),
    ]
    assert named_choices(["eagle1"], one) == [MethodChoice("eagle1", "m", "eagle1")]  # refused by kind when opened
    for name, drafters in (("eagle3", {}), ("eagle1", two), ("eagle1+ngram", two)):
        with pytest.raises(UsageError, match=r"needs one drafter: give `draft_model=eagle[13]=PATH"):
            named_choices([name], drafters)
    assert named_choices(["mine+suffix"], one) == [MethodChoice("mine+suffix", "m", "+suffix")]
    with pytest.raises(UsageError, match=r"magic is no kind of draft model; write one of .*eagle3"):
        named_choices(["magic+suffix"], one)


def test_eagle2_is_eagle1s_drafter_in_another_tree() -> None:
    chosen, skipped = preset_choices("seeds", {"eagle1": "e1"})
    by_name = {choice.name: choice for choice in chosen}
    assert by_name["eagle1"].source == by_name["eagle2"].source == "e1"
    assert by_name["eagle1"].tree != by_name["eagle2"].tree
    assert {"eagle3", "speculative"} <= {each.name for each in skipped}


def test_trees_of_one_and_of_all() -> None:
    chosen = [MethodChoice("a"), MethodChoice("b", tree="chain:4")]
    assert [each.tree for each in with_trees(chosen, {"a": "chain:1"})] == ["chain:1", "chain:4"]
    assert [each.tree for each in with_trees(chosen, {"a": "chain:1", None: "chain:2"})] == ["chain:1", "chain:2"]
    with pytest.raises(UsageError, match="no method of that name"):
        with_trees(chosen, {"c": "chain:1"})


def test_opening_says_why_not_and_what_training_took(tmp_path: Path) -> None:
    target = load_target(save_target(tmp_path / "model"))
    good = save_drafter(tmp_path / "good")
    config = json.loads((good / "config.json").read_text())
    made = Path(shutil.copytree(good, tmp_path / "made"))
    config["eyas"] = {"steps": 30, "seconds": 90.0, "rows": 7, "loss": {"token": "ce"}}
    (made / "config.json").write_text(json.dumps(config))
    opener = MethodOpener(Session(target, tokenizer(), "tiny"))
    choices = [
        MethodChoice("good", str(good)),
        MethodChoice("made", str(made)),
        MethodChoice("again", str(made), tree="chain:3"),
        MethodChoice("wrong", str(made), "eagle1"),
        MethodChoice("wide", str(made), tree="dynamic:2,200,300"),
        MethodChoice("gone", str(tmp_path / "gone")),
    ]
    opened, skipped = opener.open(choices)
    assert [one.choice.name for one in opened] == ["good", "made", "again"]
    assert [one.training for one in opened][:2] == [None, {"steps": 30, "seconds": 90.0, "rows": 7}]
    assert opened[1].drafter.network is opened[2].drafter.network  # type: ignore[attr-defined]
    assert opened[0].weights == pytest.approx(opened[1].weights, rel=0.1)
    request = Request(tuple(tokenizer()("clips in May").input_ids), SamplingParams(max_tokens=8))
    for one in opened[:2]:
        one.engine.generate([request])
    for one in opened[:2]:
        one.measure_memory(target)
        cache = one.engine.speculation.drafter.pairs.cache  # type: ignore[union-attr,attr-defined]
        assert cache.nbytes() <= one.cache < cache.nbytes() + 100_000
        assert cache.nbytes() > 0
    assert [each.name for each in skipped] == ["wrong", "wide", "gone"]
    assert "of the kind eagle3, not eagle1" in skipped[0].reason
    assert "200 children" in skipped[1].reason
    assert all("\n" not in each.reason for each in skipped)


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_tensors_count_with_their_storage_and_once() -> None:
    one = torch.zeros(1000)
    held = reachable_bytes(Holder(whole=one, part=one[:10], again=[one]))
    assert 4000 <= held < 8000
    assert reachable_bytes(Holder(far=Holder(tensor=one)), beyond=one) < 2000
    assert reachable_bytes(Holder(network=nn.Linear(100, 100))) >= 4 * 10100


def test_what_another_holds_too_is_its_own() -> None:
    lent = torch.zeros(10000)
    table = {(n, n + 1): n for n in range(1000, 2000)}
    owner = Holder(embedding=lent, table=table)
    assert 50_000 < reachable_bytes(owner, Holder(weights=[lent])) < reachable_bytes(owner) - 39_000
    assert reachable_bytes(owner, [lent, table]) < 2000


def test_the_program_is_nobodys() -> None:
    assert reachable_bytes(Holder(code=reachable_bytes, room=torch, kind=Holder, method=Holder.__init__)) < 2000


def test_a_circle_ends() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert reachable_bytes(circle) > 0
