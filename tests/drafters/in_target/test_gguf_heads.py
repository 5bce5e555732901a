"""MTP heads in GGUF files draft what the same weights in safetensors do; files that are wrong are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.formats.gguf_heads import companion_of
from eyas.drafters.loading import make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine, Speculation
from eyas.errors import EyasError, UsageError
from eyas.gguf import Gguf
from eyas.hub import find_target
from eyas.targets import Target, load_target
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams

from ... import gguf_architectures as gguf
from ... import tiny
from . import checkpoints
from .equality import equal_to_plain

LAYOUTS = {
    "qwen35": "qwen", "qwen35moe": "qwen", "qwen3next": "qwen", "glm4moe": "deepseek", "deepseek2": "deepseek",
    "nemotron_h_moe": "nemotron",
}  # fmt: skip
"""llama.cpp's architecture -> whose names its modules have in safetensors."""
LAYERS = 4
HEADS = {"nextn_predict_layers": 1, "block_count": LAYERS + 1}
MORE = {
    "nemotron_h_moe": {"attention.head_count_kv": [0, 2, 0, 0, 2], "feed_forward_length": [0, 0, 32, 32, 32]},
    "qwen35": {"attention.recurrent_layers": [True, False, True, False, False], "full_attention_interval": None},
}
"""Lists with an entry for each layer, that of the head included."""


class Twins:
    """A target with an MTP head, as a GGUF file and as a folder of safetensors."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.case = gguf.Case(architecture, "plain", keys=HEADS | MORE.get(architecture, {}))
        self.file = folder / "twin.gguf"
        self.folder = folder / "twin"
        self.model = gguf.build(self.case)
        held = checkpoints.module_tensors(self.model, LAYOUTS[architecture])
        self.heads = gguf.head_tensors(architecture, self.model.config, held)
        gguf.write(self.file, self.case, self.model, heads=self.heads)
        self.model.save_pretrained(self.folder)
        weights = self.folder / "model.safetensors"
        save_file(load_file(weights) | held, weights, metadata={"format": "pt"})

    def write(self, path: Path, **changes: Any) -> Path:
        """Another file with these weights; `changes` as in `gguf.write`."""
        gguf.write(path, self.case, self.model, **{"heads": self.heads, **changes})
        return path


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes each architecture's twins once."""
    return cache(lambda name: Twins(tmp_path_factory.mktemp(name), name))


def loaded(path: Path, source: Path | None = None) -> tuple[Target, NetworkDrafter]:
    """A target and the drafter with its heads, or with those at `source`."""
    target = load_target(path, dtype="float32")
    drafter = make_drafter(DrafterOptions(source, method="mtp", quantize="off"), target, model=path)
    assert isinstance(drafter, NetworkDrafter)
    return target, drafter


def drafts(target: Target, drafter: NetworkDrafter, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The answer to a prompt, and all trees that were drafted for it."""
    seen: list[Any] = []
    engine = Engine(target, None, Speculation(drafter, parse_tree("dynamic:4,2,6")), batch_size=1)
    assert engine.speculation is not None
    inner = engine.speculation.drafter
    draft = inner.draft

    def recorded(*args: Any, **options: Any) -> Any:
        tree = draft(*args, **options)
        seen.append((tree.tokens.tolist(), tree.parents.tolist()))
        return tree

    monkeypatch.setattr(inner, "draft", recorded)
    done = engine.generate([Request(tiny.prompts(12)[0], SamplingParams(max_tokens=12, ignore_eos=True))])
    return done[0].token_ids, seen


@pytest.mark.every(2)
@pytest.mark.parametrize("name", tiny.sample([*LAYOUTS]))
def test_logits_and_drafts_are_those_of_the_same_weights_in_safetensors(
    twins: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = twins(name)
    target, drafter = loaded(made.file)
    other, twin = loaded(made.folder)
    tokens = torch.arange(40)[None] * 7 % (gguf.VOCAB - 2)
    with torch.inference_mode():
        torch.testing.assert_close(target.model(tokens).logits, other.model(tokens).logits, rtol=1e-5, atol=1e-5)
    ours = drafter.network.state_dict()
    theirs = twin.network.state_dict()
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        torch.testing.assert_close(weight, theirs[key], rtol=1e-6, atol=1e-6)
    assert drafter.network.config == twin.network.config
    assert drafts(target, drafter, monkeypatch) == drafts(other, twin, monkeypatch)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "temperature", "tree"),
    [
        *tiny.sample(["qwen35", "glm4moe", "deepseek2"], [0.0, 1.0], ["chain:3", "dynamic:3,3,7", "shared:3,3,7"]),
        pytest.param("qwen35moe", 0.0, "dynamic:3,3,7", marks=pytest.mark.slow),
        pytest.param("qwen3next", 1.0, "chain:3", marks=pytest.mark.slow),
        pytest.param("nemotron_h_moe", 1.0, "dynamic:3,3,7", marks=pytest.mark.slow),
    ],
)
def test_output_is_that_of_plain_decoding(twins: Any, name: str, temperature: float, tree: str) -> None:
    equal_to_plain(*loaded(twins(name).file), temperature, tree)


@pytest.mark.every(2)
@pytest.mark.parametrize("beside", [True, False])
def test_a_companion_drafts_as_the_head_in_the_file_does(
    twins: Any, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in the same folder, or named; the target's file says that there is a head, and has none."""
    made = twins("glm4moe")
    trunk = made.write(tmp_path / "tiny-Q8_0.gguf", heads={})
    companion = made.write(tmp_path / ("" if beside else "elsewhere") / "mtp-tiny-Q8_0.gguf", companion=True)
    expected = drafts(*loaded(made.file), monkeypatch)
    assert drafts(*loaded(trunk, None if beside else companion), monkeypatch) == expected
    assert find_target(tmp_path).source == find_target(trunk).source  # the folder's only model
    with pytest.raises(UsageError, match="drafter's GGUF file, not a target"):
        find_target(companion)


def test_the_best_companion_is_that_of_the_same_name_and_quantization(twins: Any, tmp_path: Path) -> None:
    made = twins("qwen35")
    trunk = made.write(tmp_path / "sub" / "tiny-Q4_K_M.gguf", heads={})
    for name in ("mtp-tiny-Q8_0", "mtp-tiny-Q5_K_M", "sub/mtp-other-Q4_K_M"):
        made.write(tmp_path / f"{name}.gguf", companion=True)
    assert companion_of(Gguf(trunk)) == tmp_path / "mtp-tiny-Q5_K_M.gguf"
    made.write(tmp_path / "mtp-tiny-Q4_K_M.gguf", companion=True)
    assert companion_of(Gguf(trunk)) == tmp_path / "mtp-tiny-Q4_K_M.gguf"
    twins("qwen35moe").write(trunk.with_name("mtp-tiny-Q4_K_M.gguf"), companion=True)  # another architecture
    assert companion_of(Gguf(trunk)) == tmp_path / "mtp-tiny-Q4_K_M.gguf"


def test_an_embedding_head_or_norm_of_its_own_is_used_and_missing_ones_are_the_target_s(
    twins: Any, tmp_path: Path
) -> None:
    made = twins("qwen35")
    own = np.full((gguf.VOCAB, gguf.HIDDEN), 0.5, np.float32)
    target, drafter = loaded(made.file)
    heads = made.heads | {"blk.4.nextn.shared_head_head.weight": own}
    _, other = loaded(made.write(tmp_path / "own.gguf", heads=heads))
    assert (other.network.config.embedding, other.network.config.head) == ("shared", "own")
    assert (drafter.network.config.embedding, drafter.network.config.head) == ("shared", "shared")
    heads = {name: value for name, value in made.heads.items() if not name.endswith("shared_head_norm.weight")}
    _, normed = loaded(made.write(tmp_path / "norm.gguf", heads=heads))
    torch.testing.assert_close(normed.network.norm.weight, target.model.model.norm.weight + 1)


def test_several_heads_are_modules_in_a_row(twins: Any, tmp_path: Path) -> None:
    made = twins("glm4moe")
    both = made.heads | gguf.head_tensors(
        "glm4moe", made.model.config, checkpoints.module_tensors(made.model, "deepseek", 1)
    )
    file = made.write(tmp_path / "two.gguf", heads=both, nextn_predict_layers=2, block_count=LAYERS + 2)
    target, drafter = loaded(file)
    assert len(drafter.network.steps) == 2
    equal_to_plain(target, drafter, 0.0, "chain:4")


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_heads_of_blocks_draft_without_changing_the_output(twins: Any, kind: str, tmp_path: Path) -> None:
    file = twins("glm4moe").write(tmp_path / "blocks.gguf", kind=kind)
    target = load_target(file, dtype="auto")
    drafter = make_drafter(DrafterOptions(method="mtp"), target, model=file)
    assert isinstance(drafter, NetworkDrafter)
    equal_to_plain(target, drafter, 0.0, "chain:3")


def _without(*ends: str) -> Callable[[Twins], dict[str, Any]]:
    return lambda made: {"heads": {key: each for key, each in made.heads.items() if not key.endswith(ends)}}


def _with(name: str, *shape: int) -> Callable[[Twins], dict[str, Any]]:
    return lambda made: {"heads": made.heads | {f"blk.4.{name}": np.ones(shape, np.float32)}}


WRONG: dict[str, tuple[Callable[[Twins], dict[str, Any]], str]] = {
    "no heads": (lambda _: {"heads": {}}, r"holds no blk\.4\.nextn\.eh_proj\.weight"),
    "only other tensors": (_without("eh_proj.weight"), r"blk\.4"),
    "a norm is missing": (_without("enorm.weight"), r"missing: enorm\.weight"),
    "half of the experts": (_without("ffn_up_exps.weight"), r"blk\.4\.ffn_gate_exps\.weight hold"),
    "a layer's tensor is missing": (_without("attn_q.weight"), r"missing: target_block\.layer\.self_attn\.q_proj"),
    "a projection of another width": (_with("nextn.eh_proj.weight", 64, 96), r"eh_proj\.weight is \[64, 96\]"),
    "queries of another shape": (_with("attn_q.weight", 32, 64), r"blk\.4\.attn_q\.weight hold 2048"),
    "transposed queries": (_with("attn_k.weight", 64, 32), r"k_proj\.weight is \[64, 32\]"),
    "an unknown tensor": (_with("attn_sinks.weight", 4), r"blk\.4\.attn_sinks\.weight"),
    "a scale of blocks": (_with("attn_q.scale", 1), r"blk\.4\.attn_q\.scale"),
    "no numbers": (lambda made: {"heads": made.heads | {
        "blk.4.nextn.enorm.weight": np.full((64,), np.nan, np.float32)}}, "NaN"),
    "more heads than layers": (lambda _: {"nextn_predict_layers": 5}, r"nextn_predict_layers is 5.*5 layers in all"),
    "a count that is no number": (lambda _: {"nextn_predict_layers": "one"}, r"nextn_predict_layers is 'one'"),
    "heads that are not counted": (lambda _: {"nextn_predict_layers": None}, r"blk\.4\.nextn"),
    "fewer layers than there are": (lambda _: {"nextn_predict_layers": 2}, r"blk\.3"),
    "more layers than there are": (lambda _: {"block_count": 6}, r"no place for: \['blk\.4\.nextn"),
}  # fmt: skip
"""What is wrong -> changes of a file, and what the message names."""


@pytest.mark.every(3)
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_refused_by_name(twins: Any, what: str, tmp_path: Path) -> None:
    made = twins("glm4moe")
    change, named = WRONG[what]
    file = made.write(tmp_path / "wrong.gguf", **change(made))
    with pytest.raises(EyasError, match=named):
        loaded(file)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "type": ("qwen35", {}),
    "layers": ("glm4moe", {"block_count": 6}),
    "RoPE": ("glm4moe", {"rope__freq_base": 50000.0}),
    "width": ("glm4moe", {"embedding_length": 128}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_companion_of_another_model_is_refused_by_name(twins: Any, what: str, tmp_path: Path) -> None:
    name, keys = OTHERS[what]
    made = twins(name)
    heads = {key.replace("blk.4.", "blk.5.") if what == "layers" else key: each for key, each in made.heads.items()}
    companion = made.write(tmp_path / "mtp-other.gguf", companion=True, heads=heads, **keys)
    with pytest.raises(EyasError, match=rf"mtp-other\.gguf are of another model.*{what} "):
        loaded(twins("glm4moe").folder, companion)


@pytest.mark.slow
def test_a_companion_drafts_for_the_folder_of_safetensors_as_well(
    twins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = twins("qwen35")
    companion = made.write(tmp_path / "mtp-tiny.gguf", companion=True)
    assert drafts(*loaded(made.folder, companion), monkeypatch) == drafts(*loaded(made.file), monkeypatch)
