"""A small language model in a GGUF file drafts, alone and with copies, and changes no token."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import eyas
from eyas.drafters.hybrid import HybridDrafter
from eyas.drafters.options import DrafterOptions
from eyas.drafters.small_lm.drafter import SmallLmDrafter, load_small_lm
from eyas.engine.default_tree import default_tree
from eyas.errors import UsageError
from eyas.options import TargetOptions
from eyas.session import Session
from eyas.targets import load_target
from eyas.targets.native.library import kernels
from eyas.targets.native.packed import WeightFormat
from eyas.targets.native.packed_linears import PackedLinear
from eyas.targets.parameters import weight_formats

from ... import gguf_models, tiny

pytestmark = pytest.mark.usefixtures("own_cache")
PARAMS = [eyas.SamplingParams(max_tokens=24, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.9)]
PROMPTS = tiny.prompts(6, 3, 11)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.Q4_0.gguf"
    gguf_models.write_llama(path, "Q4_0", num_hidden_layers=2)
    return path


def answers(engine: eyas.Engine) -> list[list[int]]:
    requests = [eyas.Request(tuple(prompt) * 3, params) for params in PARAMS for prompt in PROMPTS]
    return [done.token_ids for done in engine.generate(requests)]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_it_drafts_and_changes_no_token(gguf_file: Path, small: Path, dtype: str) -> None:
    plain = answers(eyas.load(gguf_file, dtype=dtype))
    for method, tree in ((None, "chain:3"), ("+suffix", "chain:3"), ("draft_model+ngram", "dynamic:3,2,6")):
        engine = eyas.load(gguf_file, small, method=method, tree=tree, dtype=dtype, batch_size=4)
        assert engine.speculation is not None
        expected = SmallLmDrafter if method is None else HybridDrafter
        assert isinstance(engine.speculation.drafter, expected)
        for _ in range(2):  # the second time with prefixes from the cache
            assert answers(engine) == plain
        engine.check_invariants()


@pytest.mark.skipif(kernels() is None, reason="there are no native kernels here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_its_weights_stay_packed_whatever_the_target_is_computed_in(gguf_file: Path, small: Path, dtype: str) -> None:
    engine = eyas.load(gguf_file, small, dtype=dtype)
    assert engine.speculation is not None
    drafter = engine.speculation.drafter
    assert isinstance(drafter, SmallLmDrafter)
    assert drafter.model.native is not None
    assert weight_formats(drafter.model.model) == weight_formats(load_target(small, dtype="auto").model) is not None


@pytest.mark.skipif(kernels() is None, reason="there are no native kernels here")
def test_its_linears_are_read_in_4_bits_and_its_embedding_as_it_is(gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.Q8_0.gguf"
    gguf_models.write_llama(path, "Q8_0", num_hidden_layers=2)
    target = load_target(gguf_file, dtype="auto")
    whole, drafting = load_target(path, dtype="auto").model, load_small_lm(path, target).model.model
    kept = load_small_lm(path, target, quantize="off").model.model

    def kinds(model: nn.Module) -> set[int]:
        return {part.kind for part in model.modules() if isinstance(part, PackedLinear)}

    assert kinds(whole) == kinds(kept) == {WeightFormat.SIGNED8}
    assert kinds(drafting) == {WeightFormat.SIGNED4}
    tokens = torch.arange(9)
    assert torch.equal(drafting.get_input_embeddings()(tokens), whole.get_input_embeddings()(tokens))
    plain = answers(eyas.load(gguf_file, dtype="auto"))
    assert answers(eyas.load(gguf_file, path, tree="chain:3", dtype="auto")) == plain


def test_its_trees_are_sized_by_default(gguf_file: Path, small: Path) -> None:
    session = Session.open(TargetOptions(gguf_file))
    for method in (None, "+suffix"):
        assert default_tree(session.drafter(DrafterOptions(small, method)), torch.device("cuda")) == "auto"


def test_the_target_that_drafts_for_itself_is_always_right(gguf_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "eyas"):
        engine = eyas.load(
            gguf_file, gguf_file.parent, method="draft_model", tree="chain:3", dtype="auto", draft_quantize="off"
        )
    (said,) = [record.getMessage() for record in caplog.records if "parameters" in record.getMessage()]
    count = sum(
        weight.numel() for weight in tiny.build_model("llama", hidden_size=64, intermediate_size=128).parameters()
    )
    assert f"has {count} parameters, the target {count}" in said
    done = engine.generate([eyas.Request(tuple(PROMPTS[0]), PARAMS[0])])[0]
    assert done.stats.accept_length > 3


def test_a_drafter_s_file_is_still_told_from_a_language_model_s(gguf_file: Path) -> None:
    with pytest.raises(UsageError, match=r"is of the kind|is no language model"):
        eyas.load(gguf_file, "smollm2", method="draft_model")
