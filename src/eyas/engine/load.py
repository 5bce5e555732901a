"""`eyas.load`: from the names of a model and a drafter, and options, to an engine."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from eyas.drafters.base import Drafter
from eyas.drafters.loading import open_drafter
from eyas.engine.controller import make_controller
from eyas.engine.engine import Engine
from eyas.engine.round import Speculation
from eyas.errors import UsageError
from eyas.targets import load_target, load_tokenizer
from eyas.targets.tokenizers import read_chat_template
from eyas.tree import TreeSpec, is_auto, parse_tree
from eyas.types import Limits
from eyas.verify import WalkRule

DEFAULT_TREE = "dynamic:5,6,24"
"""For drafters that name no tree of their own: deep rather than wide, small enough to be nearly free to verify."""


def load(
    model: str | Path,
    draft_model: str | Path | None = None,
    *,
    tree: str | TreeSpec | None = None,
    coupled: bool = True,
    rule: WalkRule | None = None,
    batch_size: int | None = None,
    limits: Limits | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attention: str | None = None,
    compiled: bool = False,
    eager: bool = False,
    quantize: str | None = None,
    draft_weights: str | None = None,
    ignore_config_keys: Collection[str] = (),
    draft_window: str | int | None = None,
    draft_quantize: str | None = None,
    method: str | None = None,
    costs: str | Path | None = None,
    chat_template: str | Path | None = None,
) -> Engine:
    """An engine for `model`, speculating with `draft_model`, or with a `method` that needs no files of its own.

    `draft_model` is a drafter, or a smaller language model that drafts (`method` `draft_model`).

    `tree` is a shape such as `chain:4` or `dynamic:6,8,32`; None takes the drafter's own default, which may be `auto`;
    `auto` (or `auto:chain`) measures costs for some seconds and then sizes every round's trees, down to none where
    nothing pays. `costs` is the file that keeps those measurements for the next time; None: one in the user's cache.
    With a `draft_model`, `method` is the kind that it must be; None = whatever the files hold. `draft_window` is the
    number of pairs that the drafter attends to besides its first ones, `auto` or `off`; None is what its config says.
    `draft_quantize` says whether the drafter's weights are in 8 bits, `int8` or `off`; None: where that is faster.
    `rule` replaces the lossless walk. `batch_size` sequences run at once, or what `limits` say. `dtype` `auto` is what
    the checkpoint says, float32 for CPUs that are slow in half precision. `eager` leaves out CUDA graphs. `quantize`
    `int8` keeps the target's weights in 8 bits, on a CPU. `chat_template` is a Jinja file in place of the tokenizer's
    own template.
    Raises ModelError, CheckpointError, DrafterMismatchError, UsageError.
    """
    speculates = draft_model is not None or method is not None
    if not speculates and tree is not None:
        raise UsageError("a tree needs a drafter to grow it: give a draft model, or a method that needs none")
    auto = tree if isinstance(tree, str) and is_auto(tree) else None
    if costs is not None and auto is None:
        raise UsageError("costs are measured for --tree auto only: leave them out, or ask for auto")
    spec = parse_tree(tree) if isinstance(tree, str) and auto is None else None if isinstance(tree, str) else tree
    template = None if chat_template is None else read_chat_template(chat_template)
    target = load_target(
        model, dtype=dtype, device=device, attention=attention, compiled=compiled, eager=eager, quantize=quantize
    )
    tokenizer = load_tokenizer(model, template)
    speculation = controller = None
    if speculates:
        drafter = open_drafter(
            draft_model, target, weights=draft_weights, ignore_config_keys=ignore_config_keys, method=method,
            tokenizer=tokenizer, model=model, window=draft_window, quantize=draft_quantize,
        )  # fmt: skip
        if tree is None and is_auto(drafter.default_tree):
            auto = drafter.default_tree
        if auto is None:
            speculation = Speculation(drafter, tree_for(drafter, spec), coupled)
        else:
            most = limits.max_running if limits is not None else batch_size or 1
            controller = make_controller(target, drafter, auto, most, None if costs is None else Path(costs))
            speculation = Speculation(drafter, None, coupled)
    return Engine(
        target,
        tokenizer,
        speculation,
        batch_size=batch_size,
        limits=limits,
        rule=rule,
        controller=controller,
    )


def tree_for(drafter: Drafter, tree: TreeSpec | None) -> TreeSpec:
    """`tree`, or the drafter's own shape; refused if the drafter can't grow it. Raises UsageError."""
    own = parse_tree(own_shape(drafter))
    spec = tree or own
    if spec.method != own.method:
        raise UsageError(
            "trees lookahead:W,N,G and the method lookahead go together and with nothing else: leave out --tree, or "
            "give one that the method has"
        )
    if spec.max_fanout > drafter.max_fanout:
        raise UsageError(f"the tree asks for {spec.max_fanout} children, the drafter can offer {drafter.max_fanout}")
    if drafter.max_depth is not None and spec.depth > drafter.max_depth:
        raise UsageError(f"the tree is {spec.depth} deep, the drafter guesses {drafter.max_depth} tokens at most")
    return spec


def default_tree(drafter: Drafter) -> str:
    """The name of the tree that a drafter gets if none is asked for; it may be `auto`."""
    return drafter.default_tree or own_shape(drafter)


def own_shape(drafter: Drafter) -> str:
    """The drafter's default tree, or where it has none, or one that a controller sizes, everybody's."""
    if drafter.default_tree is not None and not is_auto(drafter.default_tree):
        return drafter.default_tree
    most = drafter.max_depth
    shallow = most is not None and most < parse_tree(DEFAULT_TREE).depth
    return f"dynamic:{most},6,24" if shallow else DEFAULT_TREE
