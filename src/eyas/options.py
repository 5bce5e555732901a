"""The options of a target and an engine, checked before anything is loaded.

Nothing here needs torch. A drafter's are `eyas.drafters.options.DrafterOptions`; `eyas.session` builds the objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING

from eyas.errors import UsageError
from eyas.hub import ModelFiles, find_target
from eyas.tree import is_auto
from eyas.tree.spec import read_tree

if TYPE_CHECKING:
    import torch

    from eyas.drafters.base import Drafter
    from eyas.engine.controller import CostTable
    from eyas.targets import Target
    from eyas.tree import TreeSpec
    from eyas.types import Limits
    from eyas.verify import WalkRule


@dataclass(frozen=True)
class TargetOptions:
    """Which target, and how it is run; values as in `eyas.targets.load_target`."""

    model: str | Path
    dtype: str | torch.dtype = "auto"
    device: str | torch.device | None = None
    attention: str | None = None
    compiled: bool = False
    eager: bool = False
    quantize: str | None = None
    chat_template: str | Path | None = None
    """A Jinja file in place of the tokenizer's own template."""
    kv_cache_dtype: str = "auto"
    keep_panels: bool = False
    """Whether packed weights are kept on disk, laid out for this processor, for later loads to map."""
    kernels: str | None = None

    def check(self) -> ModelFiles:
        """Reject bad options before anything is loaded; returns the target's files.

        Raises UsageError, MissingModelError and ModelError.
        """
        check_device(self.device)
        if self.kv_cache_dtype not in ("auto", "int8"):
            raise UsageError(f"unknown KV cache dtype {self.kv_cache_dtype!r}: write auto or int8")
        if self.kernels not in (None, "triton"):
            raise UsageError(f"unknown kernels {self.kernels!r}: write triton, or leave them out")
        if self.kernels is not None and (self.compiled or self.attention is not None):
            raise UsageError("`kernels=triton` replaces the model's modules: leave out `compiled=` and `attention=`")
        if self.kernels is not None and str(self.device) == "cpu":
            raise UsageError("`kernels=triton` runs on a GPU: leave out `device=cpu`")
        modules = self.compiled or self.attention is not None or str(self.device).startswith("cuda")
        if self.kv_cache_dtype != "auto" and (modules or self.kernels is not None):
            raise UsageError(
                "`kv_cache_dtype=int8` needs native passes, on a CPU: leave out `device=`, `kernels=`, `compiled=` and "
                "`attention=`"
            )
        if self.quantize is not None and self.compiled:
            raise UsageError("`quantize=` needs eyas's own kernels, which aren't compiled: leave out `compiled=`")
        if self.eager and (self.compiled or str(self.device) == "cpu"):
            raise UsageError("a CPU and a compiled target have no CUDA graphs to turn off: leave out `eager=`")
        return find_target(self.model)


def check_device(device: object) -> None:
    """Raise UsageError for a malformed device name; whether the device exists is checked later."""
    if device is not None and not fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise UsageError(f"unknown device {device!r}: write cpu, cuda or cuda:N")


@dataclass(frozen=True)
class EngineOptions:
    """How an engine drafts, accepts and batches."""

    tree: str | TreeSpec | None = None
    """A shape such as `chain:4`, `auto`, or None for the drafter's own default, which may be `auto`."""
    coupled: bool = True
    """Whether candidates are ranked with the sampler's noise."""
    rule: WalkRule | None = None
    """Replaces the lossless walk."""
    batch_size: int | None = None
    """Sequences decoded together; can't be combined with `limits`."""
    limits: Limits | None = None
    costs: Path | CostTable | None = None
    """For `auto`: measured costs, or the file that stores them; None = a file in the user's cache."""
    around: Callable[[Target, Drafter], Drafter] | None = None
    """Wraps the drafter that decodes, after costs were measured without the wrapper."""

    def check(self, drafts: bool) -> None:
        """Reject options that contradict each other, or need a drafter if nothing `drafts`. Raises UsageError."""
        if self.tree is not None and not drafts:
            raise UsageError("a tree needs a drafter to grow it: give a draft model, or a method that needs none")
        auto = isinstance(self.tree, str) and is_auto(self.tree)
        if self.costs is not None and not (auto or (drafts and self.tree is None)):
            raise UsageError("`costs=` are measured for `tree=auto` only: leave them out, or ask for auto")
        if isinstance(self.tree, str) and not auto:
            read_tree(self.tree)
