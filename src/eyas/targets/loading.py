"""Loading a target, or its embedding and head alone, from a local directory, from a Hub id, or as a GGUF file."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils import logging as transformers_logging

from eyas.cache.entries import files_hash
from eyas.errors import MissingModelError, ModelError, UnsupportedModelError, UsageError
from eyas.hub import ModelFiles, find_target, why_unreadable
from eyas.machine import cpu_computes_in, report_slow
from eyas.runtime import keep_freed_memory, release_mapped_file, use_huge_pages
from eyas.targets.adapters import check_peft, merge_adapter
from eyas.targets.architecture import auto_class, logits_agree, model_class, refuse_unsupported
from eyas.targets.gguf_check import check_model
from eyas.targets.gguf_weights import read_weights, stored_dtype
from eyas.targets.graphs import CudaRecorder, Record
from eyas.targets.kernel_decoder import KernelDecoder
from eyas.targets.linears import PrepackedLinear, prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.decoder import NativeDecoder
from eyas.targets.native.experts import replace_experts
from eyas.targets.native.layouts import best_layout
from eyas.targets.native.library import kernels as native_kernels
from eyas.targets.native.linears import NativeLinear, as_linear
from eyas.targets.native.packed import PackedWeight, WeightFormat
from eyas.targets.native.packed_linears import Int4Linear, Int8Linear, PackedEmbedding, PackedLinear, sums_codes
from eyas.targets.native.panel_files import cached_panels
from eyas.targets.parameters import weight_formats
from eyas.targets.passes import EmbeddingAndHead
from eyas.targets.quantization import (
    dequantize_at_load,
    finish_dequantized,
    own_settings,
    quantized_by,
    refuse_quantization,
)
from eyas.targets.quantized_weights import read_quantized, weight_files
from eyas.targets.target import Target
from eyas.targets.tokenizers import read_generation_config
from eyas.targets.trials import first_tokens, half_agree
from eyas.targets.triton import why_unusable
from eyas.tree import DraftTree

if TYPE_CHECKING:  # importing it imports triton
    from eyas.targets.triton.decoder import TritonDecoder

_LOG = logging.getLogger("eyas")
_MAX_LAYERS = 10_000
_NO_KERNEL = "nothing here multiplies by them as they are"
_QUANTIZED: dict[str, type[Int8Linear]] = {"int8": Int8Linear, "int4": Int4Linear}


def load_target(
    model: str | Path | ModelFiles,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    attention: str | None = None,
    compiled: bool = False,
    eager: bool = False,
    prepacked: bool | None = None,
    quantize: str | None = None,
    keep_panels: bool = False,
    kernels: str | None = None,
    modules: bool = False,
    drafts: bool = False,
) -> Target:
    """Load a decoder LM, with unpatched model code, in a `dtype` that `resolve_dtype` accepts.

    `auto` differs from `resolve_dtype` in two cases. It is bfloat16 even on a CPU that is slow in it, if the model's
    passes are native. And weights of a GGUF, AWQ, GPTQ or compressed-tensors checkpoint stay in 4 and 8 bits where
    there are kernels for them; float16 values in the latter three become float32, which holds them exactly.

    `attention` is transformers' `attn_implementation`, sdpa or eager: flash kernels can't mask a tree. `compiled` runs
    the model through `torch.compile`. On a GPU, passes over few tokens are CUDA graphs unless `compiled` or `eager`.
    `prepacked` packs the weights of linears for the CPU's kernels; None does so where there are such kernels, unless
    the model is compiled, because the compiler has its own layout and refuses these.
    `quantize` `int8` or `int4` keeps the weights of linears in 8 or 4 bits, and the head in 8: on a CPU with native
    kernels, where the embedding is in 8 bits too and inputs of products are rounded to 8, or in Triton. `keep_panels`
    keeps weights in 4 and 8 bits in the user's cache as the native kernels read them, so that later loads map them
    instead of packing or quantizing them again.
    `kernels` `triton` runs the passes of a Llama-like model by eyas's own kernels on a GPU: a token has the same bits
    whatever is verified with it. `modules` makes `auto` the dtype of `resolve_dtype`, in which modules are fast, too.
    `drafts` says that the model only drafts: the native kernels then read packed weights of more than 4 bits in 4,
    because errors only change guesses.

    Raises UsageError for bad options, ModelError for unreadable or incomplete checkpoints, and UnsupportedModelError,
    before any weight is read, for models that can't verify trees.
    """
    keep_freed_memory()
    if attention not in (None, "sdpa", "eager"):
        raise UsageError(f"attention {attention!r} can't mask a tree: use sdpa or eager")
    if kernels not in (None, "triton"):
        raise UsageError(f"unknown kernels {kernels!r}: write triton, or leave them out")
    if kernels is not None and (compiled or attention is not None):
        raise UsageError("kernels in Triton replace a model's modules: leave out `compiled=` and `attention=`")
    if prepacked and compiled:
        raise UsageError("a target can't be both compiled and prepacked: choose one")
    if quantize is not None and quantize not in _QUANTIZED:
        raise UsageError(f"unknown quantization {quantize!r}: write int8 or int4, or load a quantized checkpoint")
    torch_device = resolve_device(device)
    unusable = why_unusable(torch_device) if kernels is not None else None
    if unusable is not None:
        raise UsageError(f"{unusable}, or leave out `kernels=`")
    files = model if isinstance(model, ModelFiles) else find_target(model)
    lacking = torch_device.type != "cpu" or compiled or prepacked is False or native_kernels() is None
    if quantize and kernels is None and lacking:
        raise UsageError(
            f"{quantize} weights need eyas's native kernels: a CPU with AVX2, a C++ compiler, and no `compiled=`; on a "
            "GPU add `kernels=triton`, or load a checkpoint quantized by torchao, AWQ or GPTQ"
        )
    if eager and (torch_device.type != "cuda" or compiled):
        raise UsageError("a CPU and a compiled target have no CUDA graphs to turn off: leave out `eager=`")
    config = read_config(files)
    refuse_unsupported(model_class(config), config)
    stored = dequantize_at_load(config, torch_device)
    method = quantized_by(config)
    if quantize and (method or own_settings(config)):
        raise UsageError(f"{files} is quantized by {method or stored} already: leave quantize out")
    packing = not compiled if prepacked is None else prepacked
    if modules:
        dtype = _dtype_in_use(dtype, files, config, torch_device)
    own_kernels = dtype == "auto" and packing and attention is None and method is None
    on_cpu = torch_device.type == "cpu"
    packs = own_kernels and quantize is None and on_cpu and native_kernels() is not None and sums_codes()
    if stored is not None and not (packs and own_settings(config)):
        why = "they stay packed with dtype auto, on a CPU with eyas's kernels" if own_settings(config) else _NO_KERNEL
        _LOG.warning("the %s weights of %s are dequantized: %s", stored, files, why)

    def loaded_in(chosen: torch.dtype) -> Target:
        how = f"{chosen} {attention} {quantize} {packing} {packs}"
        with cached_panels(keep_panels, lambda: f"{files_hash(_files_of(files))} {how}"):
            loaded = read_model(files, config, chosen, attention, packs=packs)
            loaded = loaded.to(torch_device).eval().requires_grad_(False)
            if drafts:
                _narrow(loaded)
            decoder: KernelDecoder | None = None
            if kernels is not None:
                decoder = _for_triton(loaded, quantize)
            elif packing:
                decoder = _prepack(loaded, torch_device, chosen, attention, quantize)
        if on_cpu and decoder is None:  # the native kernels' weights are there already
            use_huge_pages()
        make = Target if auto_class(config) is AutoModelForCausalLM else _text_target
        record = CudaRecorder(torch_device) if torch_device.type == "cuda" and not (compiled or eager) else None
        # a compiled model would be compiled again for every ragged layout
        made = make(loaded, ragged=not compiled, decoder=decoder, record=record)
        if kernels is not None and made.decoder is None:
            raise UnsupportedModelError(
                f"kernels in Triton don't compute what the modules of {type(loaded).__name__} do, as the last warning "
                "says: leave out `kernels=`"
            )
        return made

    if own_kernels and _half_may_be_native(files, config, torch_device):
        target = loaded_in(torch.bfloat16)
        if target.native is not None:
            return target
    chosen = _dtype_in_use(dtype, files, config, torch_device)
    target = loaded_in(torch.float32 if packs and own_settings(config) and chosen == torch.float16 else chosen)
    if compiled:
        target.model.forward = torch.compile(target.model.forward, dynamic=True)
    return target


def quantize_kv_cache(target: Target, kv_cache_dtype: str) -> None:
    """Keep a target's keys and values in 8 bits if `kv_cache_dtype` is `int8`, in its own dtype if it is `auto`.

    Raises UnsupportedModelError for a target without native passes: the last bits of modules' results depend on a
    pass's shape, and rounding to 8 bits would amplify such differences.
    """
    if kv_cache_dtype == "int8" and target.native is None:
        raise UnsupportedModelError(
            f"an int8 cache needs native passes, but {type(target.model).__name__} runs its modules here: leave out "
            "`kv_cache_dtype=`"
        )
    target.kv_in_codes = kv_cache_dtype == "int8"


def _text_target(model: Any, ragged: bool, decoder: KernelDecoder | None, record: Record | None) -> Target:
    """Make a target of a multimodal model. UnsupportedModelError if `generate` gives it other logits for text."""
    name = type(model).__name__
    try:
        target = Target(model, ragged=ragged, decoder=decoder, record=record)
        firsts = first_tokens(target)
        agrees = (logits_agree(*_text_logits(target, first), target.dtype) for first in firsts)
        same = half_agree(agrees, len(firsts))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise UnsupportedModelError(f"{name} is multimodal and can't run text alone: {error}") from error
    if not same:
        raise UnsupportedModelError(
            f"{name} is multimodal and runs text in another way than its decoder with a causal mask and plain "
            "positions; use a text model"
        )
    return target


@torch.inference_mode()
def _text_logits(target: Target, first: int) -> tuple[Tensor, Tensor]:
    """Logits [2, V] of two tokens after six from `first` on: by verifying a tree, and by `transformers.generate`."""
    tokens = (torch.arange(6, device=target.device).unsqueeze(0) + first) % target.vocab_size
    out = target.model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        trust_remote_code=False,
    )
    cache = target.allocate(1)
    for _ in target.prefill(cache, range(1), tokens.tolist(), ()):
        pass
    drafted = out.sequences[:, 6:7]
    valid = torch.ones_like(drafted, dtype=torch.bool)
    tree = DraftTree(drafted, torch.full_like(drafted, -1), valid.float(), valid, 1, counted=1)
    logits = target.verify(cache, range(1), tokens[:, -1], tree, ()).logits.rows
    return logits, torch.cat(out.logits)


def _half_may_be_native(files: ModelFiles, config: Any, device: torch.device) -> bool:
    """Whether a bfloat16 checkpoint would otherwise run in float32, and native kernels may run it as it is."""
    if best_layout(device, torch.bfloat16) is not NativeLinear:
        return False
    return _checkpoint_dtype(files, config) == torch.bfloat16 and not cpu_computes_in(torch.bfloat16)


def _prepack(
    model: Any, device: torch.device, dtype: torch.dtype, attention: str | None, quantize: str | None
) -> NativeDecoder | None:
    """Pack the weights of a model's linears for this machine; return its native passes, or None."""
    # only eyas's kernels multiply packed weights, so it doesn't matter to them which layout of bfloat16 is the fastest
    layout = best_layout(device, dtype) if weight_formats(model) is None else NativeLinear
    of_experts = NativeLinear if layout is NativeLinear else None
    weights = _matrix_parameters(model)
    if quantize:
        head = model.get_output_embeddings()
        of_experts = inner = _QUANTIZED[quantize]
        prepack_linears(model, lambda linear, **how: (Int8Linear if linear is head else inner)(linear, **how))
        _quantize_embedding(model)
    elif layout is not None:
        prepack_linears(model, layout, dtype)
    if quantize or layout is not None:
        release_mapped_file(model)
    replace_experts(model, of_experts, dtype)
    if quantize:
        _check_quantized(model, quantize, weights)
    return None if of_experts is None or attention is not None else transformers_decoder(model)


def _for_triton(model: Any, quantize: str | None) -> TritonDecoder:
    """A model's passes in Triton, its linears quantized if that is asked for; its embedding stays as it is.

    Raises UnsupportedModelError if the model has no such passes, or can't be quantized.
    """
    from eyas.targets.triton.decoder import triton_decoder  # imports triton, which most machines lack
    from eyas.targets.triton.packed_linears import quantize_linears

    if quantize is not None:
        weights = _matrix_parameters(model)
        quantize_linears(model, quantize)
        _check_quantized(model, quantize, weights)
    return triton_decoder(model)


def _matrix_parameters(model: Any) -> int:
    """The number of values in a model's matrices."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)


def _quantize_embedding(model: Any) -> None:
    """Keep a plain embedding in 8 bits; if it is tied to the head, they share one packed weight."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if type(embedding) is not nn.Embedding:
        return
    if isinstance(head, PackedLinear) and head.tied:
        head.untie()
        model.set_input_embeddings(PackedEmbedding(head))
    else:
        model.set_input_embeddings(PackedEmbedding(Int8Linear(as_linear(embedding.weight), False)))


def _narrow(model: Any) -> None:
    """Read packed linears of more than 4 bits in 4; an embedding that is tied to the head stays as it is."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, PackedLinear) and WeightFormat(child.kind).bits > WeightFormat.SIGNED4.bits:
                setattr(module, name, child.narrowed())


def _check_quantized(model: Any, quantize: str, weights: int) -> None:
    """Warn if few of a model's `weights` are quantized; raise UnsupportedModelError if none are."""
    quantized = sum(
        m.in_features * m.out_features for m in model.modules() if isinstance(m, PrepackedLinear) and m.name is not None
    )
    name = type(model).__name__
    if not quantized:
        raise UnsupportedModelError(f"{quantize}: {name} has no linear layers to quantize; load it without quantize")
    if quantized < weights / 2:
        _LOG.warning(
            "%s: only %.0f%% of the weights of %s are in linear layers and are quantized; the others stay as they are",
            quantize,
            100 * quantized / weights,
            name,
        )


def load_embedding_and_head(
    model: str | Path | ModelFiles, *, dtype: str | torch.dtype, device: str | torch.device | None = None
) -> EmbeddingAndHead:
    """Load a target's embedding, final norm and head; for options and errors, see `load_target`.

    transformers builds the model with only its first layer and reads no other layers' tensors, so a 32B target takes
    about 2 GB.
    """
    torch_device = resolve_device(device)
    files = model if isinstance(model, ModelFiles) else find_target(model)
    config = read_config(files)
    dequantize_at_load(config, torch_device)
    short = _shortened(config)
    torch_dtype = _dtype_in_use(dtype, files, config, torch_device)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # transformers would list the layers that are left out
    try:
        loaded = read_model(files, short, torch_dtype, partial=True)
    finally:
        transformers_logging.set_verbosity(verbosity)
    return EmbeddingAndHead.of_first_layer(loaded.to(torch_device).eval().requires_grad_(False), config)


def described(model: str | Path) -> EmbeddingAndHead:
    """A target's sizes and limits from its config alone; its weights are on the meta device. Errors: `load_target`."""
    config = read_config(find_target(model))
    kind = model_class(config)
    refuse_unsupported(kind, config)
    with torch.device("meta"):
        return EmbeddingAndHead(kind(_shortened(config)), config)


def _shortened(config: Any) -> Any:
    """A copy of a config with one layer; lists with an entry per layer keep the first entry."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    layers = text.num_hidden_layers
    for key, value in text.to_dict().items():
        if isinstance(value, list | tuple) and len(value) == layers and key != "architectures":
            setattr(text, key, value[:1])
    text.num_hidden_layers = 1
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = 0  # they are the last ones
    return short


def read_config(files: ModelFiles) -> Any:
    """The transformers config of a model; for an adapter, its base model's. Raises ModelError if it can't be read."""
    try:
        if files.base is not files:
            return read_config(files.base)
    except (ModelError, MissingModelError) as error:
        raise ModelError(f"the {files.adapter}, needs its base model: {error}") from error
    _check_layers(files.source, Path(files.source) / CONFIG_NAME)
    try:
        return AutoConfig.from_pretrained(files.source, trust_remote_code=False)
    except Exception as error:  # a damaged config makes transformers raise anything
        raise ModelError(f"can't read a model config at {files}: {why_unreadable(error)}") from error


def _check_layers(name: str, file: Path) -> None:
    """Raise ModelError for an absurd number of layers, before transformers makes lists and modules for them."""
    try:
        left = [json.loads(file.read_bytes())]
    except (OSError, ValueError):  # a Hub id, or not JSON: transformers reports that
        return
    while left:
        inside = left.pop()
        if not isinstance(inside, dict):
            continue
        left += inside.values()
        for key, value in inside.items():
            if "layer" in key and isinstance(value, int) and value > _MAX_LAYERS:
                raise ModelError(f"{name}: {CONFIG_NAME} says {key} {value}, but at most {_MAX_LAYERS} are loaded")


def read_model(
    files: ModelFiles,
    config: Any,
    dtype: torch.dtype,
    attention: str | None = None,
    *,
    partial: bool = False,
    packs: bool = False,
) -> Any:
    """Load the transformers model that `config` describes from a directory or Hub id, with adapters merged.

    `partial`: the config has fewer layers than the checkpoint. `packs`: weights of GGUF, AWQ, GPTQ and
    compressed-tensors stay in formats that the kernels multiply by; an adapter's base is always dequantized. Raises
    ModelError if weights can't be read or are missing, or a library for quantized weights is missing.
    """
    refuse_quantization(model_class(config), config)
    adapter = files.adapter
    if adapter is not None:
        check_peft(adapter)
    source = files.base.source
    gguf_file = files.base.gguf
    settings = own_settings(config)
    extra_kwargs: dict[str, Any] = {}
    packed: Mapping[str, PackedWeight] = {}
    try:
        packs = packs and adapter is None
        if gguf_file is not None:
            extra_kwargs["state_dict"], packed = read_weights(
                gguf_file, model_class(config), config, dtype, first=partial, packs=packs
            )
        elif settings is not None:
            config = copy.deepcopy(config)
            for part in (config, config.get_text_config()):
                vars(part).pop("quantization_config", None)
            extra_kwargs["state_dict"], packed = read_quantized(
                source, model_class(config), config, settings, dtype, packs=packs
            )
        elif adapter is not None and adapter.holds_base:  # from its directory, transformers would also load the adapter
            extra_kwargs["state_dict"] = {
                key: tensor for file in weight_files(source) for key, tensor in load_file(file).items()
            }
        given = "state_dict" in extra_kwargs
        loaded, report = (model_class if given else auto_class)(config).from_pretrained(
            None if given else source,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **extra_kwargs,
        )
    except Exception as error:  # a damaged file makes transformers raise anything
        raise ModelError(f"can't load the target {files}: {why_unreadable(error)}") from error
    # peft compares it; transformers doesn't set it when given tensors
    loaded.name_or_path = source if adapter is None else adapter.base
    if given:  # if not, transformers has read the weights
        loaded.generation_config = read_generation_config(source)[0]
    keep_packed(loaded, packed, dtype)
    finish_dequantized(loaded, config, dtype)
    if gguf_file is not None:
        check_model(gguf_file, loaded)
    if report["missing_keys"]:  # transformers would use random values instead
        missing = ", ".join(sorted(report["missing_keys"])[:5])
        raise ModelError(f"{files} lacks {len(report['missing_keys'])} of the target's tensors ({missing} ...)")
    if getattr(loaded, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(f"{files} has an adapter on the Hub: download it, and give its directory")
    return loaded if adapter is None else merge_adapter(loaded, adapter, partial)


def keep_packed(model: Any, packed: Mapping[str, PackedWeight], dtype: torch.dtype) -> None:
    """Replace the modules of a model's `packed` weights by packed ones; a tied head shares the embedding's.

    Stacked parameters of experts are replaced by child modules, which `replace_experts` then uses.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    for name, weight in packed.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        shape = tuple(model.get_parameter(name).shape)
        bias = getattr(module, "bias", None)
        tied = embedding.weight is head.weight and module is embedding
        made = PackedLinear.of_panels(*weight.panels(), weight.format, dtype, shape, bias, tied)
        if made.stacked is not None:
            delattr(module, own)
            setattr(module, own, made)
        else:
            model.set_submodule(path, PackedEmbedding(made) if module is embedding else made)
        if tied:
            model.set_output_embeddings(made)


def resolve_device(name: str | torch.device | None) -> torch.device:
    """The named device; None = the GPU if there is one, otherwise the CPU. Raises UsageError for unknown devices."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {name!r}: write cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("`device=cuda`: this PyTorch sees no CUDA device; use `device=cpu`")
    return device


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' names


def resolve_dtype(
    dtype: str | torch.dtype, model: str | Path | ModelFiles | None = None, device: torch.device | None = None
) -> torch.dtype:
    """The dtype with this name: `float32`, `bfloat16`, `float16`, or `auto` for a `model` that runs on a `device`.

    `auto` is the dtype of the checkpoint of `model` (a directory, a Hub id or `smollm2`): its config's dtype, or else
    its tensors'. The exception is half precision on a CPU without kernels for it (`eyas.machine.cpu_computes_in`). It
    becomes float32, unless the weights are quantized and so made for their dtype. `device` None is the GPU if there is
    one. Raises UsageError for unknown names and ModelError for unreadable checkpoints.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto" or model is None:
        known = ("auto", *_DTYPES) if model is not None else tuple(_DTYPES)
        raise UsageError(f"unknown dtype {dtype!r}: write one of {', '.join(known)}")
    files = model if isinstance(model, ModelFiles) else find_target(model)
    config = read_config(files)
    device = device or resolve_device(None)
    dequantize_at_load(config, device)
    return _dtype_in_use(dtype, files, config, device)


def _dtype_in_use(dtype: str | torch.dtype, files: ModelFiles, config: Any, device: torch.device) -> torch.dtype:
    """`resolve_dtype` of a model whose config was read, and marked by `dequantize_at_load`."""
    if dtype != "auto":
        return resolve_dtype(dtype, files)
    found = _checkpoint_dtype(files, config)
    if device.type != "cpu" or cpu_computes_in(found) or quantized_by(config) is not None:
        return found
    report_slow(found)
    return torch.float32


def _checkpoint_dtype(files: ModelFiles, config: Any) -> torch.dtype:
    """The dtype that a checkpoint's config states, or else the dtype of most values in its (first) file."""
    stated = config.dtype or config.get_text_config().dtype
    if stated is not None:
        if stated not in _DTYPES.values():
            raise UsageError(f"{files} is stored in {stated}: choose a dtype among {', '.join(_DTYPES)}")
        return cast(torch.dtype, stated)
    if files.base.gguf is not None:
        return stored_dtype(files.base.gguf)
    sizes: dict[str, int] = {}
    try:
        with safe_open(next(weight_files(files.base.source)), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a mapping
                tensor = file.get_slice(key)
                sizes[tensor.get_dtype()] = sizes.get(tensor.get_dtype(), 0) + math.prod(tensor.get_shape())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{files} names no dtype, and its weights can't be read to find it: {error}") from error
    most = max(sizes, key=lambda stored: sizes[stored], default="nothing")
    if most not in _STORED:
        raise UsageError(f"{files} is stored in {most}: choose a dtype among {', '.join(_DTYPES)}")
    return _STORED[most]


def _files_of(model: ModelFiles) -> list[Path]:
    """The files of a model: weights and configs, of an adapter and of its base model."""
    found: list[Path] = []
    for files in dict.fromkeys((model, model.base)):
        source = files.source
        folder = Path(source) if Path(source).is_dir() else Path(cast(str, cached_file(source, CONFIG_NAME))).parent
        found += [path for path in sorted(folder.rglob("*")) if path.suffix in (".safetensors", ".json")]
        found += [] if files.gguf is None else [files.gguf]
    return found
