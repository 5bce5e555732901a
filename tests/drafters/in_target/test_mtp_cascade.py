"""Several MTP modules: each guess as one pass over the whole text makes it, and output that they don't change."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.in_target.mtp import CascadeProposer, find_modules
from eyas.drafters.loading import make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine, Speculation
from eyas.errors import UsageError
from eyas.targets import Target, load_target
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams

from ... import tiny
from ..cacheless import causal
from . import checkpoints
from .equality import equal_to_plain

CASES = {"deepseek": ("deepseek3", "deepseek"), "glm": ("glm4moe", "deepseek"), "mimo": ("qwen2", "mimo")}
MODULES = 3


class Case:
    """A checkpoint with several modules, loaded."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, (self.architecture, layout) = path, CASES[name]
        self.tensors = checkpoints.save(path, self.architecture, layout, MODULES)
        self.target: Target = load_target(path, dtype="float32")
        drafter = make_drafter(DrafterOptions(method="mtp", quantize="off"), self.target, model=path)
        assert isinstance(drafter, NetworkDrafter)
        assert isinstance(drafter.proposer, CascadeProposer)
        self.drafter = drafter


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes each case once."""
    return cache(lambda name: Case(tmp_path_factory.mktemp(name), name))


def from_scratch(made: Case, tokens: list[int], states: Tensor, path: list[int]) -> Tensor:
    """The logits [V] of what follows `path`, below the last of `tokens`, by modules that each see the whole text.

    states [n - 1, H] are the target's. Module k begins at token k + 1; the guess at depth d comes from module d.
    """
    modules = made.drafter.network.in_order
    known = len(tokens)
    text = torch.tensor([*tokens, *path])
    outputs = {at: states[at] for at in range(known - 1)}  # of the target after each token
    for depth in range(len(path) + 1):
        module = modules[min(depth, len(modules) - 1)]
        last = known - 1 + depth
        if depth < len(modules):
            reads = {at: outputs[at - 1] for at in range(depth + 1, last + 1)}
        else:  # its own output goes on
            reads[last] = outputs[last - 1]
        at = torch.tensor(sorted(reads))
        fed, normed = module.step(text[at][None], torch.stack([reads[int(i)] for i in at])[None], at[None] - 1, causal)
        outputs = dict(zip(at.tolist(), fed[0], strict=True))
    return module.logits(normed[0, -1])


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_each_guess_is_that_of_a_pass_over_the_whole_text(
    case: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first draft, after a prompt, and in later ones, which go on from the cache; in trees too."""
    made = case(name)
    prompt = tiny.prompts(12)[0]
    seen: list[tuple[list[int], Any]] = []
    engine = Engine(made.target, None, Speculation(made.drafter, parse_tree("dynamic:5,2,9")), batch_size=1)
    assert engine.speculation is not None
    drafter = engine.speculation.drafter
    draft = drafter.draft

    def recorded(*args: Any, **options: Any) -> Any:
        tree = draft(*args, **options)
        seen.append((tree.tokens[0].tolist(), tree.parents[0].tolist()))
        return tree

    monkeypatch.setattr(drafter, "draft", recorded)
    done = engine.generate([Request(prompt, SamplingParams(max_tokens=12))])[0]
    text = [*prompt, *done.token_ids]
    position = len(prompt) + 1
    with torch.inference_mode():
        states = made.target.trace(torch.tensor([text]), torch.tensor([len(text)]), ()).final[0]
        for tokens, parents in seen[:4]:
            for node in range(len(tokens)):
                path = []
                up = parents[node]
                while up >= 0:
                    path = [tokens[up], *path]
                    up = parents[up]
                best = from_scratch(made, text[:position], states, path).topk(2).indices
                assert tokens[node] in best, (node, path)
            at = -1  # on to the next round: the path of the tree that is in the text
            while found := [n for n, up in enumerate(parents) if up == at and tokens[n] == text[position]]:
                at = found[0]
                position += 1
            position += 1
    assert len(seen) >= 4


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_guesses_are_those_of_transformers_modules(case: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(name)
    model = checkpoints.model(made.architecture).from_pretrained(made.path)
    model.config.num_mtp_layers = MODULES
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{tiny.LAYERS + i}\..*" for i in range(MODULES)
    ]  # published sizes have their own
    theirs = MtpModel.from_pretrained(model).eval()
    for module in made.drafter.network.in_order:  # transformers leaves the first embedding, vLLM makes it zeros
        monkeypatch.setattr(module, "config", module.config.model_copy(update={"zero_first": False}))
    tokens = tiny.prompts(9)[0]
    with torch.inference_mode():
        states = made.target.trace(torch.tensor([tokens[:-1]]), torch.tensor([len(tokens) - 1]), ()).final
        drafted, logits, _ = theirs(
            torch.tensor([tokens[1:]]),
            states,
            torch.ones(1, len(tokens) - 1),
            torch.arange(1, len(tokens))[None],
            MtpCache(config=model.config.get_mtp_config()),
        )
        for depth in range(MODULES):
            ours = from_scratch(made, tokens, states[0], drafted[0, :depth].tolist())
            torch.testing.assert_close(ours, logits[0, depth], rtol=1e-4, atol=1e-4)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "temperature", "tree"),
    tiny.sample([*CASES], [0.0, 0.7, 1.0], ["chain:5", "dynamic:5,3,9", "shared:3,3,7"]),
)
def test_output_is_that_of_plain_decoding(case: Any, name: str, temperature: float, tree: str) -> None:
    made = case(name)
    first, second = equal_to_plain(made.target, made.drafter, temperature, tree)
    if not tree.startswith("shared"):  # whose rows share nodes: with whom depends on how long steps take
        assert first == second  # what the modules put out came back with the prefix


def test_modules_are_found_in_order(case: Any) -> None:
    made = case("mimo")
    found = find_modules(made.tensors, tiny.LAYERS)
    assert found is not None
    assert found.prefixes == [f"model.mtp_layers.{i}." for i in range(MODULES)]
    assert made.drafter.fixed_tree == "chain:3"
    assert len({tuple(step.eh_proj.weight.flatten()[:4].tolist()) for step in made.drafter.network.in_order}) == MODULES


def test_windows_are_refused(case: Any) -> None:
    made = case("mimo")
    with pytest.raises(UsageError, match="no attention to earlier pairs"):
        make_drafter(DrafterOptions(method="mtp", window=8), made.target, model=made.path)
