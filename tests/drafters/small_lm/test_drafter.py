"""A small language model as drafter: it changes no token, drafts what it would say, and keeps its slots in step."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from eyas.drafters.small_lm.drafter import SharedVocabulary, SmallLmDrafter
from eyas.engine import Engine, Speculation
from eyas.engine.controller import make_controller
from eyas.targets import Target
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.decoder import NativeDecoder
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.tree import DraftTree, parse_tree
from eyas.types import NO_OWNER, Completion, Limits, Request, SamplingParams
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


@pytest.mark.every(2)
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


@pytest.mark.every(2)
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


SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


def native_model() -> Target:
    """A model whose passes are native, with the weights of `Target(tiny.build_model("qwen3", **SIZES))`."""
    model = tiny.build_model("qwen3", **SIZES)
    prepack_linears(model, NativeLinear, torch.float32)
    made = Target(model, decoder=transformers_decoder(model))
    assert made.native is not None
    return made


def some_tokens() -> SharedVocabulary:
    """A vocabulary that shares half of the target's tokens, under other ids."""
    made = SharedVocabulary.__new__(SharedVocabulary)
    made.target_ids = torch.arange(0, tiny.VOCAB, 2)
    made.draft_ids = made.target_ids.flip(0)
    made.own_ids = torch.zeros(tiny.VOCAB, dtype=torch.int64).index_copy_(0, made.target_ids, made.draft_ids)
    made.read = lambda token: (int(made.own_ids[token]), 7)[: 1 + token % 2]  # type: ignore[method-assign]
    return made


def observe(drafter: SmallLmDrafter, slot: int, tokens: list[int]) -> None:
    none = torch.zeros(1, len(tokens), 0, 1)
    drafter.observe(range(slot, slot + 1), torch.tensor([tokens]), none, [len(tokens)])


def begun(model: Target, shared: SharedVocabulary | None = None) -> SmallLmDrafter:
    drafter = SmallLmDrafter(model, shared)
    drafter.pairs.resize(3)
    for slot, prompt in enumerate(tiny.prompts(3, 20, 80)):
        drafter.pairs.begin(slot, prompt, NO_OWNER)
        observe(drafter, slot, list(prompt[1:]))
    return drafter


def draft(drafter: SmallLmDrafter, tree: str, rows: range = range(3), temperature: float = 0.0) -> DraftTree:
    sampler = Sampler(3, tiny.VOCAB, torch.device("cpu"))
    for slot in range(3):
        params = SamplingParams(temperature=temperature, seed=slot)
        sampler.admit(slot, params, (1,), (), (), None)
    return drafter.draft(rows, parse_tree(tree), sampler.coupling(rows, True))


@pytest.mark.every(3)
@pytest.mark.skipif(kernels() is None, reason="no native kernels here")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("vocabulary", ["same", "other"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_native_levels_draft_what_the_modules_draft(
    tree: str, vocabulary: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    search = NativeDecoder.search
    monkeypatch.setattr(NativeDecoder, "search", lambda *given: calls.append(1) or search(*given))
    found = []
    for model in (Target(tiny.build_model("qwen3", **SIZES)), native_model()):
        drafter = begun(model, None if vocabulary == "same" else some_tokens())
        found.append((draft(drafter, tree, temperature=temperature), drafter.pairs.guesses))
    (one, its), (other, theirs) = found
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.parents, other.parents)
    torch.testing.assert_close(one.logprob, other.logprob)
    assert its == theirs
    assert bool(calls) == (not tree.startswith("static"))


@pytest.mark.parametrize("tree", ["chain:4", "dynamic:3,2,10"])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.skipif(kernels() is None, reason="-"))])
@pytest.mark.parametrize("vocabulary", ["same", "other"])
def test_right_guesses_are_not_read_again(tree: str, native: bool, vocabulary: str) -> None:
    """And the next draft is that of a model that reads them all."""
    model = native_model() if native else Target(tiny.build_model("qwen3", **SIZES))
    shared = None if vocabulary == "same" else some_tokens()
    drafter = begun(model, shared)
    fresh = begun(model, shared)
    made = draft(drafter, tree)
    before = list(drafter.pairs.cache.lengths)
    whole = list[int]()
    node = int(made.depth[0, 1:].argmax())
    while node >= 0:
        whole.insert(0, int(made.tokens[0, node]))
        node = int(made.parents[0, node])
    first = int(made.tokens[1, 0])
    paths = [[*whole, 8], [first, 95, 8], [95, 8]]  # right to the end, at first, and never
    tokens = torch.tensor([[*path, *[0] * (len(whole) + 1 - len(path))] for path in paths])
    counts = [len(path) for path in paths]
    none = torch.zeros(3, len(whole) + 1, 0, 1)
    drafter.observe(range(3), tokens, none, counts)
    for slot, path in enumerate(paths):
        observe(fresh, slot, path)
    # the last guess of a path isn't run, as nothing is drafted after it
    found = [length - was for length, was in zip(drafter.pairs.cache.lengths, before, strict=True)]
    assert found == [len(whole) - 1, 1, 0]
    assert drafter.pairs.guesses is None
    one = draft(drafter, tree)
    other = draft(fresh, tree)
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.logprob, other.logprob)


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first token, a part in each step; until then nothing is drafted, and no row waits for more."""
    model = small()
    read = list[int]()
    prefill = model.prefill_chunk
    monkeypatch.setattr(
        model,
        "prefill_chunk",
        lambda cache, rows, tokens, taps: read.append(max(map(len, tokens)) - 1) or prefill(cache, rows, tokens, taps),
    )
    speculation = Speculation(SmallLmDrafter(model), parse_tree("chain:4"))
    limits = Limits(max_running=2, prefill_chunk=70)
    engine = Engine(tiny.target(), None, speculation, limits=limits)
    asked = [
        Request(tuple(prompt), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        for prompt in tiny.prompts(5, 200)
    ]
    expected = [one.token_ids for one in Engine(tiny.target(), batch_size=2).generate(asked)]
    done = engine.generate(asked)
    assert tokens_of(done) == expected
    assert max(read) <= 70
    assert done[1].stats.accepted_histogram[0] >= 2


def test_the_controller_plans_its_drafts() -> None:
    target = tiny.target()
    drafter = SmallLmDrafter(small())
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
