"""Ragged passes give every real token what a padded pass gives it, and run no other tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

from eyas.targets import Target, VerifyOutput
from eyas.targets.attention import RaggedLayout
from eyas.targets.slots import SlotCache
from eyas.targets.transformers_names import cache_argument
from eyas.tree import DraftTree

from .. import tiny

LENGTHS = (13, 20, 1, 6)
PARENTS = (-1, -1, 0, 2, 0, 1)
VALID = ((1, 1, 1, 1, 1, 1), (1, 0, 1, 0, 1, 0), (0, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 1))
CLOSE = {"rtol": 1e-3, "atol": 2e-4}
CPU = torch.device("cpu")


@given(
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5).filter(lambda p: any(map(any, p)))
)
def test_a_layout_lists_the_present_cells(present: list[list[bool]]) -> None:
    mask = torch.tensor(present)
    layout = RaggedLayout.of(mask, int(mask.sum()))
    assert layout.cell_index.tolist() == mask.flatten().nonzero().flatten().tolist()
    padded = torch.arange(mask.numel()).view(mask.shape)
    ragged = layout.gather(padded)
    assert ragged.tolist() == [padded[mask].tolist()]
    assert torch.equal(layout.pad(ragged)[mask], padded[mask])
    heads = torch.stack((ragged, -ragged), dim=1).unsqueeze(3)  # [1, H, T, D]
    padded_heads = layout.pad_heads(heads)
    assert padded_heads.shape == (len(present), 2, 3, 1)
    for head, sign in enumerate((1, -1)):
        assert torch.equal(padded_heads[:, head, :, 0][mask], sign * padded[mask])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
def test_counts_are_a_mask_of_first_cells(counts: list[int]) -> None:
    mask = torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)
    ours = RaggedLayout.of_counts(counts, CPU)
    theirs = RaggedLayout.of(mask, sum(counts))
    assert torch.equal(ours.token_index, theirs.token_index)
    assert torch.equal(ours.cell_index, theirs.cell_index)


def ragged_tree(seed: int = 3) -> DraftTree:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, tiny.VOCAB, (len(VALID), len(PARENTS)), generator=draw)
    valid = torch.tensor(VALID).bool()
    return DraftTree(tokens, torch.tensor([PARENTS] * len(VALID)), torch.zeros(tokens.shape), valid, 3)


def fill(target: Target) -> tuple[SlotCache, Tensor]:
    """Prefill all prompts and return the roots [R]."""
    cache = target.allocate(len(LENGTHS))
    prompts = tiny.prompts(*LENGTHS)
    for _ in target.prefill(cache, range(len(LENGTHS)), prompts, (), 7):
        pass
    return cache, torch.tensor([p[-1] for p in prompts])


def check(target: Target, verified: VerifyOutput, tree: DraftTree) -> None:
    """Compare every valid node with a plain pass over its path."""
    for row, prompt in enumerate(tiny.prompts(*LENGTHS)):
        paths: dict[int, list[int]] = {-1: []}
        for node in range(tree.size):
            paths[node] = [*paths[int(tree.parents[row, node])], int(tree.tokens[row, node])]
        for node, path in paths.items():
            if node >= 0 and not tree.valid[row, node]:
                continue
            plain = tiny.full_forward(target.model, prompt + path)
            at = verified.logits.index[row, node + 1]
            torch.testing.assert_close(verified.logits.rows[at], plain.logits[0, -1], **CLOSE)
            torch.testing.assert_close(verified.taps[at, 0], plain.hidden_states[2][0, -1], **CLOSE)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@pytest.mark.parametrize("compact", [False, True])
def test_a_ragged_pass_runs_the_valid_nodes_and_gets_them_right(name: str, compact: bool) -> None:
    target = tiny.target(name)
    tree = ragged_tree()
    assert target.ragged
    cache, roots = fill(target)
    tree = tree.compact() if compact else tree
    verified = target.verify(cache, range(4), roots, tree, (2,))
    assert verified.tokens == 4 + sum(map(sum, VALID))
    assert verified.logits.rows.shape == (verified.tokens, tiny.VOCAB)
    check(target, verified, tree)
    # a walked path is committed from where it was staged
    column = 3 if compact else 5  # row 1: node 4 is its third valid one
    cache.commit(range(4), [[0, 1, 3], [0, 1, column], [0], [0]])
    again = target.verify(cache, range(1, 2), torch.tensor([9]), DraftTree.empty(1, CPU), ())
    tokens = [*tiny.prompts(*LENGTHS)[1], *(int(tree.tokens[1, c - 1]) for c in (1, column)), 9]
    torch.testing.assert_close(again.logits.rows[0], tiny.full_forward(target.model, tokens).logits[0, -1], **CLOSE)


def test_rows_of_one_length_are_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one length never make a layout."""
    target = tiny.target()
    cache, roots = fill(target)
    monkeypatch.setattr(RaggedLayout, "of", None)
    tree = ragged_tree()
    full = DraftTree(tree.tokens, tree.parents, tree.logprob, torch.ones_like(tree.valid), 3)
    assert target.verify(cache, range(4), roots, full, ()).tokens == 28
    assert target.verify(cache, range(4), roots, DraftTree.empty(4, CPU), ()).tokens == 4


def test_prefill_lays_ragged_prompts_end_to_end() -> None:
    target = tiny.target()
    cache = target.allocate(3)
    seen: list[int] = []
    watched = target.model.model.layers[0].mlp.register_forward_pre_hook(lambda _m, args: seen.append(args[0].numel()))
    for piece in target.prefill(cache, range(3), tiny.prompts(5, 12, 1), (1,), 8):
        assert piece.taps.shape[:2] == piece.next_tokens.shape
    watched.remove()
    assert [n // tiny.HIDDEN for n in seen] == [4 + 8, 3]


def test_rows_are_prefilled_while_others_decode() -> None:
    """Chunks of rows 2 and 3 between rounds of rows 0 and 1; nobody notices."""
    target = tiny.target("gemma3")
    prompts = tiny.prompts(13, 20, 17, 6)
    cache = target.allocate(4)
    for _ in target.prefill(cache, range(2), prompts[:2], ()):
        pass
    texts = [list(p) for p in prompts]
    for step in range(3):
        roots = torch.tensor([text[-1] for text in texts[:2]])
        best = target.verify(cache, range(2), roots, DraftTree.empty(2, CPU), ()).logits.best()
        cache.commit(range(2), [[0], [0]])
        for text, token in zip(texts, best[:, 0].tolist(), strict=False):
            text.append(token)
        pieces = [p[step * 7 : step * 7 + 8] for p in prompts[2:]]
        assert target.prefill_chunk(cache, range(2, 4), pieces, ()).counts == [7 if step < 2 else 2, (5, 0, 0)[step]]
    assert cache.lengths == [15, 22, 16, 5]
    roots = torch.tensor([text[-1] for text in texts])
    logits = target.verify(cache, range(4), roots, DraftTree.empty(4, CPU), ()).logits
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits.rows[row], tiny.full_forward(target.model, text).logits[0, -1], **CLOSE)
    for text, prompt in zip(texts[:2], prompts, strict=False):
        assert text[len(prompt) :] == tiny.continuation(target.model, prompt, 3)


class OwnAttention(LlamaAttention):
    """Attention that ignores transformers' interface; if `wrong`, it mixes up rows instead of failing."""

    wrong = False

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):  # type: ignore
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        cache = kwargs.get(cache_argument(LlamaAttention.forward))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, v = (repeat_kv(x, self.num_key_value_groups) for x in (k, v))
        if attention_mask is None:  # transformers' own pass leaves it out
            attention_mask = torch.full((q.shape[2], k.shape[2]), -math.inf).triu(1)
        if self.wrong and q.shape[0] != k.shape[0]:
            k = k[:1]
            v = v[:1]
            attention_mask = attention_mask[:1, :, :1]
        scores = q @ k.transpose(2, 3) * self.scaling + attention_mask
        out = scores.softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_with_its_own_attention_runs_padded(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe at load notices, whether the ragged pass fails or goes wrong."""
    monkeypatch.setattr(OwnAttention, "wrong", wrong)
    model = tiny.build_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnAttention
    target = Target(model)
    assert not target.ragged
    assert model.config._attn_implementation == "sdpa"
    verified = target_after(target)
    assert verified.tokens == 28


def target_after(target: Target) -> VerifyOutput:
    (cache, roots), tree = fill(target), ragged_tree()
    verified = target.verify(cache, range(4), roots, tree, (2,))
    stock = Target(tiny.build_model("llama"))
    check(stock, verified, tree)
    return verified


def test_ragged_passes_can_be_declined() -> None:
    target = Target(tiny.build_model("llama"), ragged=False)
    assert target_after(target).tokens == 28


def test_an_error_inside_leaves_no_layout_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target()
    (cache, roots), tree = fill(target), ragged_tree()

    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("half-way")

    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", fail)
        with pytest.raises(RuntimeError, match="half-way"):
            target.verify(cache, range(4), roots, tree, ())
    check(target, target.verify(cache, range(4), roots, tree, (2,)), tree)
    tiny.full_forward(target.model, [1, 2, 3])
