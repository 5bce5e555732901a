"""Trials at load of recurrent layers: level by level they must give what the model itself gives token by token.

Shapes: n texts, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.architecture import logits_agree
from eyas.targets.passes import Passes
from eyas.targets.recurrent import TOGETHER, ModuleSteps, StateModule
from eyas.targets.roundings import moved_by_roundings
from eyas.targets.states import RecurrentStates
from eyas.targets.transformers_names import cache_of, given
from eyas.targets.trials import first_tokens
from eyas.tree import DraftTree

_PROMPTS = ((3, 1, 4, 1, 5, 9, 2), (6, 5, 3))
"""Two prompts of the check, as distances from its first token."""
_PARENTS = (-1, -1, 0, 0, 2, 1)
_NOISE = 4.0
"""How many times as far as whole passes that roundings move other logits may be from those of the model's steps."""
_KEPT = ((0, 1, 3, 5), (0, 2))
"""The columns of the check's tree that are committed in each row."""


@torch.inference_mode()
def find_odd_steps(target: Passes) -> None:
    """Let recurrent modules run each token alone whose step gives other bits for it among others.

    PyTorch computes 128 bytes of an elementwise function at once, and what is left over by another formula; matrix
    products may add up in an order that depends on their number. A guess must be what it is in plain decoding.
    """
    cache, device = target.allocate(1), target.device
    count = max(TOGETHER)
    tokens = (torch.arange(count, device=device).unsqueeze(0) * 7 + target.vocab_size // 2) % target.vocab_size
    target.prefill_chunk(cache, range(1), tokens.tolist(), ())
    valid = torch.ones_like(tokens, dtype=torch.bool)
    tree = DraftTree(tokens, torch.full_like(tokens, -1), valid.float(), valid, 1, counted=count)
    target.verify(cache, range(1), tokens[:, 0], tree, ())
    assert isinstance(cache.states, RecurrentStates)
    odd = set[type[nn.Module]]()
    for steps in cache.states.pending:
        assert isinstance(steps, ModuleSteps)
        if type(steps.module) not in odd and steps.odd(cache.states):
            odd.add(type(steps.module))
    for module in target.layers.modules():
        if isinstance(module, StateModule):
            module.alone = type(module) in odd


@torch.inference_mode()
def check_states(target: Passes) -> None:
    """Raise UnsupportedModelError where prompts in pieces and a branching tree give other logits than the model itself.

    The model's own passes are single tokens over transformers' cache, which is copied where paths branch. After the
    tree a path of each row is committed, and a token after it is run.
    """
    trials = first_tokens(target)
    wrong = sum(not _states_agree(target, first) for first in trials)
    if 2 * wrong > len(trials):
        raise UnsupportedModelError(
            f"{target.config.model_type} has recurrent layers that give other logits level by level than token by "
            "token, so trees of guesses can't be verified; use another model"
        )


def _states_agree(target: Passes, first: int) -> bool:
    """Whether a trial's logits are the model's own token by token, as nearly as those are moved whole passes'.

    In these the inputs of every product are moved by roundings.
    """
    found, paths = _states_trial(target, first)
    expected = _by_steps(target, paths)
    if logits_agree(found, expected, target.dtype):
        return True
    with moved_by_roundings(target.layers, target.dtype):
        whole = [target.model(input_ids=_row(target, path), use_cache=False).logits[0, -1] for path in paths]
    return float((found - expected).abs().max()) <= _NOISE * float((torch.stack(whole) - expected).abs().max())


def _states_trial(target: Passes, first: int) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Logits of all nodes of a tree and of a token after a committed path, and the text up to each."""

    def ids(offsets: Sequence[int]) -> tuple[int, ...]:
        return tuple((first + offset) % target.vocab_size for offset in offsets)

    rows, cache, device = range(2), target.allocate(2), target.device
    prompts, last = [ids(offsets) for offsets in _PROMPTS], ids((8, 2))
    for _ in target.prefill(cache, rows, prompts, (), 2):
        pass
    guesses = [ids(range(7 * row, 7 * row + len(_PARENTS))) for row in rows]
    tokens, parents = torch.tensor([guesses, [_PARENTS] * 2], device=device)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, -1] = False
    tree = DraftTree(tokens, parents, valid.float(), valid, 3, counted=int(valid.sum()))
    roots = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    of_nodes = target.verify(cache, rows, roots, tree, ()).logits
    cache.commit(rows, _KEPT)
    after = target.verify(cache, rows, torch.tensor(last, device=device), DraftTree.empty(2, device), ()).logits.rows

    found, paths = list[Tensor](), list[tuple[int, ...]]()
    for row, prompt in enumerate(prompts):
        texts = [prompt]
        for parent, token in zip(_PARENTS, guesses[row], strict=True):
            texts.append((*texts[parent + 1], token))
        nodes = [node for node in range(len(texts)) if not node or valid[row, node - 1]]
        found += [*(of_nodes.rows[of_nodes.index[row, node]] for node in nodes), after[row]]
        paths += [*(texts[node] for node in nodes), (*texts[_KEPT[row][-1]], last[row])]
    return torch.stack(found), paths


def _by_steps(target: Passes, paths: Sequence[tuple[int, ...]]) -> Tensor:
    """Logits [n, V] after each path, of the model's own passes over single tokens; its cache is copied at branches."""
    outputs: dict[tuple[int, ...], Any] = {}
    positioned = "position_ids" in signature(type(target.model).forward).parameters

    def after(path: tuple[int, ...]) -> Any:
        if path not in outputs:
            before = after(path[:-1]) if len(path) > 1 else None
            kept = {} if before is None else given(target.model, copy.deepcopy(cache_of(before)))
            where = {"position_ids": _row(target, [len(path) - 1])} if positioned else {}
            outputs[path] = target.model(input_ids=_row(target, path[-1:]), use_cache=True, **kept, **where)
            if path[:-1] not in paths:  # states are large
                outputs.pop(path[:-1], None)
        return outputs[path]

    return torch.stack([after(path).logits[0, -1] for path in paths])


def _row(target: Passes, numbers: Sequence[int]) -> Tensor:
    return torch.tensor([list(numbers)], device=target.device)
