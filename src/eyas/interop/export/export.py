"""Exports a drafter in the form that another engine reads; the files are read back and compared before they appear.

In GGUF files, layer numbers are boundaries, `d2t` holds target ids, and the target's byte-level BPE tokenizer is stored
under GGUF's keys.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import pi
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from eyas.drafters.block.network import Block, BlockConfig, BlockNetwork
from eyas.drafters.checkpoint import open_checkpoint, write_directory
from eyas.drafters.config import DrafterConfig, GroupedConfig
from eyas.drafters.formats.gguf_layout import (
    CAUSAL,
    DFLASH2_KEYS,
    DFLASH_HEADS,
    DFLASH_LAYOUT,
    EAGLE3_LAYOUT,
    EXACT,
    LAYERS,
    PATTERN,
    PROVENANCE,
    ROPE,
    ROPE_FACTORS,
    TREE,
    WINDOW,
    GgufLayout,
    rotated_heads,
    to_interleaved,
)
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.drafters.kind import DFLASH, DFLASH2, DSPARK, EAGLE3, Family
from eyas.drafters.loading import check_fit
from eyas.drafters.network import DraftNetwork
from eyas.errors import ExportError, UsageError
from eyas.files import write_text, writing_folder
from eyas.gguf import gguf_package
from eyas.interop.export.consumers import CONSUMERS, Consumer, supporting_consumers
from eyas.interop.export.drafter import (
    DrafterToExport,
    ServedTarget,
    drafter_to_export,
    leave_out_embedding,
    raise_max_length,
)
from eyas.interop.export.forms import Refusal
from eyas.interop.serving.commands import GGUF_FILE, TENSORRT_FILE, command, tensorrt_yaml
from eyas.targets.attention import grouped_attention

LAYOUTS: dict[Family, GgufLayout] = {
    EAGLE3: EAGLE3_LAYOUT, DFLASH: DFLASH_LAYOUT, DFLASH2: DFLASH_LAYOUT, DSPARK: DFLASH_LAYOUT,
}  # fmt: skip
"""Family -> the layout of its files that llama.cpp reads."""
_MORE_KEYS = {DSPARK: DFLASH_HEADS, DFLASH2: DFLASH2_KEYS}
"""Family -> keys in addition to its layout's."""
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
_NORMAL = 1
_CONTROL = 3
_USER = 4
_UNUSED = 5
"""Token types, as GGUF numbers them."""


def write_gguf(drafter: DrafterToExport, file: Path) -> None:
    """Write a prepared drafter as GGUF. Raises ExportError, or UsageError if the gguf package isn't installed."""
    gguf = gguf_package()
    config = drafter.config
    assert isinstance(config, GroupedConfig)
    assert drafter.target is not None
    assert drafter.kind.family is not None
    layout = LAYOUTS[drafter.kind.family]
    if drafter.dtype not in _FILE_TYPES:
        raise ExportError(f"the weights are {drafter.dtype}, but llama.cpp reads float32, float16 and bfloat16")
    tokenizer = tokenizer_keys(drafter.target.tokenizer, config.vocab_size)
    writer = gguf.GGUFWriter(file, layout.architecture)
    writer.add_name(f"{layout.title} drafter")
    writer.add_file_type(_FILE_TYPES[drafter.dtype])
    _write_config(writer, layout, drafter)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")  # never used: llama.cpp tokenizes with the target's own tokenizer
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos),
        (writer.add_eos_token_id, tokenizer.eos),
        (writer.add_pad_token_id, tokenizer.pad),
        (writer.add_mask_token_id, drafter.get("mask_token_id")),
    ):
        if number is not None:
            add(number)
    for name, tensor in _tensors(drafter, layout, config).items():
        _add(writer, gguf, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, layout: GgufLayout, drafter: DrafterToExport) -> None:
    config = drafter.config
    rope = drafter.get("rope_parameters")
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    assert drafter.kind.family is not None
    keys = {**layout.keys, **_MORE_KEYS.get(drafter.kind.family, {})}
    for theirs, ours in keys.items():
        value = drafter.get(ours)
        adders[type(value)](f"{layout.architecture}.{theirs}", value)
    writer.add_array(f"{layout.architecture}.{LAYERS}", list(config.taps or ()))
    if isinstance(config, BlockConfig):
        _write_windows(writer, f"{layout.architecture}.", config)
    writer.add_key_length(drafter.get("head_dim"))
    writer.add_value_length(drafter.get("head_dim"))
    writer.add_rope_dimension_count(drafter.get("head_dim"))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{layout.architecture}.rope.scaling.type", rope["rope_type"])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or drafter.get("max_position_embeddings")
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32))
        writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1))
    writer.add_string(ROPE, json.dumps(rope))
    if config.default_tree is not None:
        writer.add_string(TREE, config.default_tree)
    if drafter.provenance:
        writer.add_string(PROVENANCE, json.dumps(dict(drafter.provenance)))


def _write_windows(writer: Any, prefix: str, config: BlockConfig) -> None:
    """Which layers have a window, and whether slots see later ones, which is the same in all layers here."""
    causal = config.views[0].causal
    if config.sliding_window is not None:
        writer.add_uint32(prefix + WINDOW, config.sliding_window)
        writer.add_array(prefix + PATTERN, [view.window is not None for view in config.views])
    if causal or config.sliding_window is not None:
        writer.add_bool(prefix + CAUSAL, causal)


def _tensors(drafter: DrafterToExport, layout: GgufLayout, config: GroupedConfig) -> dict[str, Tensor]:
    """All tensors under llama.cpp's names and in its layout."""
    found = {}
    for theirs, ours in layout.names(config.num_hidden_layers).items():
        if ours not in drafter.tensors or (ours == "d2t" and not drafter.reduced):
            continue
        tensor = drafter.tensors[ours].detach().cpu()
        heads = rotated_heads(ours) if layout.interleaved else None
        if heads is not None:
            tensor = to_interleaved(tensor, drafter.get(heads))
        found[theirs] = tensor + torch.arange(len(tensor)) if ours == "d2t" else tensor
    if config.rope_parameters["rope_type"] == "llama3":
        found[ROPE_FACTORS] = llama3_factors(config)
    return found


def llama3_factors(config: GroupedConfig) -> Tensor:
    """The factors [D / 2] by which llama3 scaling divides each RoPE frequency."""
    rope = config.rope_parameters
    plain = rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    turns = rope["original_max_position_embeddings"] * plain / (2 * pi)  # within the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - share) / rope["factor"] + share)
    return factors.float()


def _add(writer: Any, gguf: Any, name: str, tensor: Tensor) -> None:
    """Add one tensor; those that llama.cpp adds to float32 values, such as vectors, are written in float32."""
    if tensor.dtype == torch.int64:
        writer.add_tensor(name, tensor.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
    elif tensor.ndim == 1 or name.endswith(EXACT):
        writer.add_tensor(name, tensor.float().numpy())
    elif tensor.dtype == torch.bfloat16:
        data = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.contiguous().numpy())


@dataclass(frozen=True)
class TokenizerKeys:
    """The values of GGUF's keys `tokenizer.ggml.*`."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int | None
    eos: int | None
    pad: int | None


def tokenizer_keys(tokenizer: Any, size: int) -> TokenizerKeys:
    """The keys for a byte-level BPE tokenizer and an embedding of `size` rows; ExportError for other tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = {} if backend is None else json.loads(backend.to_str())
    model = described.get("model", {})
    if model.get("type") != "BPE" or '"ByteLevel"' not in json.dumps(described.get("pre_tokenizer")):
        raise ExportError(
            "the target's tokenizer is not a byte-level BPE, the only type that eyas writes into GGUF: export with "
            "`to=vllm` and convert that folder with llama.cpp's convert_hf_to_gguf.py --target-model-dir"
        )
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [_UNUSED] * size
    for token, number in model["vocab"].items():
        if number < size:
            tokens[number] = token
            types[number] = _NORMAL
    for added in described.get("added_tokens", ()):
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added["special"] else _USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return TokenizerKeys(tokens, types, merges, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)


_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""The largest relative difference of logits if a copied head or embedding changes the order of summation."""


@dataclass(frozen=True)
class ExportResult:
    """What was written, for which consumer, and how it is served."""

    path: Path
    consumer: Consumer
    command: str
    """The shell command that serves it with the consumer."""
    changes: tuple[str, ...]
    """Descriptions of the changes made for the consumer."""
    sizes: Mapping[str, int]
    """The bytes of all tensors as `total`, and of `embedding` and `head` if the file holds them."""
    difference: float
    """The largest difference of a logit from the original's, relative to the largest logit."""


def export(
    path: Path,
    to: str,
    output: Path,
    target: ServedTarget | None = None,
    *,
    taps: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    ignore: Collection[str] = (),
) -> ExportResult:
    """Write the drafter at `path` for consumer `to` into the new folder `output`.

    `taps` settles the boundaries of a file that can be read in two ways; `dtype` is a wider type for the weights.
    Raises ExportError for a drafter that the consumer can't represent, UsageError, CheckpointError, ConfigError,
    DrafterMismatchError.
    """
    consumer = consumer_named(to)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and isn't empty: choose a new folder")
    original, drafter = load_to_export(path, target, taps, weights, ignore)
    if dtype is not None:
        drafter = _widened(drafter, dtype)
        original = original.to(dtype)
    prepared = prepare_for(consumer, drafter, str(path))
    line = command(consumer.name, prepared, output)
    with writing_folder(output) as folder:
        _write(prepared, consumer, folder, output)
        difference = read_back(folder, prepared, original)
        write_text(folder / "README.md", readme(prepared, consumer, line))
    return ExportResult(output, consumer, line, prepared.changes, _sizes(prepared), difference)


def _sizes(drafter: DrafterToExport) -> dict[str, int]:
    """The bytes of a drafter's tensors, of its embedding and of its head, without those that it doesn't hold."""
    parts = {"embedding": drafter.tensors.get(EMBEDDING), "head": drafter.tensors.get(HEAD)}
    total = sum(tensor.nbytes for tensor in drafter.tensors.values())
    return {"total": total} | {part: tensor.nbytes for part, tensor in parts.items() if tensor is not None}


def consumer_named(name: str) -> Consumer:
    """The consumer of this name; UsageError, listing all names, if there is none."""
    if name not in CONSUMERS:
        raise UsageError(f"unknown consumer {name!r}: use one of {', '.join(CONSUMERS)}")
    return CONSUMERS[name]


def load_to_export(
    path: Path,
    target: ServedTarget | None,
    taps: Sequence[int] | None = None,
    weights: str | None = None,
    ignore: Collection[str] = (),
) -> tuple[DraftNetwork, DrafterToExport]:
    """Load a drafter that can be read in only one way and fits its target; returns the network and its parts.

    Raises the errors of `export`.
    """
    layers = None if target is None else target.partial.num_layers
    checkpoint = open_checkpoint(path, weights=weights, ignore=ignore, layers=layers)
    doubts = [doubt for doubt in checkpoint.report.doubts if taps is None or not doubt.startswith("taps")]
    if doubts:
        raise ExportError(
            f"{path} can be read in two ways, and the wrong one would cost acceptance without an error:\n  "
            + "\n  ".join(doubts)
            + "\nCorrect the file, or give the boundaries with `taps=`."
        )
    if target is None and "shared" in (checkpoint.config.embedding, checkpoint.config.head):
        raise UsageError(f"{path} uses its target's embedding or head: give `model=`")
    network = checkpoint.network(None if target is None else target.partial)
    drafter = drafter_to_export(network, target, checkpoint.provenance)
    if taps is not None:
        if len(taps) != network.config.tap_count:
            raise UsageError(f"`taps=` has {len(taps)} boundaries, but the drafter reads {network.config.tap_count}")
        drafter = replace(drafter, config=drafter.config.model_copy(update={"taps": tuple(taps)}))
    if target is not None:
        check_fit(drafter.config, target.partial, str(path))
    return network, drafter


def _widened(drafter: DrafterToExport, dtype: torch.dtype) -> DrafterToExport:
    """The drafter with floating-point tensors in `dtype`. Raises UsageError if a value would be rounded."""
    tensors = {}
    for name, tensor in drafter.tensors.items():
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if not torch.equal(tensors[name].to(tensor.dtype), tensor):
            raise UsageError(f"{name} can't be written as {str(dtype).removeprefix('torch.')} without rounding")
    return replace(drafter, tensors=tensors)


def prepare_for(consumer: Consumer, drafter: DrafterToExport, name: str) -> DrafterToExport:
    """The drafter in a form that a consumer can read. Raises ExportError naming every field that prevents it.

    An embedding that is the target's own is left out where the consumer shares the target's.
    """
    whole = raise_max_length(drafter)
    prepared, broken = consumer.prepare(leave_out_embedding(whole) or whole)
    if broken or prepared.config.embedding == "own":  # it must be in the file
        prepared, broken = consumer.prepare(whole)
    if broken:
        raise ExportError(refusal_text(consumer, broken, drafter, name))
    return prepared


def refusal_text(consumer: Consumer, broken: list[Refusal], drafter: DrafterToExport, name: str) -> str:
    """The error message for a drafter that a consumer can't represent: all reasons, and what to do instead."""
    reasons = "\n  ".join(f"{refusal.field}: {refusal.reason}" for refusal in broken)
    if drafter.target is None and all("give `model=`" in refusal.reason for refusal in broken):
        return f"{consumer.title} can't take the drafter {name} without its target:\n  {reasons}"
    others = [CONSUMERS[other].title for other in supporting_consumers(drafter) if other != consumer.name]
    advice = f"serve it with {' or '.join(others)}" if others else "serve it with eyas"
    fields = ", ".join(dict.fromkeys(refusal.field for refusal in broken))
    if broken[0].field not in ("kind", "target"):
        advice += f", or train one with other {fields}"
    return f"{consumer.title} can't represent the drafter {name}:\n  {reasons}\nWhat you can do: {advice}."


def _write(drafter: DrafterToExport, consumer: Consumer, folder: Path, final: Path) -> None:
    """Write everything but the README into `folder`, which is moved to `final` afterwards."""
    if consumer.form is None:
        write_gguf(drafter, folder / GGUF_FILE)
        return
    form = consumer.form(drafter)
    write_directory(folder, form.config, form.tensors)
    if consumer.name == "tensorrt-llm":
        write_text(folder / TENSORRT_FILE, tensorrt_yaml(drafter, final.resolve()))


def read_back(folder: Path, drafter: DrafterToExport, original: DraftNetwork) -> float:
    """Load the exported files and compare config, weights and logits with the original's.

    Returns the largest difference of a logit, relative to the largest logit. Raises ExportError if anything differs.
    """
    checkpoint = open_checkpoint(folder, layers=drafter.layers)
    if unlike := _unlike(checkpoint.config, drafter):
        raise ExportError(f"the exported configuration reads back differently: {unlike}")
    network = checkpoint.network(None if drafter.target is None else drafter.target.partial)
    found = network.state_dict()
    wrong = [name for name, tensor in drafter.tensors.items() if not torch.equal(found.pop(name), tensor)]
    if wrong or found:
        raise ExportError(f"exported tensors read back differently: {', '.join([*wrong, *found])}")
    difference = largest_difference(trial_logits(original), trial_logits(network))
    allowed = _ROUNDING[drafter.dtype] if drafter.changes else 0.0
    if not difference <= allowed:
        raise ExportError(
            f"the exported drafter's logits differ from the original's by {difference:.2g} of the largest"
        )
    return difference


def _unlike(found: DrafterConfig, drafter: DrafterToExport) -> str:
    """The fields that differ, as `name found-value for written-value`.

    Numbers are compared in float32, because GGUF and many configs hold only float32 values (9.999999747378752e-06).
    """
    return ", ".join(
        f"{key} {getattr(found, key)} for {value}"
        for key, value in drafter.config.model_dump().items()
        if not _equal(getattr(found, key), value)
    )


def _equal(found: object, written: object) -> bool:
    if isinstance(found, float) and isinstance(written, float):
        return bool(torch.tensor(found, dtype=torch.float32) == torch.tensor(written, dtype=torch.float32))
    return bool(found == written)


POSITIONS, STEPS = 24, 3
"""The number of positions and steps on which the logits of two networks are compared."""


@torch.inference_mode()
def trial_logits(network: DraftNetwork) -> Tensor:
    """Logits [STEPS, S, Vd] in float32 for random taps and tokens; later steps are fed the network's own output.

    For a block drafter [1, S, Vd]: the logits of a block of random tokens that follows the taps.
    """
    config = network.config
    draw = torch.Generator().manual_seed(11)
    taps = torch.randn(1, POSITIONS, config.tap_count, config.target_hidden_size, generator=draw).to(network.dtype)
    if config.is_block:
        return _block_logits(
            cast(BlockNetwork, network), taps, torch.randint(config.vocab_size, (1, POSITIONS), generator=draw)
        )
    hidden = network.fuse(taps)
    found = []
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (1, POSITIONS), generator=draw)
        positions = torch.arange(POSITIONS).unsqueeze(0) + 37 * step
        hidden, normed = network.step(tokens, hidden, positions, _causal)
        found.append(network.logits(normed)[0].float())
    return torch.stack(found)


def _block_logits(network: BlockNetwork, taps: Tensor, tokens: Tensor) -> Tensor:
    context: dict[int, tuple[Tensor, Tensor]] = {}
    positions = torch.arange(POSITIONS).unsqueeze(0)

    def store(layer: int, keys: Tensor, values: Tensor) -> None:
        context[layer] = keys, values

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context[layer], (k, v), strict=True))
        return grouped_attention(q, keys, values, torch.ones(1, 1, q.shape[2], keys.shape[2], dtype=torch.bool))

    fused = network.fuse(taps)
    network.read(fused, positions, store)
    tokens = tokens[:, : network.config.guesses]
    states = network.states(network.embed(tokens), (positions + POSITIONS)[:, : tokens.shape[1]], attend)
    block = network.begin(Block(states, tokens[:, :2], fused[:, -1], 0))
    return network.joined_logits(network.joined(block, tokens)).float()


def _causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return grouped_attention(q, k, v, mask)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors of logits, relative to the largest logit."""
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))


def readme(drafter: DrafterToExport, consumer: Consumer, command: str) -> str:
    """The README of an exported folder: its target, how it was converted, and how to serve it."""
    provenance = drafter.provenance
    measured = accept_length(drafter)
    target_name = provenance.get("target", "not recorded") if drafter.target is None else drafter.target.name
    fingerprint = provenance.get("target_fingerprint")
    taps = drafter.config.taps
    rows = [
        ("target", f"`{target_name}`" + (f", weights {fingerprint}" if fingerprint else "")),
        ("drafter", f"{drafter.kind.name}, {sum(t.numel() for t in drafter.tensors.values()):,} numbers, "
                    f"{str(drafter.dtype).removeprefix('torch.')}"),
        ("taps", "the consumer's default" if taps is None else
         f"boundaries {list(taps)} (k = the residual entering target layer k); {consumer.title} numbers: "
         f"{consumer.convention}"),
        ("draft vocabulary", f"{drafter.config.draft_vocab_size:,} of {drafter.config.vocab_size:,}"),
        ("embedding, head", f"{drafter.config.embedding}, {drafter.config.head} (shared = the target's)"),
        ("accept length", "not measured" if measured is None else
         f"{measured:.2f} tokens per target pass, decoded by eyas with `{drafter.config.default_tree or 'its tree'}` "
         "while training"),
        ("written for", f"{consumer.title} {consumer.version}, by `eyas export --to {consumer.name}`"),
        ("changed", "; ".join(drafter.changes) or "nothing"),
    ]  # fmt: skip
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    text = f"# A drafter for {target_name}\n\n| | |\n|---|---|\n{table}\n\nServe it:\n\n```bash\n{command}\n```\n"
    if provenance:
        text += f"\nProvenance:\n\n```json\n{json.dumps(dict(provenance), indent=2)}\n```\n"
    return text


def accept_length(drafter: DrafterToExport) -> float | None:
    """The accept length measured by decoding in training; None if the provenance doesn't hold one."""
    for record in (drafter.provenance.get("validation"), drafter.provenance):
        found = record.get("decoded_accept_length") if isinstance(record, dict) else None
        if isinstance(found, int | float):
            return float(found)
    return None
