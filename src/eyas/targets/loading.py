"""Load a target from a local directory or a Hub id, or the embedded one by the name `demo`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from eyas.assets import named_target
from eyas.errors import ModelError, UsageError
from eyas.runtime import keep_freed_memory, use_huge_pages
from eyas.targets.architecture import causal_lm_class, refuse_unsupported
from eyas.targets.linears import can_pack, merge_siblings, pack_linears
from eyas.targets.target import Target

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str | torch.dtype) -> torch.dtype:
    """`float32`, `bfloat16` or `float16`."""
    if isinstance(name, torch.dtype):
        return name
    if name not in _DTYPES:
        raise UsageError(f"unknown dtype {name!r}: write one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def resolve_device(name: str | torch.device | None) -> torch.device:
    """The named device, or the accelerator if there is one, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {name!r}: write cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA device; use --device cpu")
    return device


def load_target(
    model: str | Path,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    attention: str | None = None,
    compiled: bool = False,
    packed: bool | None = None,
) -> Target:
    """Load a decoder LM unpatched. `attention` is transformers' `attn_implementation`; flash kernels take no trees.

    `packed` lays linear weights out for the CPU's kernels; None does so where there are such kernels, but not for a
    compiled model: the compiler brings its own and refuses these.
    """
    keep_freed_memory()
    if attention not in (None, "sdpa", "eager"):
        raise UsageError(f"attention {attention!r} can't mask a tree: use sdpa or eager")
    torch_dtype, torch_device = resolve_dtype(dtype), resolve_device(device)
    name = named_target(model)
    config = read_config(name)
    known = causal_lm_class(config)
    if known is not None:
        refuse_unsupported(known, config)
    loaded = read_model(name, config, torch_dtype, attention)
    loaded = loaded.to(torch_device).eval().requires_grad_(False)
    if packed and compiled:
        raise UsageError("a compiled target can't be packed as well: choose one")
    if not compiled and can_pack(torch_device, torch_dtype) if packed is None else packed:
        pack_linears(loaded)
        merge_siblings(loaded, lambda: _trial(loaded))
    if torch_device.type == "cpu":
        use_huge_pages()
    target = Target(loaded, packs=not compiled)  # a compiled graph would be made anew for every layout
    if compiled:
        target.model.forward = torch.compile(target.model.forward, dynamic=True)
    return target


def _trial(model: Any) -> Tensor:
    """Logits [2, 3, V] of two short rows, as transformers runs them."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = (torch.arange(6, device=model.device).view(2, 3) + vocabulary // 2) % vocabulary
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def read_model(name: str, config: Any, dtype: torch.dtype, attention: str | None = None) -> Any:
    """The transformers model that `config` describes, from the weights of `name`; ModelError if any are missing."""
    try:
        loaded, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"can't load the target {name}: {error}") from error
    if report["missing_keys"]:  # transformers would fill them with random numbers and go on
        missing = ", ".join(sorted(report["missing_keys"])[:5])
        raise ModelError(f"{name} lacks {len(report['missing_keys'])} of the target's tensors ({missing} ...)")
    return loaded


def read_config(name: str) -> Any:
    """The transformers config of a local directory or Hub id."""
    try:
        return AutoConfig.from_pretrained(named_target(name))
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        where = "" if Path(name).is_dir() else " (it is no local directory, so it was taken for a Hub id)"
        raise ModelError(f"can't read a model config at {name}{where}: {error}") from error


def load_tokenizer(name: str | Path) -> Any:
    """The model's tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(named_target(name))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"can't load the tokenizer of {name}: {error}") from error


# The two ends of a target, embedding and head, without what lies between: all that training from a store needs.
#
# transformers builds the model with its first layer only and reads no other tensors, so a 32B target takes about 2 GB.


class TargetEnds(Target):
    """Sizes, embedding and head of a target; passing tokens through it would mean nothing."""


def load_ends(model: str | Path, *, dtype: str | torch.dtype, device: str | torch.device | None = None) -> TargetEnds:
    """Load embedding, final norm and head. ModelError as `load_target`."""
    name = named_target(model)
    config = read_config(name)
    short = _shortened(config)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list the layers left out
    try:
        loaded = read_model(name, short, resolve_dtype(dtype))
    finally:
        logging.set_verbosity(verbosity)
    ends = TargetEnds(loaded.to(resolve_device(device)).eval().requires_grad_(False))
    ends.config = config.get_text_config()
    ends.num_layers = ends.config.num_hidden_layers
    return ends


def _shortened(config: Any) -> Any:
    """A copy that has one layer; lists with an entry a layer keep their first."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    layers = text.num_hidden_layers
    for key, value in text.to_dict().items():
        if isinstance(value, list | tuple) and len(value) == layers and key != "architectures":
            setattr(text, key, value[:1])
    text.num_hidden_layers = 1
    return short
