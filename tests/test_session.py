"""From options to targets, drafters and engines; `load`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from eyas.drafters.checkpoint import save_network
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine, Speculation
from eyas.engine.default_tree import default_tree, tree_for
from eyas.errors import CheckpointError, UsageError
from eyas.options import EngineOptions, TargetOptions
from eyas.session import Session, load
from eyas.targets import load_target
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.tree import parse_tree
from eyas.tree.dynamic import DynamicTree
from eyas.tree.static import StaticTree
from eyas.types import Request, SamplingParams
from eyas.verify import SeededWalk, TypicalWalk, WalkRule

from . import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.build_model("llama").save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(path)
    return path


def drafter(path: Path, **settings: Any) -> Path:
    save_network(tiny.eagle3_module(**settings), path)
    return path


def answer(engine: Engine) -> list[int]:
    request = Request(tuple(tiny.prompts(9)[0]), SamplingParams(max_tokens=10, ignore_eos=True))
    return engine.generate([request])[0].token_ids


def test_a_pair_of_directories_makes_a_lossless_engine(model: Path, tmp_path: Path) -> None:
    plain = load(model, device="cpu")
    pair = load(model, drafter(tmp_path), device="cpu", batch_size=2, tree="chain:3")
    assert answer(plain) == answer(pair) == tiny.continuation(tiny.build_model("llama"), tiny.prompts(9)[0], 10)
    assert (plain.speculation, plain.batch_size, pair.batch_size) == (None, 1, 2)
    assert pair.eos_ids == ()
    assert pair.tokenizer.decode([5, 6]) == "w5 w6"


def test_the_tree_is_the_caller_s_then_the_drafter_s_then_the_default(model: Path, tmp_path: Path) -> None:
    named = drafter(tmp_path / "a", default_tree="chain:2")
    silent = drafter(tmp_path / "b")
    asked = load(model, named, device="cpu", tree=parse_tree("static:slim"), coupled=False, rule=TypicalWalk())
    assert asked.speculation is not None
    assert isinstance(asked.speculation.tree, StaticTree)
    assert len(asked.speculation.tree.nodes) == 15
    assert not asked.speculation.coupled
    assert not asked.rule.lossless
    own = load(model, named, device="cpu").speculation
    assert own is not None
    assert (own.tree.depth, own.tree.max_fanout, own.coupled) == (2, 1, True)
    assert load(model, silent, device="cpu").controller is not None


@pytest.mark.parametrize(
    ("method", "fixed"),
    [
        ("ngram", "chain:10"),
        ("suffix", "dynamic:32,8,32"),
        ("lookahead", "lookahead:15,5,15"),
        (None, "dynamic:5,6,24"),
    ],
)
def test_a_cpu_s_trees_are_sized_by_measured_costs(model: Path, tmp_path: Path, method: str | None, fixed: str) -> None:
    """There a fixed one may be slower than none; on an accelerator it is nearly free to verify."""
    made = Session.open(TargetOptions(model, device="cpu")).drafter(
        DrafterOptions(None if method else drafter(tmp_path), method)
    )
    assert [default_tree(made, torch.device(name)) for name in ("cpu", "cuda")] == ["auto", fixed]


def test_costs_are_for_auto_only(model: Path, tmp_path: Path) -> None:
    named, costs = drafter(tmp_path / "a", default_tree="chain:2"), tmp_path / "costs.json"
    with pytest.raises(UsageError, match="`costs=` are measured for `tree=auto`, but here the tree is chain:2"):
        load(model, named, device="cpu", costs=costs)
    load(model, drafter(tmp_path / "b"), device="cpu", costs=costs)
    assert costs.exists()


def test_a_drafters_own_tree_may_be_auto(model: Path, tmp_path: Path) -> None:
    """Then a controller sizes the trees, down to none; who asks for a shape gets it."""
    unsure = drafter(tmp_path, default_tree="auto")
    engine = load(model, unsure, device="cpu")
    assert engine.controller is not None
    assert engine.speculation is not None
    assert engine.speculation.tree is None
    assert answer(engine) == answer(load(model, device="cpu"))
    fixed = load(model, unsure, device="cpu", tree="chain:3")
    assert fixed.controller is None
    assert isinstance(tree_for(fixed.speculation.drafter, None), DynamicTree)  # type: ignore[union-attr]


@pytest.mark.parametrize(("rule", "experienced"), [(None, True), (SeededWalk(), True), (TypicalWalk(), False)])
def test_what_is_accepted_by_another_rule_is_no_experience(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: WalkRule | None, experienced: bool
) -> None:
    asked = list[bool]()

    def controller(*_: Any, experienced: bool) -> Any:
        asked.append(experienced)
        return SimpleNamespace()

    monkeypatch.setattr("eyas.session.make_controller", controller)
    load(model, drafter(tmp_path), device="cpu", tree="auto", rule=rule)
    assert asked == [experienced]


def test_a_tree_needs_a_drafter_large_enough(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a tree needs a drafter"):
        load(model, tree="chain:3")
    with pytest.raises(UsageError, match="asks for 8 children, the drafter can offer 5"):
        load(model, drafter(tmp_path, draft_vocab_size=5), device="cpu", tree="dynamic:3,8,20")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")  # torch's own compiler uses it
def test_a_compiled_target_emits_the_same(tmp_path: Path) -> None:
    model = tiny.build_model("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, device="cpu", compiled=True)
    speculation = Speculation(tiny.eagle3_drafter((0, 1)), parse_tree("chain:2"))
    expected = tiny.continuation(model, tiny.prompts(9)[0], 10)
    assert answer(Engine(target, None, speculation)) == expected


@pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
@pytest.mark.parametrize(("modules", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_target_is_measured_as_it_is_served(
    modules: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` may be bfloat16 in native passes on a CPU whose modules would be slow in it, and are run in float32."""
    tiny.build_model("llama", head_dim=16).to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr("eyas.targets.loading.best_layout", lambda *_: NativeLinear)
    monkeypatch.setattr("eyas.targets.loading.cpu_computes_in", lambda wanted: wanted == torch.float32)
    session = Session.open(TargetOptions(tmp_path, device="cpu"), modules=modules)
    assert session.target.dtype == dtype


def test_what_is_wrong_with_a_drafter_is_said_before_the_target_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.session.load_target", None)
    with pytest.raises(CheckpointError, match="holds no such file"):
        load(model, drafter(tmp_path), draft_weights="none.bin")


def test_a_session_makes_many_engines_on_one_target(model: Path, tmp_path: Path) -> None:
    session = Session.open(TargetOptions(model, device="cpu"))
    opened = session.drafter(DrafterOptions(drafter(tmp_path, default_tree="auto")))
    fixed = session.fixed_engine(opened, EngineOptions(batch_size=2))
    assert fixed.controller is None
    assert fixed.speculation is not None
    assert isinstance(fixed.speculation.tree, DynamicTree)
    assert answer(fixed) == answer(session.engine())
    assert fixed.target is session.engine().target


def test_a_tree_that_a_drafter_brings_is_bounded(model: Path, tmp_path: Path) -> None:
    """Its mask would take gigabytes."""
    with pytest.raises(UsageError, match="length must be at most 1024, got 100000"):
        load(model, drafter(tmp_path, default_tree="chain:100000"), device="cpu")
