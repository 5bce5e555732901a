"""Recurrent layers: every node goes on from its parent's state, and committing keeps the last accepted one's."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from functools import cache as once
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyas.errors import InvariantError, UnsupportedModelError
from eyas.targets import SlotCache, Target
from eyas.targets.native.library import kernels
from eyas.targets.native.states import NativeStates
from eyas.targets.recurrent import ByLevels, ModuleSteps
from eyas.targets.states import RecurrentStates, SlotStates, StatePath
from eyas.tree import DraftTree

from .. import tiny

NAMES = [*tiny.RECURRENT, *(pytest.param(name, marks=pytest.mark.slow) for name in tiny.SELDOM_RECURRENT)]
LENGTHS = (13, 20, 1, 6)
PARENTS = (-1, -1, 0, 2, 0, 1)
OFTEN = tiny.sample([*tiny.RECURRENT], ["bfloat16", "float32", "int8"])
SELDOM = [
    pytest.param(name, kind, marks=pytest.mark.slow)
    for name in sorted({*tiny.SELDOM_RECURRENT} - {"zamba2", "falcon_mamba", "lfm2_moe"})
    for kind in ("float32", "bfloat16", "int8")
]
"""Zamba2's GELU and LFM2-MoE's router are others for one token than for several; a random Falcon-Mamba is refused in
bfloat16."""
NATIVELY = [
    *tiny.NATIVE_RECURRENT,
    *(pytest.param(name, marks=pytest.mark.slow) for name in tiny.SELDOM_NATIVE_RECURRENT),
]
NATIVE = pytest.mark.skipif(kernels() is None, reason="PyTorch's own products depend on how many tokens there are")
VALID = ((1, 1, 1, 1, 1, 1), (1, 0, 1, 0, 1, 0), (0, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 1))
CLOSE = {"rtol": 1e-3, "atol": 5e-4}
CPU = torch.device("cpu")


def draft(seed: int = 3) -> DraftTree:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, tiny.VOCAB, (len(VALID), len(PARENTS)), generator=draw)
    return DraftTree(
        tokens, torch.tensor([PARENTS] * len(VALID)), torch.zeros(tokens.shape), torch.tensor(VALID).bool(), 3
    )


def filled(target: Target, chunk: int = 4) -> tuple[SlotCache, Tensor]:
    cache = target.allocate(len(LENGTHS))
    prompts = tiny.prompts(*LENGTHS)
    for _ in target.prefill(cache, range(len(LENGTHS)), prompts, (), chunk):
        pass
    return cache, torch.tensor([prompt[-1] for prompt in prompts])


def logits_after(target: Target, cache: SlotCache, rows: range, tokens: list[int]) -> Tensor:
    verified = target.verify(cache, rows, torch.tensor(tokens), DraftTree.empty(len(rows), CPU), ())
    return verified.logits.rows


def native_of(name: str, kind: str = "float32") -> Target:
    target = tiny.as_loaded(name, kind)
    assert target.native is not None
    return target


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ragged", [True, False])
def test_every_node_sees_its_own_path_and_what_is_committed_is_gone_on_from(name: str, ragged: bool) -> None:
    """Chains and branches in rows of different lengths; then other paths, moved slots, emptied ones."""
    check_nodes(padding(tiny.target(name), ragged))


@NATIVE
@pytest.mark.parametrize("name", NATIVELY)
@pytest.mark.parametrize("ragged", [True, False])
def test_the_same_holds_natively(name: str, ragged: bool) -> None:
    check_nodes(padding(native_of(name), ragged))


def padding(target: Target, ragged: bool) -> Target:
    """The target, whose passes are ragged or padded; it isn't tried again."""
    made = copy.copy(target)
    made.ragged = ragged
    return made


def check_nodes(target: Target) -> None:
    cache, roots = filled(target)
    tree = draft()
    texts = tiny.prompts(*LENGTHS)
    target.verify(cache, range(4), roots, draft(9), ())  # changes nothing
    verified = target.verify(cache, range(4), roots, tree, ())
    for row, prompt in enumerate(texts):
        paths = [list(prompt)]
        for parent, token in zip(PARENTS, tree.tokens[row].tolist(), strict=True):
            paths.append([*paths[parent + 1], token])
        for node, path in enumerate(paths):
            if node and not VALID[row][node - 1]:
                continue
            found = verified.logits.rows[verified.logits.index[row, node]]
            torch.testing.assert_close(found, logits_of(target.model, tuple(path)), **CLOSE)
        texts[row] = paths[(4, 3, 0, 6)[row]]
    cache.commit(range(4), [[0, 1, 3, 4], [0, 1, 3], [0], [0, 2, 6]])
    for row, token in enumerate((5, 6, 7, 8)):
        texts[row].append(token)
    check(target, cache, texts)
    cache.commit(range(4), [[0]] * 4)
    cache.truncate(2, 0)
    cache.move(3, 2)
    texts = [texts[0], texts[1], texts[3]]
    for row, token in enumerate((9, 8, 7)):
        texts[row].append(token)
    check(target, cache, texts)
    texts[2] = [11]
    cache.truncate(2, 0)
    check(target, cache, texts)


def check(target: Target, cache: SlotCache, texts: list[list[int]]) -> None:
    """The logits after the rows' last tokens, of which all but the last are committed."""
    found = logits_after(target, cache, range(len(texts)), [text[-1] for text in texts])
    for row, text in enumerate(texts):
        torch.testing.assert_close(found[row], logits_of(target.model, tuple(text)), **CLOSE)


@once
def logits_of(model: nn.Module, text: tuple[int, ...]) -> Tensor:
    """The model's own after a text, which ragged passes and padded ones share."""
    return tiny.full_forward(model, list(text)).logits[0, -1]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NAMES)
def test_states_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another node's state than the last accepted one's the next logits are others, as they are with none."""
    check_that_states_matter(tiny.target(name), monkeypatch)


@NATIVE
@pytest.mark.parametrize("name", tiny.NATIVE_RECURRENT)
def test_native_states_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_states_matter(native_of(name), monkeypatch)


def check_that_states_matter(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = draft()
    commit = SlotStates.commit
    found = []
    for wrong in (lambda path: path, lambda path: path[:-1]):
        cache, roots = filled(target)
        target.verify(cache, range(4), roots, tree, ())
        monkeypatch.setattr(
            SlotStates,
            "commit",
            lambda states, rows, paths, wrong=wrong: commit(states, rows, [*map(wrong, paths)]),
        )
        cache.commit(range(4), [[0, 1, 3, 4], [0, 1, 3], [0, 2][:1], [0, 2, 6]])
        monkeypatch.undo()
        found.append(logits_after(target, cache, range(4), [5, 6, 7, 8]))
    assert cache.states is not None
    cache.states.clear(0)
    found.append(logits_after(target, cache, range(4), [5, 6, 7, 8]))
    for other in found[1:]:
        assert float((other[0] - found[0][0]).abs().max() / found[0][0].abs().max()) > 0.02


@NATIVE
@pytest.mark.parametrize("name", tiny.NATIVE_RECURRENT)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_prompts_in_pieces_leave_the_same_bits(name: str, kind: str) -> None:
    target = native_of(name, kind)
    (one,), *others = (states_of(filled(target, chunk)[0]) for chunk in (512, 3, 1))
    assert all(torch.equal(one, other) for (other,) in others)
    assert all(one[row].any() for row in (0, 1, 3))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", tiny.RECURRENT)
def test_prompts_in_pieces_leave_the_same_states(name: str) -> None:
    target = tiny.target(name)
    for one, other in zip(*(states_of(filled(target, chunk)[0]) for chunk in (512, 3)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()))


def states_of(cache: SlotCache) -> list[Tensor]:
    """[slots, ...] each."""
    if isinstance(cache.states, NativeStates):
        return [torch.stack(cache.states._held)]
    assert isinstance(cache.states, RecurrentStates)
    return [*cache.states._held.values()]


def test_a_pass_reads_wide_weights_once() -> None:
    target = tiny.target("qwen3_next")
    cache, roots = filled(target)
    module = next(part for part in target.model.modules() if ByLevels.of(part) is not None)
    calls: Counter[str] = Counter()
    for name, child in module.named_children():
        child.register_forward_pre_hook(lambda _module, _args, name=name: calls.update([name]))
    target.verify(cache, range(4), roots, draft(), ())
    assert calls["in_proj_qkvz"] == calls["in_proj_ba"] == calls["out_proj"] == 1
    assert calls["norm"] == 15  # nodes: with so few heads each is run alone


def test_a_trace_keeps_torch_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rounds do: its threads would wait for each other after every small operation."""
    target = tiny.target("qwen3_next")
    seen = list[int]()
    before = torch.get_num_threads()
    masks = target.masks
    monkeypatch.setattr(target, "masks", lambda *args: seen.append(torch.get_num_threads()) or masks(*args))
    torch.set_num_threads(2)
    try:
        target.trace(torch.tensor(tiny.prompts(5)), torch.tensor([5]), (1,))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_nothing_else_is_changed_in_the_model() -> None:
    """A second target of a model finds its modules as they are, and transformers' own passes are its own."""
    model = tiny.build_model("bamba")
    prompt = tiny.prompts(9)[0]
    before = tiny.continuation(model, prompt, 12)
    kinds = [type(Target(model).model.model.layers[0].mamba) for _ in range(2)]
    assert kinds[0] is kinds[1]
    assert tiny.continuation(model, prompt, 12) == before


def test_states_go_with_the_slots() -> None:
    target = tiny.target("lfm2")
    cache, _ = filled(target)
    assert cache.states is not None
    before = states_of(cache)
    cache.reshape(6, 256)
    assert [len(state) for state in states_of(cache)] == [6] * len(before)
    assert all(
        torch.equal(new[:4], old) and not new[4:].any() for new, old in zip(states_of(cache), before, strict=True)
    )
    assert cache.nbytes() > cache.states.nbytes() > 0


def test_what_can_not_be_is_refused() -> None:
    target = tiny.target("lfm2")
    cache, roots = filled(target)
    with pytest.raises(InvariantError, match="can't go back to 3 tokens"):
        cache.truncate(0, 3)
    with pytest.raises(InvariantError, match="no staged states"):
        cache.commit(range(4), [[0]] * 4)
    target.verify(cache, range(2), roots[:2], DraftTree.empty(2, CPU), ())
    with pytest.raises(InvariantError, match="no staged states"):
        cache.commit(range(4), [[0]] * 4)


def test_a_model_whose_states_are_not_gone_on_from_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentStates, "commit", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="level by level"):
        Target(tiny.build_model("qwen3_5"))


def test_paths() -> None:
    path = StatePath.of_trees(range(2, 6), draft(), None, CPU)
    assert [level.tokens.tolist() for level in path.sure] == [[0, 7, 14, 21]]
    assert [[part.tokens.tolist() for part in level] for level in path.guesses] == [
        [[1, 2, 8, 23]],
        [[3, 5, 6, 10, 12, 27]],
        [[4]],
    ]
    first, second, third = (level[0] for level in path.guesses)
    assert first.above.tolist() == [0, 0, 1, 3]
    assert first.inner is not None
    assert first.tokens[first.inner].tolist() == [1, 2, 8, 23]
    assert second.above.tolist() == [0, 0, 1, 2, 2, 3]
    assert second.inner is not None
    assert second.tokens[second.inner].tolist() == [3]
    assert third.above.tolist() == [0]
    assert path.steps == 4
    prompts = StatePath.of_prompts(range(2), [2, 0], None, CPU)
    assert [level.tokens.tolist() for level in prompts.sure] == [[0], [1]]
    assert [level.above.tolist() for level in prompts.sure] == [[0], [0]]


def test_a_pass_that_is_not_committed_leaves_no_trace() -> None:
    """Also where a row reads nothing, and the others read on."""
    target = tiny.target("lfm2")
    cache, roots = filled(target)
    before = [state.clone() for state in states_of(cache)]
    target.verify(cache, range(4), roots, draft(), ())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SlotCache, "commit", lambda *_: None)
        target.prefill_chunk(cache, range(4), [[3], [3, 4, 5], [3, 4], [3, 4, 5, 6]], ())
    assert all(torch.equal(one, other) for one, other in zip(states_of(cache), before, strict=True))
    target.prefill_chunk(cache, range(4), [[3], [3, 4, 5], [3, 4], [3, 4, 5, 6]], ())
    for one, other in zip(states_of(cache), before, strict=True):
        assert [torch.equal(one[row], other[row]) for row in range(4)] == [True, False, False, False]


def test_copies_are_the_states_of_their_positions() -> None:
    """Made while prompts are read in pieces, at a root, and among accepted guesses; they move with their slots."""
    check_copies(tiny.target("qwen3_5"))


@NATIVE
@pytest.mark.parametrize("name", tiny.NATIVE_RECURRENT)
def test_native_copies_are_the_states_of_their_positions(name: str) -> None:
    check_copies(native_of(name))


def check_copies(target: Target) -> None:
    tree = draft()
    cache = target.allocate(4)
    prompts = tiny.prompts(*LENGTHS)
    states = cache.states
    assert states is not None
    states.copies.every = 8
    states.copies.mark(1, 12)
    for _ in target.prefill(cache, range(4), prompts, (), 5):
        pass
    assert [{*states.copies.of(row)} for row in range(4)] == [{7}, {12, 15}, set(), set()]
    paths = [[0, 1, 3, 4], [0, 1, 3], [0], [0, 2, 6]]
    for commits in (False, True):
        target.verify(cache, range(4), torch.tensor([prompt[-1] for prompt in prompts]), tree, ())
        if commits:
            cache.commit(range(4), paths)
    assert [{*states.copies.of(row)} for row in range(4)] == [{15}, {12, 15}, set(), {7}]
    texts = [
        [*prompt, *(int(tree.tokens[row, node - 1]) for node in path[1:])]
        for row, (prompt, path) in enumerate(zip(prompts, paths, strict=True))
    ]
    cache.move(3, 2)
    for row, text in ((0, texts[0]), (1, texts[1]), (2, texts[3])):
        for tokens, copied in states.copies.of(row).items():
            lone = target.allocate(1)
            target.prefill_chunk(lone, range(1), [text[: tokens + 1]], ())
            for found, expected in zip(copied.values(), states_of(lone), strict=True):
                torch.testing.assert_close(found, expected[0], rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    cache.truncate(0, 0)
    assert not states.copies.of(0)


def test_wide_levels_come_in_parts() -> None:
    """Places count the inner nodes of all parts."""
    parents = torch.tensor([[-1] * 11 + [9, 0]])
    tree = DraftTree(parents, parents, torch.zeros(1, 13), torch.ones(1, 13).bool(), 2)
    wide, below = StatePath.of_trees(range(1), tree, None, CPU).guesses
    assert [len(part.tokens) for part in wide] == [6, 5]
    assert [part.tokens[part.inner].tolist() for part in wide] == [[1], [10]]
    assert below[0].above.tolist() == [1, 0]


@NATIVE
def test_memory_of_a_native_tree_of_32_nodes() -> None:
    """What its tokens stage takes at most a tenth of what a state a node would; a plain pass stages a layer's alone."""
    target = tiny.as_loaded("qwen3_5", "float32", **_REAL)
    assert target.native is not None
    cache = target.allocate(1)
    found = []
    states = cache.states
    assert isinstance(states, NativeStates)
    target.prefill_chunk(cache, range(1), [[3, 4, 5]], ())
    nodes = torch.arange(3, 35).unsqueeze(0)
    tree = DraftTree(nodes, nodes - 4, torch.zeros(1, 32), torch.ones(1, 32).bool(), 32)
    for each, path in ((DraftTree.empty(1, CPU), [0]), (tree, [0, 1])):
        target.verify(cache, range(1), torch.tensor([5]), each, ())
        found.append(states._inputs.nbytes)
        cache.commit(range(1), [path])
    assert found[1] <= 0.1 * 32 * states.slot_bytes
    assert found[1] > 32 * found[0]


@pytest.mark.parametrize("name", tiny.RECURRENT)
def test_a_tree_leaves_no_states_but_those_of_its_rows(name: str) -> None:
    """However many nodes it has, what is staged is one state a row; the guesses' inputs are held until the commit."""
    target = tiny.target(name)
    cache, roots = filled(target)
    states = cache.states
    assert isinstance(states, RecurrentStates)
    target.verify(cache, range(4), roots, draft(), ())
    assert {len(state) for state in states._staged.values()} == {4}
    assert states._steps
    cache.commit(range(4), [[0, 1, 3, 4], [0, 1, 3], [0], [0, 2, 6]])
    assert not states._staged
    assert not states._steps


class PeakBytes(TorchDispatchMode):
    """The most memory of tensors made within that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in before | self._alive:
                storage = leaf.untyped_storage()
                self._alive.add(storage._cdata)
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return out

    def _freed(self, storage: int, size: int) -> None:
        self._alive.discard(storage)
        self._now -= size


_USUAL = tf.Qwen3_5TextConfig()
_REAL = {key: getattr(_USUAL, key) for key in _USUAL.to_dict() if key.startswith("linear_")}


@once
def with_real_sizes() -> Target:
    """The recurrent layers of transformers' default Qwen3.5 in a model that is narrow everywhere else."""
    same = ("num_hidden_layers", "layer_types")
    model = tiny.build_model("qwen3_5", **_REAL, **{key: getattr(_USUAL, key) for key in same})
    checks = ("choose_passes", "check_states", "find_odd_steps")  # they take seconds
    with patch.multiple("eyas.targets.target", **dict.fromkeys(checks, lambda _target: None)):
        return Target(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parents",
    [pytest.param([-1] * 32, marks=pytest.mark.slow), [-1] * 8 + list(range(24))],
    ids=["fan", "tree"],
)
def test_memory_of_a_tree_of_32_nodes(parents: list[int]) -> None:
    """Beyond a plain pass a wide tree takes at most a tenth of what 32 copies of a sequence's states would."""
    target = with_real_sizes()
    cache = target.allocate(1)
    assert cache.states is not None
    target.prefill_chunk(cache, range(1), [[3, 4, 5]], ())
    tree = DraftTree(
        torch.arange(3, 35).unsqueeze(0), torch.tensor([parents]), torch.zeros(1, 32), torch.ones(1, 32).bool(), 32
    )
    found = []
    for each, path in ((DraftTree.empty(1, CPU), [0]), (tree, [0, 1])):
        with PeakBytes() as peak:
            target.verify(cache, range(1), torch.tensor([5]), each, ())
            cache.commit(range(1), [path])
        found.append(peak.most)
    one = cache.states.nbytes()
    assert one == 24 * 4 * (32 * 128 * 128 + 4 * (2 * 16 + 32) * 128)
    assert found[0] > one  # what is staged is seen
    assert found[1] - found[0] <= 0.1 * 32 * one


@pytest.mark.every(4)
@NATIVE
@pytest.mark.parametrize(("name", "kind"), [*OFTEN, *SELDOM])
def test_a_guess_has_the_bits_of_plain_decoding(name: str, kind: str) -> None:
    """Logits of a path in trees of several rows, and the committed states, against one token at a time alone."""
    check_bits(tiny.as_loaded(name, kind, modules=True))


@pytest.mark.every(3)
@NATIVE
@pytest.mark.parametrize("name", NATIVELY)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_guess_has_the_same_bits_natively(name: str, kind: str) -> None:
    check_bits(native_of(name, kind))


@NATIVE
@pytest.mark.parametrize("name", tiny.NATIVE_RECURRENT)
def test_the_same_holds_with_many_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many some take no piece of a step that others share."""
    for place in ("decoder", "ops", "packed_linears"):
        monkeypatch.setattr(f"eyas.targets.native.{place}.threads_for", lambda _: 4)
    check_bits(native_of(name, "bfloat16"))


def check_bits(target: Target) -> None:
    tree = draft()
    paths = [[0, 1, 3, 4], [0, 1, 3], [0], [0, 2, 6]]
    cache, roots = filled(target)
    verified = target.verify(cache, range(4), roots, tree, ())
    cache.commit(range(4), paths)
    for row, (prompt, path) in enumerate(zip(tiny.prompts(*LENGTHS), paths, strict=True)):
        lone = target.allocate(1)
        for _ in target.prefill(lone, range(1), [prompt], (), 4):
            pass
        for node in path:
            token = int(roots[row]) if not node else int(tree.tokens[row, node - 1])
            logits = logits_after(target, lone, range(1), [token])
            assert torch.equal(logits[0], verified.logits.rows[verified.logits.index[row, node]])
            lone.commit(range(1), [[0]])
        for one, other in zip(states_of(cache), states_of(lone), strict=True):
            assert torch.equal(one[row], other[0])


def test_steps_that_depend_on_other_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight heads are less than PyTorch computes at once: their gates are others in a batch."""
    target = tiny.target("qwen3_5")
    forwards = [found for part in target.model.modules() if (found := ByLevels.of(part)) is not None]
    others = [found for part in tiny.target("lfm2").model.modules() if (found := ByLevels.of(part)) is not None]
    assert forwards
    assert others
    assert all(forward.alone for forward in forwards)
    assert not any(forward.alone for forward in others)
    steps = Counter[int]()
    run = ModuleSteps._run
    monkeypatch.setattr(
        ModuleSteps, "_run", lambda self, tokens, states: steps.update([len(tokens)]) or run(self, tokens, states)
    )
    cache, roots = filled(target)
    target.verify(cache, range(4), roots, draft(), ())
    assert set(steps) == {1}
