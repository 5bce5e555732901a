"""Trials at load: which faster ways of running a model's passes give the same logits as its own padded passes.

A native decoder, ragged rows and CUDA graphs are each used only if they do. Every layer of a native decoder is first
tried alone (`native/layer_trials.py`), so passes only have to show that rows, trees and the cache are right. They may
differ from the model's own passes as much as those change when the inputs of every product are moved by roundings
(`roundings.py`).

Where tokens are routed to experts, rounding may choose another expert for a token, after which all of its states
differ. So such models get several trials, and half of them must agree; no more are run than decide this. Recurrent
layers must give the same logits level by level as the model itself gives token by token.

Shapes: n texts, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from eyas.errors import EyasError, UnsupportedModelError
from eyas.runtime import LOADING, inference
from eyas.targets.architecture import logits_agree
from eyas.targets.attention import intercept, set_attention
from eyas.targets.graphs import PassGraphs
from eyas.targets.kernel_decoder import KernelDecoder
from eyas.targets.native.decoder import NativeDecoder
from eyas.targets.native.experts import NativeExperts
from eyas.targets.native.layer_trials import NativeTrials, TriedDecoder, inputs_as_floats, refusal
from eyas.targets.native.verdicts import Verdict, read_verdict, verdict_file, write_verdict
from eyas.targets.passes import Passes
from eyas.targets.recurrent import TRIED_BATCHES, ByLevels, ModuleSteps
from eyas.targets.roundings import perturbed_by_rounding
from eyas.targets.slots import SlotCache
from eyas.targets.states import RecurrentStates
from eyas.targets.transformers_names import cache_kwargs, cache_of
from eyas.tree import DraftTree

_LOG = logging.getLogger("eyas")
_ROUTED_TRIALS = 8
"""Number of trials for models that route tokens to experts."""
_ROUNDING, _ROUNDING_OF_HALVES = 1e-3, 5e-2
"""Difference of logits that is always allowed, in float32 and in 16 bits, as a share of the greatest logit."""
_ALLOWED_NOISE = 4.0
"""Allowed difference of another way's logits, as a multiple of the change that moved inputs cause."""
_TRIAL_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, EyasError)
"""What a model may raise if it can't be run in another way."""

_PROMPTS = ((3, 1, 4, 1, 5, 9, 2), (6, 5, 3))
"""The two prompts of the check of recurrent states, as distances from its first token."""
_PARENTS = (-1, -1, 0, 0, 2, 1)
_COMMITTED_COLUMNS = ((0, 1, 3, 5), (0, 2))
"""The columns of that check's trees that are committed in each row."""


def choose_passes(target: Passes) -> None:
    """Set `decoder`, `ragged` and `record` of a target, keeping only ways that give the model's own logits.

    A verdict that was reached earlier for the same model on this machine is reused (`native/verdicts.py`).
    """
    native = target.native
    file = verdict_file(target)
    if native is None or file is None:
        _try_passes(target)
        return
    verdict = read_verdict(file, target.num_layers)
    if verdict is not None:
        for layer, rope in zip(native._layers, verdict.ropes, strict=True):
            layer.rope = rope
        target.ragged = verdict.ragged and (verdict.refusal is None or intercept(target.model))
        if verdict.refusal is not None:
            target.decoder = None
            _warn_of_refusal(target, native, verdict.refusal)
        return
    LOADING.info("comparing native passes with the model's own modules")
    refused = _try_passes(target)
    write_verdict(file, Verdict(refused, tuple(layer.rope for layer in native._layers), target.ragged))


def _try_passes(target: Passes) -> str | None:
    """`choose_passes` by trials; returns why an existing native decoder isn't used, or None."""
    with inputs_as_floats(target.model, target.native):
        decoder = target.decoder
        ragged = target.ragged
        own = target.model.config._attn_implementation
        record = target.record
        _set_passes(target)
        target.record = None
        trial = PassTrial(target)
        why = None
        if decoder is not None:
            why = _try_decoder(target, decoder, ragged, trial)
        if target.decoder is None and ragged and intercept(target.model):
            target.ragged = True
            if not trial.passed():
                target.ragged = False
                set_attention(target.model, own)
        if record is not None and target.native is None:
            graphs = PassGraphs(record, uses=1)
            if trial.passed(graphs) and graphs.failure is None:
                target.record = record
            elif graphs.failure is None:
                _LOG.warning(
                    "CUDA graphs of %s give different logits: its passes aren't recorded", type(target.model).__name__
                )
        return why


def _set_passes(target: Passes, decoder: KernelDecoder | None = None, ragged: bool = False) -> None:
    """Run a target's passes by a decoder, or else by its modules."""
    target.decoder = decoder
    target.ragged = ragged


def _try_decoder(target: Passes, decoder: KernelDecoder, ragged: bool, trial: PassTrial) -> str | None:
    """Run passes by a decoder if they are right; otherwise padded passes of the modules, and return why."""
    tried = NativeTrials(decoder) if isinstance(decoder, NativeDecoder) else cast(TriedDecoder, decoder)
    why = _refusal_of_layers(target, tried)
    if why is None:
        _set_passes(target, decoder, ragged)
        if trial.passed():
            return None
        why = "passes give different logits, although each layer agrees"
    _set_passes(target)
    _warn_of_refusal(target, decoder, why)
    return why


def _refusal_of_layers(target: Passes, tried: TriedDecoder) -> str | None:
    """Why a decoder's layers aren't those of the target's modules, or None."""
    try:
        return refusal(target, tried)
    except _TRIAL_ERRORS as error:
        return f"a layer can't be tried alone: {type(error).__name__}: {error}"


def _warn_of_refusal(target: Passes, decoder: KernelDecoder, why: str) -> None:
    _LOG.warning("%s runs its modules, not %s passes: %s", type(target.model).__name__, decoder.name, why)


class PassTrial:
    """Compares logits of other ways to run a target's passes with those of the passes that it runs when this is made.

    Trials are run only as long as they can change the result.
    """

    def __init__(self, target: Passes) -> None:
        self._target = target
        self._attention = target.model.config._attn_implementation
        self._firsts = first_tokens(target)
        self._cache = target.allocate(2)
        self._expected = [_trial(target, self._cache, self._firsts[0])]  # raises what the model's own passes raise
        self._noise = list[float]()

    def passed(self, graphs: PassGraphs | None = None) -> bool:
        """Whether passes as the target runs them now work, and at least half give each token's logits up to noise.

        Passes are recorded in `graphs`, if given.
        """
        gaps = list[Tensor]()
        try:
            cache = self._target.allocate(2)
            cache.graphs = graphs
        except _TRIAL_ERRORS:
            return False
        for number, first in enumerate(self._firsts):
            try:
                found = _trial(self._target, cache, first)
            except _TRIAL_ERRORS:
                return False
            if number == len(self._expected):
                self._expected.append(self._reference(first))
            gaps.append(_gaps(found, self._expected[number]))
            if self._agree(torch.stack(gaps)):
                return True
        return False

    def _agree(self, gaps: Tensor) -> bool:
        """Whether `gaps` [trials, 4] of the first trials suffice; measuring more noise can only allow larger gaps."""
        rounding = _ROUNDING if self._target.dtype == torch.float32 else _ROUNDING_OF_HALVES
        while 2 * len(gaps) >= len(self._firsts):
            allowed = rounding + _ALLOWED_NOISE * max(self._noise, default=0.0)
            if bool((2 * (gaps <= allowed).sum(0) >= len(self._firsts)).all()):
                return True
            number = len(self._noise)
            if number >= len(gaps):
                break
            with perturbed_by_rounding(self._target.layers, self._target.dtype, number):
                moved = self._reference(self._firsts[number])
            self._noise.append(float(_gaps(moved, self._expected[number]).max()))
        return False

    def _reference(self, first: int) -> Tensor:
        """Logits [4, V] of a trial of the passes to compare with; then the target runs as before."""
        target, attention = self._target, self._target.model.config._attn_implementation
        decoder = target.decoder
        ragged = target.ragged
        _set_passes(target)
        _attend(target, self._attention)
        try:
            return _trial(target, self._cache, first)
        finally:
            _set_passes(target, decoder, ragged)
            _attend(target, attention)


def _attend(target: Passes, name: str) -> None:
    if target.model.config._attn_implementation != name:
        set_attention(target.model, name)


def first_tokens(target: Passes) -> list[int]:
    """The first token of each trial: several where tokens are routed to experts, of which half must then agree."""
    routed = any(
        isinstance(part, NativeExperts) or any(weight.dim() == 3 for weight in part.parameters(recurse=False))
        for part in target.layers.modules()
        if not isinstance(part, nn.Conv1d)
    )
    return [target.vocab_size // 2 + 4 * number for number in range(_ROUTED_TRIALS if routed else 1)]


def half_agree(trials: Iterable[bool], count: int) -> bool:
    """Whether at least half of `count` trials agree; stops once that is decided."""
    agree = 0
    for number, agrees in enumerate(trials, 1):
        agree += agrees
        if 2 * agree >= count or 2 * (number - agree) > count:
            break
    return 2 * agree >= count


def _gaps(found: Tensor, expected: Tensor) -> Tensor:
    """[4] differences of the logits [4, V] of a trial's tokens, as shares of its greatest logit."""
    tiny = torch.finfo(torch.float32).tiny
    return (found - expected).abs().amax(1) / expected.abs().amax().clamp(min=tiny)


@inference
def _trial(target: Passes, cache: SlotCache, first: int) -> Tensor:
    """Logits [4, V] of a pass that verifies the last of four and of two tokens; the first row has a draft of two."""
    rows = range(2)
    for slot in rows:
        cache.truncate(slot, 0)
    tokens = (torch.arange(first, first + 4, device=target.device) % target.vocab_size).view(2, 2)
    valid = torch.tensor([[True, True], [False, False]], device=target.device)
    tree = DraftTree(tokens, tokens.new_tensor([[-1, 0]] * 2), valid.float(), valid, 2, counted=2)
    recorded = cache.graphs is not None
    prompts = [tokens[0].tolist() * 2, tokens[1].tolist()]
    chunk = 2 if recorded else 512
    for _ in target.prefill(cache, rows, prompts, (), chunk):
        if recorded:  # with other lengths and roots than in the pass whose logits are compared
            target.verify(cache, rows, tokens[:, 0], tree, ())
    done = target.verify(cache, rows, tokens[:, 1], tree, ())
    return done.logits.rows[done.logits.index[[0, 0, 0, 1], [0, 1, 2, 0]]].float()  # not the second row's nodes


@inference
def find_odd_steps(target: Passes) -> None:
    """Make recurrent modules run each token alone if their step gives it other bits in a batch.

    PyTorch computes an elementwise function in vectors of 128 bytes, and the remainder by another formula. Matrix
    products may be summed in an order that depends on the number of rows. A guess must get the bits of plain decoding.
    """
    cache = target.allocate(1)
    device = target.device
    count = max(TRIED_BATCHES)
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
        if (forward := ByLevels.of(module)) is not None:
            forward.alone = type(module) in odd


@inference
def check_states(target: Passes) -> None:
    """Raise UnsupportedModelError if prompts in pieces or a branching tree give other logits than the model itself.

    The model's own passes run single tokens over transformers' cache, which is copied where paths branch. After the
    tree, a path of each row is committed, and one more token is run.
    """
    firsts = first_tokens(target)
    if not half_agree((_states_agree(target, first) for first in firsts), len(firsts)):
        raise UnsupportedModelError(
            f"{target.config.model_type} has recurrent layers that give different logits level by level than token by "
            "token, so draft trees can't be verified; use another model"
        )


def _states_agree(target: Passes, first: int) -> bool:
    """Whether a trial's logits are as near to the model's own, token by token, as rounding allows.

    The allowed distance is that of its whole passes when the inputs of every product are moved by roundings.
    """
    found, paths = _states_trial(target, first)
    expected = _by_steps(target, paths)
    if logits_agree(found, expected, target.dtype):
        return True
    with perturbed_by_rounding(target.layers, target.dtype):
        whole = [target.model(input_ids=_row(target, path), use_cache=False).logits[0, -1] for path in paths]
    return float((found - expected).abs().max()) <= _ALLOWED_NOISE * float((torch.stack(whole) - expected).abs().max())


def _states_trial(target: Passes, first: int) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Logits of all nodes of a tree and of a token after the committed path, with the text up to each of them."""

    def ids(offsets: Sequence[int]) -> tuple[int, ...]:
        return tuple((first + offset) % target.vocab_size for offset in offsets)

    rows = range(2)
    cache = target.allocate(2)
    device = target.device
    prompts = [ids(offsets) for offsets in _PROMPTS]
    last = ids((8, 2))
    for _ in target.prefill(cache, rows, prompts, (), 2):
        pass
    guesses = [ids(range(7 * row, 7 * row + len(_PARENTS))) for row in rows]
    tokens, parents = torch.tensor([guesses, [_PARENTS] * 2], device=device)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, -1] = False
    tree = DraftTree(tokens, parents, valid.float(), valid, 3, counted=int(valid.sum()))
    roots = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    of_nodes = target.verify(cache, rows, roots, tree, ()).logits
    cache.commit(rows, _COMMITTED_COLUMNS)
    after = target.verify(cache, rows, torch.tensor(last, device=device), DraftTree.empty(2, device), ()).logits.rows

    found = list[Tensor]()
    paths = list[tuple[int, ...]]()
    for row, prompt in enumerate(prompts):
        texts = [prompt]
        for parent, token in zip(_PARENTS, guesses[row], strict=True):
            texts.append((*texts[parent + 1], token))
        nodes = [node for node in range(len(texts)) if not node or valid[row, node - 1]]
        found += [*(of_nodes.rows[of_nodes.index[row, node]] for node in nodes), after[row]]
        paths += [*(texts[node] for node in nodes), (*texts[_COMMITTED_COLUMNS[row][-1]], last[row])]
    return torch.stack(found), paths


def _by_steps(target: Passes, paths: Sequence[tuple[int, ...]]) -> Tensor:
    """Logits [n, V] after each path, from the model's own passes over single tokens; branches copy its cache."""
    outputs: dict[tuple[int, ...], Any] = {}
    positioned = "position_ids" in signature(type(target.model).forward).parameters

    def after(path: tuple[int, ...]) -> Any:
        if path not in outputs:
            before = after(path[:-1]) if len(path) > 1 else None
            cache = None if before is None else cache_of(before)
            if path[:-1] in paths:  # others may continue there
                cache = copy.deepcopy(cache)
            kept = {} if before is None else cache_kwargs(target.model, cache)
            where = {"position_ids": _row(target, [len(path) - 1])} if positioned else {}
            outputs[path] = target.model(input_ids=_row(target, path[-1:]), use_cache=True, **kept, **where)
            if path[:-1] not in paths:  # states are large
                outputs.pop(path[:-1], None)
        return outputs[path]

    return torch.stack([after(path).logits[0, -1] for path in paths])


def _row(target: Passes, numbers: Sequence[int]) -> Tensor:
    return torch.tensor([list(numbers)], device=target.device)
