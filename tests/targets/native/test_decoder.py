"""Native passes: what the modules compute, and every token's results bit for bit the same in any pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.drafters.block.decoding import BlockProposer
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import drafter_of
from eyas.drafters.network import DraftNetwork
from eyas.engine import Engine, Speculation
from eyas.errors import UnsupportedModelError, UsageError
from eyas.targets import Target, load_target
from eyas.targets.fingerprint import fingerprint
from eyas.targets.linears import prepack_linears
from eyas.targets.native import linears
from eyas.targets.native.decoder import NativeDecoder, Staged, TargetStates
from eyas.targets.native.levels import NativeLevels
from eyas.targets.native.library import Microkernel, kernels, loaded_kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.packed_linears import Int4Linear, Int8Linear, PackedEmbedding
from eyas.tree import DraftTree, TreeSpec, parse_tree
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import BINS, ValueTable
from eyas.types import Request, SamplingParams
from eyas.verify import Sampler

from ... import tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
NATIVE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "olmo3", "phi3", "granite", "smollm3",
          "neox", "neox_serial", "gpt2", "phi", "stablelm", "starcoder2",
          "mixtral", "qwen3moe", "olmoe", "qwen2moe", "glm4moe", "gptoss", "deepseek2", "deepseek3")  # fmt: skip
"""Architectures with native passes; "mistral" has a sliding window, the second line LayerNorms, the last experts."""
ROUTED = NATIVE[-8:]
SIZES = tiny.fitting("llama")
TYPES = (torch.float32, torch.bfloat16)
SOME = tiny.sample(NATIVE, TYPES)
"""Every architecture in one type always: loading compares each layer, and passes, with the modules in any case."""
THIRD = tiny.sample([(name, TYPES[at // 3 % 2]) for at, name in enumerate(NATIVE)])
"""Every third: what loading has compared in any case, and what all have in common."""
BOUNDARIES = (0, 1, 3, tiny.LAYERS, tiny.LAYERS + 1)


def sizes(name: str) -> dict[str, int]:
    """What makes an architecture's heads fit the kernels' vectors."""
    return tiny.fitting(name) if name in NATIVE else {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in (*tiny.ARCHITECTURES, *tiny.NATIVE_ONLY):
        tiny.build_model(name, **sizes(name)).save_pretrained(root / name)
    return root


@pytest.fixture(autouse=True)
def native_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native weights, whatever is fastest on this machine."""
    monkeypatch.setattr("eyas.targets.loading.best_layout", lambda *_: NativeLinear)


@cache
def native_target(folders: Path, name: str, dtype: torch.dtype) -> Target:
    """Loaded once, as loading tries all layers; a target keeps nothing of what it ran."""
    target = load_target(folders / name, device="cpu", dtype=dtype)
    assert target.native is not None
    return target


def native_drafter(kind: str, dtype: torch.dtype, **more: int) -> NetworkDrafter:
    network: DraftNetwork = tiny.network(kind, **({} if kind == "mlp" else SIZES), **more).to(dtype)
    prepack_linears(network, NativeLinear)
    drafter = drafter_of(network, network.config.taps or network.config.default_taps(tiny.LAYERS))
    assert drafter.proposer.decoder is not None
    return drafter


@pytest.mark.every(3)
@pytest.mark.parametrize("of", THIRD, ids=str)
def test_a_pass_computes_what_the_modules_do(folders: Path, of: tuple[str, torch.dtype]) -> None:
    name, dtype = of
    target = native_target(folders, name, dtype)
    plain = load_target(folders / name, device="cpu", dtype=dtype, prepacked=False)
    prompts = tiny.prompts(19, 4)
    tree = random_tree(2, 7)
    found = []
    for made in (plain, target):
        cache = made.allocate(3)
        read = [chunk.taps for chunk in made.prefill(cache, range(1, 3), prompts, BOUNDARIES, chunk=8)]
        output = made.verify(cache, range(1, 3), torch.tensor([prompt[-1] for prompt in prompts]), tree, BOUNDARIES)
        nodes = torch.arange(8).expand(2, -1)
        found.append((read[0][0], output.logits.rows[output.logits.index], output.taps_at(nodes)))
    for one, other in zip(*found, strict=True):
        scale = float(one.abs().max())
        atol = 1e-4 if dtype == torch.float32 else 5e-2
        if dtype == torch.float32 or name not in ROUTED:
            torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=atol)
        else:  # rounding may choose another expert for a token
            assert ((one - other).abs() <= atol * scale).float().mean() > 0.75


def check_trace(target: Target, monkeypatch: pytest.MonkeyPatch, taps: tuple[int, ...]) -> None:
    """What is traced equals what serving reads, in rows of any length, and no module runs."""
    prompts = tiny.prompts(19, 4, 16)
    monkeypatch.setattr("eyas.targets.target.NATIVE_CHUNK", 8)
    monkeypatch.setattr(type(target.model.base_model), "forward", None)
    padded = torch.tensor([prompt + [0] * (27 - len(prompt)) for prompt in prompts])
    traced = target.trace(padded, torch.tensor([19, 4, 16]), taps)
    assert traced.final.shape[:2] == traced.taps.shape[:2] == padded.shape
    for row, prompt in enumerate(prompts):
        cache = target.allocate(1)
        read = list(target.prefill(cache, range(1), [[*prompt, 0]], taps, chunk=8))
        for made, name in ((traced.final, "final"), (traced.taps, "taps")):
            served = torch.cat([getattr(piece, name) for piece in read], dim=1)
            assert torch.equal(made[row, : len(prompt)], served[0]), (name, row)


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "dtype"), SOME)
def test_traced_states_are_those_of_serving(
    folders: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trace(native_target(folders, name, dtype), monkeypatch, BOUNDARIES)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", tiny.NATIVE_RECURRENT)
def test_traced_states_of_recurrent_layers_are_those_of_serving(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.as_loaded(name, "float32")
    assert target.native is not None
    check_trace(target, monkeypatch, (1, 2))


@pytest.mark.parametrize("dtype", TYPES)
def test_models_of_another_kind_run_their_modules(folders: Path, dtype: torch.dtype) -> None:
    target = load_target(folders / "cohere", device="cpu", dtype=dtype)
    assert target.native is None
    assert target.ragged


def test_a_native_pass_that_differs_is_left_out(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = NativeDecoder._vector
    monkeypatch.setattr(NativeDecoder, "_vector", lambda self, values: vector(self, 2 * values))
    assert load_target(folders / "llama", device="cpu").native is None


def random_tree(batch: int, nodes: int, seed: int = 3) -> DraftTree:
    """Random trees of one size; every second row lacks its last nodes."""
    draw = torch.Generator().manual_seed(seed)
    parents = torch.tensor(
        [[int(torch.randint(-1, i, (), generator=draw)) if i else -1 for i in range(nodes)] for _ in range(batch)]
    )
    tokens = torch.randint(3, tiny.VOCAB, (batch, nodes), generator=draw)
    valid = torch.ones(batch, nodes, dtype=torch.bool)
    valid[1::2, nodes - 2 :] = False
    return DraftTree(tokens, parents, torch.zeros(batch, nodes), valid, nodes, counted=int(valid.sum()))


def read_alone(target: Target, tokens: Sequence[int]) -> torch.Tensor:
    """The logits after the last of `tokens`, read one by one in slot 0."""
    cache = target.allocate(1)
    for token in tokens:
        logits, _ = target.prefill_to_end(cache, range(1), [[token]], ())
    return logits.rows[0]


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "dtype"), SOME)
def test_a_node_s_logits_are_those_of_its_tokens_read_one_by_one(folders: Path, name: str, dtype: torch.dtype) -> None:
    check_nodes(native_target(folders, name, dtype))


@pytest.mark.parametrize("name", ["llama", "neox", "mixtral", "deepseek3"])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_same_holds_by_tiles_and_with_many_threads(
    folders: Path, name: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMX's, or the same sums by vectors. Of so many threads some take no piece of a product that others share."""
    offered = loaded_kernels().microkernels
    if Microkernel.TILES_OF_VECTORS not in offered:
        pytest.skip("this processor has no products of pairs")
    tiles = Microkernel.TILES if Microkernel.TILES in offered else Microkernel.TILES_OF_VECTORS
    monkeypatch.setattr(linears, "chosen_microkernels", lambda: tiles)
    monkeypatch.setattr("eyas.targets.native.decoder.threads_for", lambda _: 4)
    target = load_target(folders / name, device="cpu", dtype=torch.bfloat16, quantize=quantize)
    assert target.native is not None
    check_nodes(target)


def check_nodes(target: Target) -> None:
    """In trees of rows of different lengths, in slots that were used before, read in chunks."""
    prompts = tiny.prompts(23, 5, 9)
    tree = random_tree(3, 9)
    cache = target.allocate(4)
    for _ in target.prefill(cache, range(1, 4), prompts, (), chunk=7):
        pass
    logits = target.verify(cache, range(1, 4), torch.tensor([prompt[-1] for prompt in prompts]), tree, ()).logits
    rows = logits.rows[logits.index]
    for row, prompt in enumerate(prompts):
        for node in range(10):
            if node and not tree.valid[row, node - 1]:
                continue
            path = [i - 1 for i in range(1, 10) if tree.ancestors[row, node, i]]
            alone = read_alone(target, prompt + [int(tree.tokens[row, i]) for i in path])
            assert torch.equal(rows[row, node], alone), (row, node)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle1", "dspark"))]
)
@pytest.mark.parametrize("of", THIRD, ids=str)
def test_speculation_equals_plain_decoding_alone_and_in_batches(
    folders: Path, of: tuple[str, torch.dtype], kind: str
) -> None:
    name, dtype = of
    target = native_target(folders, name, dtype)
    prompts = tiny.prompts(*range(3, 19), seed=4)
    requests = [
        Request(tuple(prompt), SamplingParams(max_tokens=12, temperature=i % 2 * 0.9, seed=i, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    alone = [Engine(target).generate([request])[0].token_ids for request in requests[:4]]
    plain = [done.token_ids for done in Engine(target, batch_size=16).generate(requests)]
    assert plain[:4] == alone
    assert len({tuple(tokens) for tokens in plain}) == len(plain)
    for tree, batch, count in (("chain:3", 1, 4), ("dynamic:4,3,8", 5, 16), ("dynamic:4,3,8,0.1", 16, 16)):
        engine = Engine(target, None, Speculation(native_drafter(kind, dtype), parse_tree(tree)), batch_size=batch)
        assert [done.token_ids for done in engine.generate(requests[:count])] == plain[:count]


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "dflash", "dspark", "jetspec", "xpress"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_drafter_drafts_what_its_modules_would(folders: Path, kind: str, dtype: torch.dtype) -> None:
    target = native_target(folders, "llama", dtype)
    native = native_drafter(kind, dtype)
    plain = tiny.network(kind, **SIZES).to(dtype)
    modules = drafter_of(plain, native.taps)
    assert modules.proposer.decoder is None
    requests = [Request(tuple(prompt), SamplingParams(max_tokens=12)) for prompt in tiny.prompts(9, 4, 17)]
    nodes = []
    for drafter in (modules, native):
        done = Engine(target, None, Speculation(drafter, parse_tree("chain:3")), batch_size=3).generate(requests)
        nodes.append([one.stats.accepted_histogram for one in done])
    assert nodes[0] == nodes[1]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_drafter_s_states_are_made_in_its_pass(dtype: torch.dtype) -> None:
    """Bit for bit those that its module makes of the target's, where no norm comes before."""
    drafter = native_drafter("eagle3", dtype)
    decoder = drafter.proposer.decoder
    assert decoder is not None
    assert decoder.fuses
    taps = torch.randn(2, 3, len(drafter.taps), tiny.HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    drafter.pairs.resize(2)
    drafter.pairs.cache.reserve(3)
    staged = Staged(range(2), 3, None, [0, 0], None)
    own = decoder.run(drafter.pairs.cache, staged, tokens, TargetStates(taps), final=True)
    of_module = decoder.run(drafter.pairs.cache, staged, tokens, drafter.network.fuse(taps), final=True)
    assert torch.equal(own.states, of_module.states)
    assert own.final is not None
    assert of_module.final is not None
    assert torch.equal(own.final, of_module.final)
    normed = native_drafter("eagle3", dtype, fc_norm=True).proposer.decoder
    assert normed is not None
    assert not normed.fuses


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_many_pairs_at_once_are_read_as_one_by_one(
    kind: str, layers: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many pairs, all but each row's last only leave their keys and values in the cache."""
    counts = [40, 1, 27]
    draw = torch.Generator().manual_seed(0)
    drafters = [native_drafter(kind, dtype, num_hidden_layers=layers) for _ in range(2)]
    taps = torch.randn(3, max(counts), len(drafters[0].taps), tiny.HIDDEN, generator=draw).to(dtype)
    tokens = torch.randint(tiny.VOCAB, (3, max(counts)), generator=draw)
    for drafter in drafters:
        drafter.pairs.resize(3)
    passes = []
    read = NativeDecoder.read
    with monkeypatch.context() as patched:
        patched.setattr(
            NativeDecoder, "read", lambda *given: (passes.append((given[3].numel(), given[5] is None)), read(*given))
        )
        drafters[0].observe(range(3), tokens, taps, counts)
    assert passes == [(sum(counts) - len(counts), True), (len(counts), False)]
    for i in range(max(counts)):
        drafters[1].observe(range(3), tokens[:, i : i + 1], taps[:, i : i + 1], [int(i < count) for count in counts])
    once, each_alone = (drafter.pairs for drafter in drafters)
    assert torch.equal(once.fed, each_alone.fed)
    assert torch.equal(once.normed, each_alone.normed)
    for slot, count in enumerate(counts):
        assert once.length(slot) == each_alone.length(slot) == count
        for kept, other in zip(once.copy_out(slot, 0, count), each_alone.copy_out(slot, 0, count), strict=True):
            assert torch.equal(kept, other)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_search_in_one_call_is_that_of_its_levels(
    kind: str, dtype: torch.dtype, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every shape, by probability and by worth, with rows that aren't drafting, and one that is greedy."""
    drafter = native_drafter(kind, dtype)
    prompts = tiny.prompts(9, 4, 17)
    sampler = Sampler(3, tiny.VOCAB, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    rows = range(3)
    drafter.pairs.resize(3)
    for slot, prompt in enumerate(prompts):
        sampler.admit(slot, SamplingParams(temperature=temperature * (slot < 2), seed=slot), prompt, ())
    taps = torch.randn(3, 17, len(drafter.taps), tiny.HIDDEN, generator=draw).to(dtype)
    drafter.observe(rows, torch.randint(tiny.VOCAB, (3, 17), generator=draw), taps, [9, 4, 17])
    rates = np.random.default_rng(0).uniform(size=(2, 2, BINS))
    specs: list[tuple[TreeSpec, list[bool] | None]] = [
        (parse_tree("chain:4"), None),
        (parse_tree("dynamic:4,3,9"), [True, False, True]),
    ]
    for width, depth, threshold, valued, drafting in (
        (4, 3, 0.0, True, None),
        (1, 5, 0.0, False, None),
        (3, 4, 0.002, False, [True, False, True]),
        (2, 6, 0.01, True, [False, True, False]),
        (6, 2, 0.0, True, [True, True, False]),
    ):
        shape = SharedTree(depth, width, 3 * width * depth, threshold=threshold)
        table = ValueTable(rates)
        plan = PlannedTree(shape, values=table if valued else None, groups=(0, 1, 0), keeps_candidates=True)
        specs.append((plan, drafting))
    for spec, wanted in specs:
        trees = []
        for whole in (True, False):
            monkeypatch.setattr(NativeLevels, "can_search", whole)
            trees.append(drafter.draft(rows, spec, sampler.coupling(rows, True), wanted))
        found, expected = trees
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.parents, expected.parents)
        assert torch.equal(found.valid, expected.valid)
        assert found.size
        torch.testing.assert_close(found.logprob, expected.logprob, rtol=0, atol=1e-3 if temperature else 0)
        if spec.keeps_candidates:
            assert found.network.candidates is not None
            assert expected.network.candidates is not None
            for part, other in zip(found.network.candidates.beams, expected.network.candidates.beams, strict=True):
                assert torch.equal(part, other)


def depth_first(tree: DraftTree) -> DraftTree:
    """The tree of one row with every node followed by its first child, where it has one."""
    parents = tree.parents[0].tolist()

    def below(node: int) -> list[int]:
        return [n for child, above in enumerate(parents) if above == node for n in (child, *below(child))]

    order = below(-1)
    tokens, logprob, valid = (part[:, order] for part in (tree.tokens, tree.logprob, tree.valid))
    moved = torch.tensor([[order.index(parents[n]) if parents[n] >= 0 else -1 for n in order]], dtype=torch.int64)
    return replace(tree, tokens=tokens, logprob=logprob, valid=valid, parents=moved)


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize(
    ("price", "calibration"), [(0.0, 1.0), (0.02, 1.0), (0.2, 1.0), (2.0, 1.0), (0.1, 0.5), (0.2, 1.5)]
)
def test_a_search_chooses_what_pays(
    price: float, calibration: float, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the tree made of all candidates does: all of them, some, none; prices rise faster after the third node.

    But depth first, so that an accepted path mostly lies together.
    """
    drafter = native_drafter("eagle3", torch.float32)
    draw = torch.Generator().manual_seed(0)
    sampler = Sampler(1, tiny.VOCAB, torch.device("cpu"))
    drafter.pairs.resize(1)
    sampler.admit(0, SamplingParams(), [1, 2, 3], ())
    sizes = set()
    for _ in range(5):
        taps = torch.randn(1, 3, len(drafter.taps), tiny.HIDDEN, generator=draw)
        drafter.observe(range(1), torch.randint(tiny.VOCAB, (1, 3), generator=draw), taps, [3])
        prices = tuple(price * count + 2 * price * max(0, count - 3) for count in range(1, 25))
        plan = PlannedTree(SharedTree(3, 3, 24, per_row=limit), prices=prices, calibrations=(calibration,))
        trees = []
        for whole in (True, False):
            monkeypatch.setattr(NativeLevels, "can_search", whole)
            trees.append(drafter.draft(range(1), plan, sampler.coupling(range(1), True), None))
        found = trees[0]
        expected = depth_first(trees[1])
        for part in ("tokens", "parents", "valid", "logprob", "max_depth", "counted"):
            one = getattr(found, part)
            other = getattr(expected, part)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert found.network.levels == expected.network.levels
        assert found.network.promise == pytest.approx(expected.network.promise, rel=1e-5)
        sizes.add(found.size)
    assert sizes == {limit or 21} if not price else max(sizes) < 21
    assert (sizes == {0}) == (price == 2.0)


def test_a_search_ends_where_further_levels_cannot_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the levels after which the modules' drafts end, too: sooner, the dearer a level is."""
    drafter = native_drafter("eagle3", torch.float32)
    draw = torch.Generator().manual_seed(0)
    sampler = Sampler(1, tiny.VOCAB, torch.device("cpu"))
    drafter.pairs.resize(1)
    sampler.admit(0, SamplingParams(), [1, 2, 3], ())
    table = ValueTable(np.linspace(1.0, 0.3, BINS) * np.ones((2, 2, 1)))
    levels = dict[float, list[int]]()
    for _ in range(5):
        taps = torch.randn(1, 3, len(drafter.taps), tiny.HIDDEN, generator=draw)
        drafter.observe(range(1), torch.randint(tiny.VOCAB, (1, 3), generator=draw), taps, [3])
        for price in (-math.inf, 0.05, 0.2, 10.0):
            plan = PlannedTree(
                SharedTree(8, 2, 16),
                prices=tuple(0.03 * count + 0.5 * (count > 3) for count in range(1, 17)),
                level_price=price,
                values=table,
                calibrations=(0.9,),
            )
            trees = []
            for whole in (True, False):
                monkeypatch.setattr(NativeLevels, "can_search", whole)
                trees.append(drafter.draft(range(1), plan, sampler.coupling(range(1), True), None))
            found, expected = trees[0], depth_first(trees[1])
            assert found.network.levels == expected.network.levels
            assert torch.equal(found.tokens, expected.tokens)
            levels.setdefault(price, []).append(found.network.levels)
    assert set(levels[-math.inf]) == {8}
    assert set(levels[10.0]) == {1}
    assert 5 < sum(levels[0.2]) <= sum(levels[0.05]) < 40


@pytest.mark.parametrize("kind", ["dflash", "dspark", "jetspec"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_block_s_states_are_those_of_the_modules(kind: str, dtype: torch.dtype) -> None:
    """In rows of different lengths, read in two pieces; no slot of a block sees less than all of it."""
    native = native_drafter(kind, dtype)
    modules = drafter_of(tiny.network(kind, **SIZES).to(dtype), native.taps)
    draw = torch.Generator().manual_seed(1)
    taps = torch.randn(3, 7, len(native.taps), tiny.HIDDEN, generator=draw).to(dtype)
    tokens = torch.randint(tiny.VOCAB, (3, 7), generator=draw)
    states = []
    for drafter in (native, modules):
        assert isinstance(drafter.proposer, BlockProposer)
        drafter.pairs.resize(4)
        for counts in ([7, 2, 4], [0, 3, 7]):
            drafter.observe(range(1, 4), tokens, taps, counts)
        states.append(drafter.proposer.run_block(drafter.pairs, range(1, 4)).states.float())
        drafter.pairs.truncate(1, 5)  # the columns after it hold what was read before
        states.append(drafter.proposer.run_block(drafter.pairs, range(1, 2)).states.float())
    for found, expected in zip(states[:2], states[2:], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-1)


def test_a_block_pass_that_differs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = NativeDecoder.run
    monkeypatch.setattr(
        NativeDecoder,
        "run",
        lambda self, *given, blocks=False, **named: run(self, *given, **named),  # noqa: ARG005
    )
    network = tiny.network("dflash", **SIZES)
    prepack_linears(network, NativeLinear)
    assert drafter_of(network, (1, 2, 4)).proposer.decoder is None


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "dtype", "quantize"),
    tiny.every_other(["llama", "mixtral", "deepseek3", "gpt2"], TYPES, ["int8", "int4"]),
)
def test_quantized_targets_speculate_losslessly(folders: Path, name: str, dtype: torch.dtype, quantize: str) -> None:
    target = load_target(folders / name, device="cpu", dtype=dtype, quantize=quantize)
    assert target.native is not None
    kinds = {name.split(".")[-1]: type(part) for name, part in target.model.named_modules()}
    inner = ("c_attn", "c_fc") if name == "gpt2" else ("o_proj", "down_proj")
    own = Int8Linear if quantize == "int8" else Int4Linear
    assert [kinds[part] for part in (*inner, "lm_head")] == [own, own, Int8Linear]
    assert PackedEmbedding in kinds.values()
    assert fingerprint(target.model) == fingerprint(native_target(folders, name, dtype).model)
    requests = [Request(tuple(prompt), SamplingParams(max_tokens=12)) for prompt in tiny.prompts(9, 4, 17)]
    plain = [done.token_ids for done in Engine(target).generate(requests)]
    for tree, batch in (("chain:3", 1), ("dynamic:4,3,8", 3)):
        speculation = Speculation(native_drafter("eagle3", dtype), parse_tree(tree))
        done = Engine(target, None, speculation, batch_size=batch).generate(requests)
        assert [one.token_ids for one in done] == plain


def test_int8_says_what_stays_as_it_is(
    folders: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_target(folders / "llama", device="cpu", quantize="int8")
    assert "int8" not in caplog.text
    monkeypatch.setattr("eyas.targets.loading.replace_experts", lambda *_: 0)
    load_target(folders / "gptoss", device="cpu", quantize="int8")
    assert "% of the weights of GptOssForCausalLM are in linear layers and are quantized" in caplog.text
    monkeypatch.setattr("eyas.targets.loading.prepack_linears", lambda *_: 0)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no linear layers to quantize"):
        load_target(folders / "llama", device="cpu", quantize="int8")


def test_quantization_that_cannot_run_is_refused(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="unknown quantization 'int3': write int8 or int4"):
        load_target(folders / "llama", device="cpu", quantize="int3")
    with pytest.raises(UsageError, match="need eyas's native kernels"):
        load_target(folders / "llama", device="cpu", quantize="int8", compiled=True)
    monkeypatch.setattr("eyas.targets.loading.native_kernels", lambda: None)
    with pytest.raises(UsageError, match="need eyas's native kernels"):
        load_target(folders / "llama", device="cpu", quantize="int8")


@pytest.mark.parametrize(
    ("name", "fitting", "dtype"), [("llama", SIZES, torch.bfloat16), ("deepseek3", {}, torch.float32)]
)
def test_auto_is_bfloat16_where_passes_are_native(
    tmp_path: Path, name: str, fitting: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although PyTorch's own kernels are slow in it on this CPU; float32 is announced where it takes its place."""
    reported: list[torch.dtype] = []
    monkeypatch.setattr("eyas.targets.loading.cpu_computes_in", lambda wanted: wanted == torch.float32)
    monkeypatch.setattr("eyas.targets.loading.report_slow", reported.append)
    tiny.build_model(name, **fitting).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_target(tmp_path, device="cpu", dtype="auto").dtype == dtype
    assert reported == [torch.bfloat16] * (dtype == torch.float32)
    assert load_target(tmp_path, device="cpu", dtype="auto", prepacked=False).dtype == torch.float32


@pytest.mark.parametrize("token", [-1, tiny.VOCAB])
def test_a_token_without_embedding_is_refused(folders: Path, token: int) -> None:
    """Native passes look embeddings up by themselves: nothing else stands between an id and memory."""
    target = native_target(folders, "llama", torch.float32)
    cache = target.allocate(1)
    with pytest.raises(IndexError, match=f"ids must be from 0 to {tiny.VOCAB - 1}"):
        target.prefill_to_end(cache, range(1), [[3, token]], ())
