"""Loading a drafter that fits its target from a directory, GGUF file or Hub id."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import nn

from eyas.drafters.automatic import candidates, local_copy, published
from eyas.drafters.base import Drafter
from eyas.drafters.checkpoint import open_checkpoint
from eyas.drafters.config import DrafterConfig
from eyas.drafters.decoding import NetworkDrafter, NetworkPairs, Proposer
from eyas.drafters.formats.gguf_heads import holds_heads
from eyas.drafters.history import LookupDrafter
from eyas.drafters.hybrid import HybridDrafter
from eyas.drafters.in_target import mtp
from eyas.drafters.in_target.mtp import Cascade, CascadeProposer
from eyas.drafters.kernels import use_kernels
from eyas.drafters.network import DraftNetwork
from eyas.drafters.options import AUTO, PREDICTION, DrafterOptions, check_quantize, read_method
from eyas.drafters.prediction import PredictionDrafter
from eyas.drafters.registry import kind_if_any
from eyas.drafters.small_lm import METHOD as SMALL_LM
from eyas.drafters.small_lm.drafter import holds_language_model, load_small_lm
from eyas.drafters.weightless import METHODS
from eyas.drafters.window.decoding import WindowPairs
from eyas.drafters.window.window import Window, WindowChoice, read_window, trained_window
from eyas.errors import CheckpointError, DrafterMismatchError, EyasError, UsageError
from eyas.gguf import Gguf
from eyas.gguf_config import is_companion
from eyas.gguf_target import gguf_in, weights_file
from eyas.hub import find_drafter, find_target
from eyas.runtime import LOADING, release_mapped_file, use_huge_pages
from eyas.targets import Target
from eyas.targets.fingerprint import fingerprint, keep_fingerprint, weights_hash
from eyas.targets.graphs import Record
from eyas.targets.linears import PrepackedLinear, prepack_linears
from eyas.targets.native.layouts import best_layout
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.packed_linears import Int4Linear, Int8Linear
from eyas.targets.native.panel_files import cached_panels

_LOG = logging.getLogger("eyas")

_LAYOUTS: dict[str, type[PrepackedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}

IN_TARGET: dict[str, Callable[[Path, Target], DraftNetwork]] = {"mtp": mtp.load}
"""Method -> the function that loads its network from the target's own files. A new one is a file in `in_target/`."""


def make_drafter(
    options: DrafterOptions, target: Target, tokenizer: Any = None, model: str | Path | None = None
) -> Drafter:
    """Make a method without weights, a small language model, a drafter loaded from its source or found, or a hybrid.

    `tokenizer` is the target's, for language models with another vocabulary; they are only quantized if `quantize` says
    so. `model` is the target's own source, for methods that find their weights there if the options have no source.
    Raises what `DrafterOptions.check`, `load_drafter` and `load_small_lm` raise, and UsageError for a method that
    doesn't match the source.
    """
    options.check()
    if options.source == AUTO:
        return _first_that_loads(options, target, tokenizer, model)
    parsed = read_method(options.method)
    source = options.source
    lookup: Drafter | None = None
    if parsed.lookup is not None:
        predicts = parsed.lookup == PREDICTION
        lookup = PredictionDrafter(target.device) if predicts else METHODS[parsed.lookup](target)
    if not parsed.drafter:
        assert lookup is not None
        return lookup
    if lookup is not None and not isinstance(lookup, LookupDrafter):
        raise UsageError(f"method {parsed.lookup} can't be combined with a draft model: use it alone")
    if source is None:
        if model is None:
            raise UsageError(f"method {options.method} needs a drafter, or the target's files to find one in")
        assert parsed.kind is not None
        network = IN_TARGET[parsed.kind](local_directory(find_target(model).base.source), target)
        return _hybrid(_decoding(network, target, options.window, options.quantize), lookup, target)
    if parsed.kind in (None, "mtp") and (heads := _heads(source, of_target=parsed.kind is not None)) is not None:
        _check_heads(options)
        return _hybrid(_decoding(mtp.load(heads, target), target, options.window, options.quantize), lookup, target)
    if parsed.kind in (None, SMALL_LM):
        if holds_language_model(local_directory(source)):
            _check_small_lm(options)
            return _hybrid(load_small_lm(source, target, tokenizer, options.quantize), lookup, target)
        if parsed.kind is not None:
            raise UsageError(f"{source} is no language model, as method {options.method} needs: leave the method out")
    drafter = load_drafter(
        source,
        target,
        weights=options.weights,
        ignore_config_keys=options.ignore_config_keys,
        method=parsed.kind,
        window=options.window,
        quantize=options.quantize,
    )
    return _hybrid(drafter, lookup, target)


def _first_that_loads(options: DrafterOptions, target: Target, tokenizer: Any, model: str | Path | None) -> Drafter:
    """The first drafter of a target that loads, or else suffix decoding; the log says which one, and why."""
    if model is None:
        raise UsageError("a drafter is looked for by its target's files: give them, or a drafter")
    plus = "" if options.method is None else options.method
    passed = []
    for one in candidates(model):
        if one.trained_for not in (None, fingerprint(target.model)):
            continue  # a run of another model
        own = one.source is None
        try:
            chosen = replace(options, source=one.source, method=f"mtp{plus}" if own else plus or None)
            made = make_drafter(chosen, target, tokenizer, model)
        except EyasError as error:
            passed.append(f"{one.name} ({str(error).splitlines()[0]})")
            continue
        LOADING.info("drafter: %s, %s%s", one.name, one.where, _log_suffix(passed, model, one.source))
        return made
    LOADING.info("drafter: none found, so suffix decoding%s", _log_suffix(passed, model, None))
    return make_drafter(DrafterOptions(method="suffix"), target)


def _log_suffix(passed: Sequence[str], model: str | Path, taken: str | None) -> str:
    """The drafters that were not taken: those that don't fit, and published ones that aren't on this machine."""
    elsewhere = [pair.drafter for pair in published(model) if local_copy(pair.drafter, model) is None]
    return "".join(
        (
            f"; skipped: {', '.join(passed)}" if passed else "",
            f"; published, not downloaded: {', '.join(elsewhere)} (hf download NAME)"
            if elsewhere and taken is None
            else "",
        )
    )


def _heads(source: str | Path, *, of_target: bool) -> Path | None:
    """The GGUF file that is a companion with MTP heads or, with `of_target`, a target's file with them; else None."""
    found = local_directory(source)
    file = weights_file(found) if of_target else gguf_in(found)
    file = gguf_in(found) if file is None else file
    return file if file is not None and (is_companion(opened := Gguf(file)) or holds_heads(opened)) else None


def _check_heads(options: DrafterOptions) -> None:
    """Refuse options that MTP heads in a GGUF file can't have. Raises UsageError."""
    if options.weights is not None or options.ignore_config_keys:
        raise UsageError(f"{options.source} holds MTP heads: leave out the drafter's weights and config keys")


def _check_small_lm(options: DrafterOptions) -> None:
    """Refuse options that a small language model can't have. Raises UsageError."""
    if options.window is not None:
        raise UsageError(f"{options.source} is a language model, which has no window: leave out `draft_window=`")
    if options.weights is not None or options.ignore_config_keys:
        raise UsageError(f"{options.source} is a language model: leave out the drafter's weights and config keys")


def _hybrid(network: Drafter, lookup: LookupDrafter | None, target: Target) -> Drafter:
    """A drafter with weights, combined with the method without weights if there is one."""
    return network if lookup is None else HybridDrafter(network, lookup, target.device)


def load_drafter(
    source: str | Path,
    target: Target,
    *,
    weights: str | None = None,
    ignore_config_keys: Collection[str] = (),
    method: str | None = None,
    window: str | int | None = None,
    quantize: str | None = None,
) -> NetworkDrafter:
    """Load a drafter strictly, check it against `target`, and move it to the target's device and dtype.

    `method` is the kind that the caller expects. `window` is the number of pairs that it attends to in addition to its
    sinks, `auto` (its own window, or one within its training length), `off`, or None for its own. `quantize` is the
    format of its linear layers: `int8`, `int4`, `off`, or None = `int4` on a CPU where eyas's own kernels are fastest.
    Quantized weights are faster to read and only change guesses. A drafter trained for other weights than the target's
    is used with a warning in the log: output stays lossless, but it may draft badly.
    Raises CheckpointError, ConfigError, DrafterMismatchError, UnsupportedModelError, UsageError.
    """
    name = str(source)
    checkpoint = open_checkpoint(
        local_directory(source), weights=weights, ignore=ignore_config_keys, layers=target.num_layers
    )
    for doubt in checkpoint.report.doubts:
        _LOG.warning("the drafter %s: %s", name, doubt)
    check_method(method, checkpoint.kind.name, name)
    check_fit(checkpoint.config, target, name)
    target.check_taps(checkpoint.config.taps_of(target.num_layers))
    network = checkpoint.network(target)
    network.share_equal_embedding(target)
    network = network.to(device=target.device, dtype=target.dtype)
    _warn_of_another_target(checkpoint.provenance.get("target_fingerprint"), target, name)
    return _decoding(network, target, window, quantize, checkpoint.provenance.get("max_length"))


def _decoding(
    network: DraftNetwork, target: Target, window: str | int | None, quantize: str | None, trained: object = None
) -> NetworkDrafter:
    """The drafter that runs a network, with weights laid out for this machine; `trained` is its training length."""
    chosen = _window(network.config, read_window(window), trained)
    layout = drafter_layout(target, quantize)
    if layout is not None:
        keep_fingerprint(network)
        with cached_panels(True, lambda: f"{layout.__name__} {weights_hash(network)}"):
            prepack_linears(network, layout)
        if not any(isinstance(part, nn.Embedding) for part in network.modules()):  # which would be most of what is left
            release_mapped_file(network)
        if not issubclass(layout, NativeLinear):  # whose weights are there already
            use_huge_pages()
    taps = network.config.taps_of(target.num_layers)
    return drafter_of(
        network, taps, chosen, target.record, kernels=target.decoder is not None and target.native is None
    )


def drafter_layout(target: Target, quantize: str | None = None) -> type[PrepackedLinear] | None:
    """The layout of the linear layers of a target's drafter, `quantize` as in `load_drafter`; None = unchanged.

    Raises UsageError.
    """
    check_quantize(quantize)
    # with a native target the drafter has native passes, too, even where oneDNN reads prompts faster in bfloat16
    layout = NativeLinear if target.native is not None else best_layout(target.device, target.dtype)
    if quantize in _LAYOUTS and (target.device.type != "cpu" or kernels() is None):
        raise UsageError(f"a drafter runs in {quantize} on a CPU with eyas's own kernels only: leave quantize out")
    if quantize is None and layout is NativeLinear:
        quantize = "int4"
    return layout if quantize in (None, "off") else _LAYOUTS[quantize]


def _window(config: DrafterConfig, choice: WindowChoice, trained: object) -> WindowChoice:
    """The requested window, with `auto` as a number of pairs. Raises UsageError if the drafter can't have it."""
    if choice == "off" or choice is None:
        return choice
    own = getattr(config, "draft_window", None)
    positions = getattr(config, "max_position_embeddings", 0)
    pairs: int = (own or trained_window(trained, positions)) if choice == "auto" else choice
    refusal = config.window_refusal(pairs)
    if refusal is not None:
        raise UsageError(f"`draft_window={choice}`: this drafter can't, {refusal}")
    return pairs


def drafter_of(
    network: DraftNetwork,
    taps: tuple[int, ...],
    window: WindowChoice = None,
    record: Record | None = None,
    kernels: bool = False,
) -> NetworkDrafter:
    """The drafter that runs a network, which reads the boundaries `taps` of its target.

    `window` is a number of pairs, `off`, or None for the window in the network's config. `record` records its passes.
    With `kernels`, they are made of kernels in Triton if the network is one that these know.
    """
    width = getattr(network.config, "draft_window", None) if window is None else window
    if isinstance(network, Cascade):
        proposer: Proposer = CascadeProposer(network)
    else:
        kind = kind_if_any(network.config)
        proposer = (Proposer if kind is None else kind.proposer)(network)
    if kernels:
        use_kernels(proposer)
    fed = None if proposer.decoder is None else torch.float32
    record = None if network.config.reads_target else record  # the target's cache may move between drafts
    if isinstance(width, int):
        return NetworkDrafter(proposer, taps, WindowPairs(network, Window(width), fed, record))
    return NetworkDrafter(proposer, taps, NetworkPairs(network, fed, record))


def local_directory(source: str | Path) -> Path:
    """The directory or GGUF file `source`, or else the Hub snapshot of that name, without pickles.

    Raises MissingModelError if there is neither, CheckpointError if the snapshot can't be fetched.
    """
    path = Path(find_drafter(source))
    if path.exists():
        return path
    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{source} can't be fetched from the Hub: {error}") from error


def check_method(method: str | None, kind: str, name: str) -> None:
    """Refuse a method that isn't the drafter's kind; None accepts any. Raises UsageError."""
    if method not in (None, kind):
        raise UsageError(f"{name} is of the kind {kind}, not {method}: leave the method out, the files say what it is")


class TargetSizes(Protocol):
    """The sizes that a drafter must share with its target."""

    @property
    def num_layers(self) -> int:
        """The number of the target's decoder layers."""

    @property
    def hidden_size(self) -> int:
        """The width of the target's states."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the target's vocabulary."""

    @property
    def final_boundary(self) -> int:
        """The last boundary that can be a tap."""


def check_fit(config: DrafterConfig, target: TargetSizes, name: str) -> None:
    """Refuse a drafter made for another target, with all reasons. Raises DrafterMismatchError."""
    taps = config.taps_of(target.num_layers)
    wrong = []
    if config.target_hidden_size != target.hidden_size:
        wrong.append(f"it reads states {config.target_hidden_size} wide, the target's are {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        wrong.append(f"its vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}")
    if config.tap_count != len(taps):
        wrong.append(f"it reads {config.tap_count} taps, but {len(taps)} are named: {list(taps)}")
    if any(not 0 <= tap <= target.final_boundary for tap in taps):
        wrong.append(f"its taps {list(taps)} lie outside the target's boundaries 0..{target.final_boundary}")
    if len(set(taps)) != len(taps):
        wrong.append(f"its taps {list(taps)} are not distinct")
    if wrong:
        raise DrafterMismatchError(
            f"the drafter {name} does not fit the target:\n  "
            + "\n  ".join(wrong)
            + "\nUse one trained for this model."
        )


def _warn_of_another_target(recorded: Any, target: Target, name: str) -> None:
    """Log a warning if the drafter records the fingerprint of other weights than the target's."""
    if not isinstance(recorded, str):
        return
    found = fingerprint(target.model)
    if recorded != found:
        _LOG.warning(
            "the drafter %s was trained for other weights than this target's (fingerprint %s, here %s): output is "
            "still the target's own, but the drafter may guess badly; check its accept length",
            name,
            recorded,
            found,
        )
