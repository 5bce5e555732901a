"""A small language model as drafter: it changes no token, drafts what it would say, and keeps its slots in step."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from eyas.drafters.small_lm.drafter import SmallLmDrafter
from eyas.engine import Engine, Speculation
from eyas.engine.controller import make_controller
from eyas.targets import Target
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.library import kernels
from eyas.tree import parse_tree
from eyas.types import NOBODY, Completion, Limits, Request, SamplingParams
from eyas.verify import Sampler

from ... import tiny

TREES = ["chain:4", "dynamic:4,3,8", "shared:4,3,9", "static:slim"]


@cache
def small(name: str = "llama") -> Target:
    """A model of two layers that agrees with the target now and then: its first two layers."""
    shallow = tiny.build_model(name, num_hidden_layers=2)
    whole = tiny.build_model(name)
    shallow.load_state_dict({k: v for k, v in whole.state_dict().items() if k in shallow.state_dict()})
    return Target(shallow)


def requests(temperature: float = 0.0, tokens: int = 20) -> list[Request]:
    return [
        Request(tuple(prompt), SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(3, 1, 14, 90, 5, 7))
    ]


@cache
def plain(name: str, temperature: float) -> list[list[int]]:
    return [done.token_ids for done in Engine(tiny.target(name), batch_size=8).generate(requests(temperature))]


def tokens_of(done: list[Completion]) -> list[list[int]]:
    return [one.token_ids for one in done]


@pytest.mark.parametrize(
    ("temperature", "tree", "batch"),
    [
        (0.0, "chain:4", 1),
        (0.0, "dynamic:4,3,8", 4),
        (0.7, "shared:4,3,9", 4),
        (1.0, "chain:4", 4),
        (1.0, "static:slim", 4),
    ],
)
def test_output_is_that_of_plain_decoding(temperature: float, tree: str, batch: int) -> None:
    speculation = Speculation(SmallLmDrafter(small()), parse_tree(tree))
    limits = Limits(max_running=batch, prefix_tokens=512)
    engine = Engine(tiny.target(), None, speculation, limits=limits)
    for _ in range(2):  # the second time with prefixes from the cache
        done = engine.generate(requests(temperature))
        assert tokens_of(done) == plain("llama", temperature)
        engine.check_invariants()
    assert sum(one.stats.walked for one in done) > 0


@pytest.mark.parametrize(
    ("name", "batch"), [("llama", 1), ("gemma3", 3), ("gpt2", 3), ("mistral", 3), ("deepseek3", 3), ("gptoss", 3)]
)
def test_a_model_that_drafts_for_itself_is_always_right(name: str, batch: int) -> None:
    """Chains are its greedy continuations, with windows, learned positions, latent keys, and cached prefixes."""
    drafter = SmallLmDrafter(Target(tiny.target(name).model))
    limits = Limits(max_running=batch, prefix_tokens=512)
    engine = Engine(tiny.target(name), None, Speculation(drafter, parse_tree("chain:4")), limits=limits)
    for _ in range(2):
        done = engine.generate(requests())
        assert tokens_of(done) == plain(name, 0.0)
        assert all(sum(one.stats.accepted_histogram[:-1]) <= 1 for one in done)  # but for a last round cut short


@pytest.mark.skipif(kernels() is None, reason="no native kernels here")
@pytest.mark.parametrize("tree", TREES)
def test_native_levels_draft_what_the_modules_draft(tree: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    native = Target(tiny.build_model(**{"name": "qwen3", **sizes}))
    from eyas.targets.linears import prepack_linears
    from eyas.targets.native.linears import NativeLinear

    model = tiny.build_model(**{"name": "qwen3", **sizes})
    prepack_linears(model, NativeLinear, torch.float32)
    made = Target(model, native=transformers_decoder(model))
    assert made.native is not None
    found = []
    for each in (native, made):
        drafter = SmallLmDrafter(each)
        drafter.pairs.resize(3)
        for slot, prompt in enumerate(tiny.prompts(3, 20, 80)):
            drafter.pairs.begin(slot, prompt, NOBODY)
            drafter.observe(
                range(slot, slot + 1), torch.tensor([prompt[1:]]), torch.zeros(1, len(prompt) - 1, 0, 1),
                [len(prompt) - 1],
            )  # fmt: skip
        sampler = Sampler(3, tiny.VOCAB, torch.device("cpu"))
        found.append(drafter.draft(range(3), parse_tree(tree), sampler.coupling(range(3), True)))
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert torch.equal(found[0].parents, found[1].parents)


def test_the_controller_plans_its_drafts() -> None:
    target, drafter = tiny.target(), SmallLmDrafter(small())
    controller = make_controller(target, drafter, "auto", 4)
    engine = Engine(target, None, Speculation(drafter, None), batch_size=4, controller=controller)
    for temperature in (0.0, 1.0):
        assert tokens_of(engine.generate(requests(temperature))) == plain("llama", temperature)
        engine.check_invariants()


def test_beyond_its_context_it_drafts_nothing() -> None:
    short = Target(tiny.build_model("gpt2", num_hidden_layers=2, n_positions=32, max_position_embeddings=32))
    engine = Engine(tiny.target(), None, Speculation(SmallLmDrafter(short), parse_tree("chain:4")), batch_size=2)
    done = engine.generate(requests(tokens=40))
    assert tokens_of(done) == [
        one.token_ids for one in Engine(tiny.target(), batch_size=8).generate(requests(tokens=40))
    ]
    assert done[3].stats.drafted_depth == 0  # 90 tokens from the start
    assert 0 < done[0].stats.drafted_depth < 4 * done[0].stats.target_passes
