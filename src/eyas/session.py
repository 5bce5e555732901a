"""From options to a loaded target, its drafters and its engines: the only place that makes them. `eyas.load`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.drafters.base import Drafter
from eyas.drafters.loading import make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.engine.controller import make_controller
from eyas.engine.default_tree import default_shape, default_tree, tree_for
from eyas.engine.engine import Engine
from eyas.engine.round import Speculation
from eyas.errors import UsageError
from eyas.options import EngineOptions, TargetOptions
from eyas.runtime import return_freed_memory
from eyas.targets import Target, load_target, load_tokenizer
from eyas.targets.loading import quantize_kv_cache
from eyas.targets.tokenizers import read_chat_template
from eyas.tree import TreeSpec, is_auto, parse_tree
from eyas.types import Limits
from eyas.verify import WalkRule

_DEFAULT = EngineOptions()


class Session:
    """A target and its tokenizer, loaded once, and the factory of their drafters and engines."""

    def __init__(self, target: Target, tokenizer: Any = None, model: str | Path | None = None) -> None:
        """`model` is what the target was loaded from: some methods find their weights there."""
        self.target = target
        self.tokenizer = tokenizer
        self.model = model

    @classmethod
    def open(cls, options: TargetOptions, *, modules: bool = False) -> Session:
        """Load a target as it is served; with `modules`, in a dtype in which its PyTorch modules are fast, too.

        Raises UsageError and ModelError.
        """
        files = options.check()
        template = None if options.chat_template is None else read_chat_template(options.chat_template)
        target = load_target(
            files,
            dtype=options.dtype,
            device=options.device,
            attention=options.attention,
            compiled=options.compiled,
            eager=options.eager,
            quantize=options.quantize,
            keep_panels=options.keep_panels,
            kernels=options.kernels,
            modules=modules,
        )
        quantize_kv_cache(target, options.kv_cache_dtype)
        tokenizer = load_tokenizer(files, template)
        return_freed_memory()
        return cls(target, tokenizer, options.model)

    def drafter(self, options: DrafterOptions) -> Drafter:
        """The drafter for this target. Raises UsageError, CheckpointError and DrafterMismatchError."""
        return make_drafter(options, self.target, self.tokenizer, self.model)

    def engine(self, drafter: Drafter | None = None, options: EngineOptions = _DEFAULT) -> Engine:
        """An engine that speculates with `drafter`; None = plain decoding. For `auto` trees costs are measured first.

        Raises UsageError for a tree that the drafter can't grow, and for costs if it isn't `auto`.
        """
        speculation = controller = None
        if drafter is not None:
            tree = options.tree or default_tree(drafter, self.target.device)
            if isinstance(tree, str) and is_auto(tree):
                most = options.batch_size or 1 if options.limits is None else options.limits.max_running
                lossless = options.rule is None or options.rule.lossless
                controller = make_controller(self.target, drafter, tree, most, options.costs, experienced=lossless)
            elif options.costs is not None:
                raise UsageError(f"`costs=` are measured for `tree=auto`, but here the tree is {tree}: leave them out")
            spec = None if controller else tree_for(drafter, parse_tree(tree) if isinstance(tree, str) else tree)
            around = drafter if options.around is None else options.around(self.target, drafter)
            speculation = Speculation(around, spec, options.coupled)
        return Engine(
            self.target,
            self.tokenizer,
            speculation,
            batch_size=options.batch_size,
            limits=options.limits,
            rule=options.rule,
            controller=controller,
        )

    def fixed_engine(self, drafter: Drafter, options: EngineOptions = _DEFAULT) -> Engine:
        """Like `engine`, with one tree for all rounds: a drafter whose default is `auto` gets its own shape instead."""
        return self.engine(drafter, replace(options, tree=options.tree or default_shape(drafter)))


def open_engine(target: TargetOptions, drafter: DrafterOptions | None, options: EngineOptions) -> Engine:
    """Load a target, and a drafter if one is given, into an engine; all options are checked before anything is loaded.

    Raises ModelError, CheckpointError, DrafterMismatchError, UsageError.
    """
    options.check(drafter is not None)
    if drafter is not None:
        drafter.check()
    session = Session.open(target)
    return session.engine(None if drafter is None else session.drafter(drafter), options)


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
    kv_cache_dtype: str = "auto",
    keep_panels: bool = False,
    kernels: str | None = None,
    draft_weights: str | None = None,
    ignore_config_keys: Collection[str] = (),
    draft_window: str | int | None = None,
    draft_quantize: str | None = None,
    method: str | None = None,
    costs: str | Path | None = None,
    chat_template: str | Path | None = None,
) -> Engine:
    """An engine for `model`, speculating with `draft_model`, or with a `method` that needs no files of its own.

    `draft_model` is a drafter, or a smaller language model that drafts. The parameters become `TargetOptions`,
    `DrafterOptions` and `EngineOptions`, which describe them; docs/api.md has the details.
    Raises ModelError, CheckpointError, DrafterMismatchError, UsageError.
    """
    target = TargetOptions(
        model, dtype, device, attention, compiled, eager, quantize, chat_template, kv_cache_dtype, keep_panels, kernels
    )
    drafter = None
    if draft_model is not None or method is not None:
        ignored = tuple(ignore_config_keys)
        drafter = DrafterOptions(draft_model, method, draft_weights, ignored, draft_window, draft_quantize)
    kept = None if costs is None else Path(costs)
    return open_engine(target, drafter, EngineOptions(tree, coupled, rule, batch_size, limits, kept))
