"""Prefill, verify, commit, taps and trace against `transformers`' own pass over one sequence, every architecture."""

from __future__ import annotations

import pytest
import torch

from eyas.targets import Target, VerifyOutput
from eyas.targets.slots import SlotCache
from eyas.tree import DraftTree

from .. import tiny

LENGTHS = (13, 20, 1)
ALL_TAPS = tuple(range(tiny.LAYERS + 1))
PARENTS = [-1, -1, 0, 2, 0, 1]
PATHS = ([], [0], [1], [0, 2], [0, 2, 3], [0, 4], [1, 5])
CLOSE = {"rtol": 1e-3, "atol": 2e-4}


def draft(rows: int, seed: int = 3) -> DraftTree:
    """The same small bushy shape in every row, other tokens."""
    tokens = torch.randint(3, tiny.VOCAB, (rows, len(PARENTS)), generator=torch.Generator().manual_seed(seed))
    return DraftTree(
        tokens, torch.tensor([PARENTS] * rows), torch.zeros(tokens.shape), torch.ones(tokens.shape, dtype=torch.bool), 3
    )


def everywhere(verified: VerifyOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [R, 1 + N, V] and taps [R, 1 + N, A, Ht] of every node, by node index."""
    return verified.logits.rows[verified.logits.index], verified.taps[verified.logits.index]


def fill(target: Target, taps: tuple[int, ...] = ()) -> tuple[SlotCache, list[list[int]]]:
    cache = target.allocate(3)
    prompts = tiny.prompts(*LENGTHS)
    for _ in target.prefill(cache, range(3), prompts, taps):
        pass
    return cache, prompts


@pytest.fixture(params=tiny.ARCHITECTURES)
def target(request: pytest.FixtureRequest) -> Target:
    return tiny.target(request.param)


@pytest.mark.every(3)
def test_every_node_sees_its_own_path_and_nothing_else(target: Target) -> None:
    """Logits and every tap at each node = a plain pass over prompt + path; then again after a ragged commit."""
    cache, prompts = fill(target)
    tree = draft(3)
    verified = target.verify(cache, range(3), torch.tensor([p[-1] for p in prompts]), tree, ALL_TAPS)
    assert verified.logits.rows.shape == (3 * (1 + len(PARENTS)), tiny.VOCAB)
    logits, taps = everywhere(verified)
    for row, prompt in enumerate(prompts):
        for path in PATHS:
            plain = tiny.full_forward(target.model, prompt + [int(tree.tokens[row, i]) for i in path])
            node = path[-1] + 1 if path else 0
            torch.testing.assert_close(logits[row, node], plain.logits[0, -1], **CLOSE)
            # transformers' last entry is after the final norm: boundary n is checked against the trace below
            for boundary in range(tiny.LAYERS):
                expected = plain.hidden_states[boundary][0, -1]
                torch.testing.assert_close(taps[row, node, boundary], expected, **CLOSE)
    kept = ([0, 2], [], [1, 5])
    cache.commit(range(3), [[0, *(i + 1 for i in path)] for path in kept])
    roots = torch.tensor([5, 6, 7])
    again = target.verify(cache, range(3), roots, DraftTree.empty(3, target.device), ())
    for row, (prompt, path) in enumerate(zip(prompts, kept, strict=True)):
        tokens = [*prompt, *(int(tree.tokens[row, i]) for i in path), int(roots[row])]
        torch.testing.assert_close(
            again.logits.rows[row], tiny.full_forward(target.model, tokens).logits[0, -1], **CLOSE
        )


def test_trace_is_a_plain_pass_whatever_the_padding_and_the_head_agrees(target: Target) -> None:
    prompts = tiny.prompts(13, 20, 5)
    padded = torch.tensor([p + [9] * (20 - len(p)) for p in prompts])
    trace = target.trace(padded, torch.tensor([13, 20, 5]), ALL_TAPS)
    for row, prompt in enumerate(prompts):
        plain = tiny.full_forward(target.model, prompt)
        size = len(prompt)
        for boundary in range(tiny.LAYERS):
            torch.testing.assert_close(trace.taps[row, :size, boundary], plain.hidden_states[boundary][0], **CLOSE)
        torch.testing.assert_close(trace.final[row, :size], plain.hidden_states[-1][0], **CLOSE)
        torch.testing.assert_close(target.head(trace.final[row, :size]), plain.logits[0], **CLOSE)
        assert not torch.allclose(trace.taps[row, :size, -1], trace.final[row, :size], atol=1e-2)  # before the norm


def test_long_rows_are_traced_in_chunks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same states as in one pass, and no mask wider than a chunk."""
    rows = tiny.prompts(13, 20, 5)
    padded = torch.tensor([row + [0] * (20 - len(row)) for row in rows])
    whole = target.trace(padded, torch.tensor([13, 20, 5]), ALL_TAPS)
    monkeypatch.setattr("eyas.targets.target.MAX_UNCHUNKED", 19)
    monkeypatch.setattr("eyas.targets.target.CHUNK", 7)
    found = []
    masks = target.masks
    monkeypatch.setattr(target, "masks", lambda *args: found.append(args[3].shape[1]) or masks(*args))
    parts = target.trace(padded, torch.tensor([13, 20, 5]), ALL_TAPS)
    assert found == [7, 7, 6]
    for row, size in enumerate((13, 20, 5)):
        torch.testing.assert_close(parts.taps[row, :size], whole.taps[row, :size], **CLOSE)
        torch.testing.assert_close(parts.final[row, :size], whole.final[row, :size], **CLOSE)


def test_the_boundary_after_the_final_norm_is_what_the_head_reads(target: Target) -> None:
    """Caught in passes of the model and of its base alike."""
    prompt = tiny.prompts(13)[0]
    last = target.final_boundary
    cache = target.allocate(1)
    (piece,) = target.prefill(cache, range(1), [prompt], (1, last))
    verified = target.verify(cache, range(1), torch.tensor(prompt[-1:]), DraftTree.empty(1, target.device), (last,))
    caught = torch.cat((piece.taps[0, :, 1], verified.taps[:, 0]))
    traced = target.trace(torch.tensor([prompt]), torch.tensor([len(prompt)]), (0, last))
    assert torch.equal(traced.taps[:, :, 1], traced.final)
    torch.testing.assert_close(caught, traced.final[0], **CLOSE)
    torch.testing.assert_close(target.head(verified.taps[:, 0]), verified.logits.rows, **CLOSE)


def test_the_last_boundary_is_the_input_of_the_final_norm() -> None:
    target = tiny.target("llama")
    cache, prompts = fill(target)
    caught: list[torch.Tensor] = []
    handle = target.model.model.norm.register_forward_pre_hook(lambda _module, args: caught.append(args[0]))
    verified = target.verify(cache, range(3), torch.tensor([p[-1] for p in prompts]), draft(3), (tiny.LAYERS,))
    handle.remove()
    assert torch.equal(verified.taps[:, 0], caught[0].flatten(0, 1))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prefill_in_pieces_is_prefill_at_once(name: str, chunk: int) -> None:
    target = tiny.target(name)
    taps = (0, 2)
    prompts = tiny.prompts(*LENGTHS)

    def run(width: int) -> tuple[list[list[int]], list[torch.Tensor], torch.Tensor]:
        cache = target.allocate(3)
        tokens: list[list[int]] = [[], [], []]
        states: list[list[torch.Tensor]] = [[], [], []]
        for piece in target.prefill(cache, range(3), prompts, taps, width):
            for row, count in enumerate(piece.counts):
                tokens[row] += piece.next_tokens[row, :count].tolist()
                states[row] += list(piece.taps[row, :count])
        after = target.verify(cache, range(3), torch.tensor([p[-1] for p in prompts]), draft(3), ())
        return tokens, [torch.stack(s) for s in states if s], after.logits.rows

    once = run(512)
    pieces = run(chunk)
    assert once[0] == pieces[0] == [p[1:] for p in prompts]
    for a, b in zip(once[1], pieces[1], strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    torch.testing.assert_close(once[2], pieces[2], **CLOSE)


def test_prefill_continues_a_committed_prefix() -> None:
    target = tiny.target("olmo3")
    prompt = tiny.prompts(20)[0]
    cache = target.allocate(1)
    for part in (prompt[:8], prompt[7:]):
        for _ in target.prefill(cache, range(1), [part], ()):
            pass
    verified = target.verify(cache, range(1), torch.tensor([prompt[-1]]), DraftTree.empty(1, target.device), ())
    torch.testing.assert_close(verified.logits.rows[0], tiny.full_forward(target.model, prompt).logits[0, -1], **CLOSE)


def test_verify_commits_nothing_and_repeats() -> None:
    target = tiny.target("mistral")
    cache, prompts = fill(target)
    roots = torch.tensor([p[-1] for p in prompts])
    tree = draft(3)
    first = target.verify(cache, range(3), roots, tree, ())
    target.verify(cache, range(3), roots, draft(3, seed=8), ())
    assert cache.lengths == [len(p) - 1 for p in prompts]
    assert torch.equal(first.logits.rows, target.verify(cache, range(3), roots, tree, ()).logits.rows)


def test_a_row_is_independent_of_the_others() -> None:
    target = tiny.target("gemma2")
    cache, prompts = fill(target)
    tree = draft(3)
    roots = torch.tensor([p[-1] for p in prompts])
    together = target.verify(cache, range(3), roots, tree, (1,))
    for row in range(3):
        alone = DraftTree(*(t[row : row + 1] for t in (tree.tokens, tree.parents, tree.logprob, tree.valid)), 3)
        single = target.verify(cache, range(row, row + 1), roots[row : row + 1], alone, (1,))
        torch.testing.assert_close(single.logits.rows, everywhere(together)[0][row], **CLOSE)
        torch.testing.assert_close(single.taps, everywhere(together)[1][row], **CLOSE)


def test_taps_leave_no_hooks_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target("llama")

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.model.modules())

    before = hooks()  # transformers leaves some of its own
    cache, _ = fill(target, ALL_TAPS)
    assert hooks() == before

    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("half-way")

    monkeypatch.setattr(target.model.model.norm, "forward", fail)
    with pytest.raises(RuntimeError, match="half-way"):
        target.verify(cache, range(1), torch.tensor([5]), DraftTree.empty(1, target.device), ALL_TAPS)
    assert hooks() == before


def test_moved_and_truncated_slots_go_on_correctly() -> None:
    target = tiny.target("qwen3")
    cache, prompts = fill(target)
    cache.move(1, 2)
    cache.truncate(2, 10)
    tokens = prompts[1][:10]
    verified = target.verify(cache, range(2, 3), torch.tensor([8]), DraftTree.empty(1, target.device), ())
    plain = tiny.full_forward(target.model, [*tokens, 8])
    torch.testing.assert_close(verified.logits.rows[0], plain.logits[0, -1], **CLOSE)
