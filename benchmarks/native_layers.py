"""Whether native passes that are accepted at load are their modules', layer by layer, and every refusal by name.

    python -m benchmarks.native_layers [--only exaone4,ministral3] [--minutes 20] [--output FILE.json]

Random models of every type that can be a target, with hybrid layer patterns, at several scales of their weights and two
hidden sizes, in float32 and bfloat16, every number of the config small enough to be crossed by prompts of 600 tokens.
What the load trial accepts is compared with an untouched copy of the model that transformers runs with masks of its
own: each layer on the states that the native pass gave it, and in float32 the logits. Exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as REGISTERED

from benchmarks.architecture_sizes import SIZES, SPECIAL
from benchmarks.architectures import build, tiny_config
from eyas.bench.machine import describe_machine
from eyas.cli.common.display import output
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.targets import Target
from eyas.targets.architecture import decoder_layers, text_decoder
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.decoder import Staged
from eyas.targets.native.experts import NativeExperts, replace_experts
from eyas.targets.native.layer_trials import LayerCall, LayerTrial
from eyas.targets.native.linears import NativeLinear

SCALES, HIDDEN, LENGTHS = (0.5, 1.0, 6.0, 20.0), (64, 256), (8, 600)
TYPES = (torch.float32, torch.bfloat16)
NATIVE, REFUSED, OTHER, UNTRIED, DIFFERS = "native", "refused at load", "of another form", "not tried", "differs"
SMALL = {
    "max_position_embeddings": 1024,
    "n_positions": 1024,
    "original_max_position_embeddings": 64,
    "sliding_window": 16,
}
"""What replaces `SIZES`, so that prompts cross it."""


@dataclass
class Row:
    """What became of one random model."""

    kind: str
    scale: float
    hidden: int
    dtype: str
    result: str = UNTRIED
    reason: str = ""
    apart: float = 0.0
    """The greatest distance of a layer from its module, in parts of what rounding allows."""
    logits_apart: float = 0.0
    """That of logits, as a share of the greatest, in float32."""


class Reasons(logging.Handler):
    """Keeps what the log of eyas says."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def small_config(kind: str, hidden: int) -> Any:
    """The config of a type, in which every number is small."""
    sizes = {"hidden_size": hidden, "n_embd": hidden, "d_model": hidden, **SMALL}
    before = {name: SIZES[name] for name in sizes}
    SIZES.update(sizes)
    try:
        config = tiny_config(kind)
    finally:
        SIZES.update(before)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if kind == "ministral3" and rope:
        rope.update(original_max_position_embeddings=64, factor=16.0)
    return config


def tried(row: Row, dtype: torch.dtype) -> Row:
    """Make a model, load it as a target with native weights, and compare what is accepted."""
    said = Reasons()
    log = logging.getLogger("eyas")
    log.addHandler(said)
    log.setLevel(logging.DEBUG)
    try:
        try:
            stock = build(small_config(row.kind, row.hidden), row.scale).to(dtype)
        except Exception as error:  # noqa: BLE001  # whatever transformers raises: there is no model to try
            row.reason = f"{type(error).__name__}: {error}"[:200]
            return row
        model = copy.deepcopy(stock)
        prepack_linears(model, NativeLinear, dtype)
        replace_experts(model, NativeLinear, dtype)
        native = transformers_decoder(model)
        if native is None:
            row.result, row.reason = OTHER, said.said[-1][:200] if said.said else ""
            return row
        target = Target(model, native=native)
        if target.native is None:
            row.result, row.reason = REFUSED, said.said[-1][:200]
            return row
        compare(row, target, stock)
    except EyasError as error:
        row.result, row.reason = REFUSED, str(error)[:200]
    finally:
        log.removeHandler(said)
    return row


@torch.inference_mode()
def compare(row: Row, target: Target, stock: Any) -> None:
    """Compare a target's native passes with an untouched copy of its model, and note what was found."""
    row.result, layers = NATIVE, decoder_layers(stock, target.num_layers)
    for length in LENGTHS:
        tokens = (7 * torch.arange(length) ** 2 + 3).unsqueeze(0) % target.vocab_size
        calls, expected = stock_calls(stock, layers, tokens)
        assert target.native is not None
        staged = Staged(range(1), length, None, [0], None)
        cache = target.empty_cache(1, length)
        done = target.native.run(cache, staged, tokens, taps=range(target.num_layers + 1), logits=True)
        states = done.taps.unbind(1)
        for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
            apart = LayerTrial(layer, call, states[index]).apart(states[index + 1])
            routed = any(isinstance(part, NativeExperts) for part in target.layers[index].modules())
            # a rounding may choose other experts for a token
            found = float(apart.quantile(0.5 if target.dtype != torch.float32 else 0.98) if routed else apart.max())
            row.apart = max(row.apart, round(found, 3))
            if found > 1 and row.result == NATIVE:
                row.result, row.reason = DIFFERS, f"layer {index} of {length} tokens"
        if target.dtype == torch.float32:
            gap = (target.finish(done.logits) - expected).abs().amax() / expected.abs().amax()
            row.logits_apart = max(row.logits_apart, float(gap))


def stock_calls(stock: Any, layers: Any, tokens: torch.Tensor) -> tuple[list[LayerCall], torch.Tensor]:
    """How transformers calls each layer for tokens [1, T] with masks of its own, and the logits [T, V]."""
    calls = list[LayerCall]()

    def keep(_layer: Any, args: Any, kwargs: Any) -> None:
        calls.append(LayerCall(args, kwargs))

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    logits = stock(input_ids=tokens, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    assert text_decoder(stock) is not None
    return calls, logits


def rows(kinds: Sequence[str]) -> Iterator[tuple[Row, torch.dtype]]:
    """All combinations, every type once before the next; what is cut short has had each scale and size alike."""
    ways = list(product(SCALES, HIDDEN, TYPES))
    for turn in range(len(ways)):
        for number, kind in enumerate(kinds):
            scale, hidden, dtype = ways[(turn + 5 * number) % len(ways)]
            yield Row(kind, scale, hidden, str(dtype).removeprefix("torch.")), dtype


def report(done: Sequence[Row]) -> dict[str, Any]:
    """What the output file says."""
    counts = Counter(row.result for row in done)
    native = [row for row in done if row.result in (NATIVE, DIFFERS)]
    return {
        "transformers": transformers.__version__,
        "machine": describe_machine(),
        "models": len(done),
        "types": len({row.kind for row in done if row.result != UNTRIED}),
        "types_native": len({row.kind for row in native}),
        "counts": dict(counts),
        "accepted_that_differ": counts[DIFFERS],
        "refusals": dict(Counter(f"{row.kind}: {row.reason}" for row in done if row.result in (REFUSED, OTHER))),
        "rows": [asdict(row) for row in done],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model types with commas between them")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it may take; what is left is left out")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    kinds = options.only.split(",") if options.only else [k for k in REGISTERED if not isinstance(SPECIAL.get(k), str)]
    transformers.logging.set_verbosity_error()
    done, until, left = list[Row](), time.monotonic() + 60 * options.minutes, set(kinds)
    for row, dtype in rows(kinds):
        if time.monotonic() > until:
            break
        if row.kind not in left:
            continue
        done.append(tried(row, dtype))
        if row.result in (UNTRIED, OTHER):  # at any scale
            left.discard(row.kind)
        output().print(
            f"{row.kind} {row.scale:g} {row.hidden} {row.dtype}: {row.result} {row.apart} {row.reason[:90]}",
            highlight=False,
            markup=False,
        )
        if options.output is not None:
            write_json(options.output, report(done))
    sys.exit(any(row.result == DIFFERS for row in done))


if __name__ == "__main__":
    main()
