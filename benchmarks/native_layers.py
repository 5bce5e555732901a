"""Compare native passes accepted at load with the modules, layer by layer, and list every refusal by name.

    python -m benchmarks.native_layers [--only exaone4,ministral3] [--turns 2] [--minutes 20] [--output FILE.json]

Random models of every type that can be a target, with hybrid layer patterns, at four weight scales and two hidden
sizes, in float32 and bfloat16. Limits in the config, such as windows, are small enough for prompts of 600 tokens to
exceed them. Each turn tries each type in one of the sixteen ways; consecutive turns differ in scale, size and dtype,
and sixteen turns cover all. Models in the output file are not tried again.

Models that the load trial accepts are compared with an untouched copy that transformers runs with its own masks, and
with that copy in float64: each layer on the states that the native pass gave it, and every token of greedy answers. A
layer may be as far from float64 as rounding allows by the load trial's rule (`targets/roundings.py`); the distance of
the modules is recorded too. A token may differ from the modules' token where rounding may swap the two. Exits with 1
if anything is farther. Distances are seldom a small part of what is allowed: drawing stops once all are within it.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as REGISTERED

from benchmarks.architecture_sizes import SIZES, SPECIAL
from benchmarks.architectures import build, refuse_large, tiny_config
from benchmarks.harness import Output, described, script
from eyas.engine import Engine
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.targets import Target
from eyas.targets.architecture import decoder_layers
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.decoder import Staged
from eyas.targets.native.experts import replace_experts
from eyas.targets.native.layer_trials import LayerCall
from eyas.targets.native.linears import NativeLinear
from eyas.targets.roundings import RoundingTrial
from eyas.types import Request, SamplingParams

_NARROW = (torch.float32, torch.bfloat16)


class Widely(TorchFunctionMode):
    """Makes torch functions that are asked for a narrower dtype use float64."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value

        if function in (Tensor.float, Tensor.bfloat16):
            function = Tensor.double
        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


class ExactModel:
    """A copy of a model in float64. Its layers get the RoPE tables that the original computes, in its precision."""

    def __init__(self, model: Any, layers: int) -> None:
        self.model = copy.deepcopy(model).double()
        self.model.set_experts_implementation("eager")  # the others support only narrower dtypes
        self.layers = decoder_layers(self.model, layers)

    def layer(self, index: int, call: LayerCall, states: Tensor) -> Tensor:
        """The output of a layer for states [T, H], called as the model calls it."""
        with Widely():
            return call.run(self.layers[index], states.double())

    def logits(self, tokens: Tensor, calls: Sequence[LayerCall]) -> Tensor:
        """The logits [T, V] of tokens [1, T], for which the original model made `calls`."""

        def as_called(layer: nn.Module, args: Any, kwargs: Any) -> Any:
            return calls[order[layer]].given(LayerCall(args, kwargs).states)

        order = {layer: index for index, layer in enumerate(self.layers)}
        hooks = [layer.register_forward_pre_hook(as_called, with_kwargs=True) for layer in self.layers]
        try:
            with Widely():
                logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
                return logits
        finally:
            for hook in hooks:
                hook.remove()


SCALES, HIDDEN, LENGTHS, ANSWER = (0.5, 1.0, 6.0, 20.0), (64, 256), (8, 600), 24
TYPES = (torch.float32, torch.bfloat16)
NATIVE, REFUSED, OTHER, UNTRIED, DIFFERS = "native", "refused at load", "of another form", "not tried", "differs"
SMALL = {
    "max_position_embeddings": 1024,
    "n_positions": 1024,
    "original_max_position_embeddings": 64,
    "sliding_window": 16,
}
"""Replaces values of `SIZES`, so that prompts exceed these limits."""


@dataclass
class Row:
    """The result of one random model."""

    kind: str
    scale: float
    hidden: int
    dtype: str
    result: str = UNTRIED
    reason: str = ""
    apart: float = 0.0
    """The greatest distance of a native layer from float64, as a multiple of what rounding allows."""
    modules_apart: float = 0.0
    """The same for the modules' layers."""
    ratio: float = 0.0
    """Distance of native layers from float64 over that of the modules: the median over tokens, of the worst layer."""
    tokens: int = 0
    """Number of tokens in answers."""
    parted: int = 0
    """Number of tokens that aren't the modules' argmax."""
    answers_apart: float = 0.0
    """How far the farthest of them is below the modules' argmax, as a multiple of what rounding allows."""
    parted_from_exact: int = 0
    """Number of tokens that aren't float64's argmax."""
    modules_parted_from_exact: int = 0
    """Number of tokens at which the modules' argmax isn't float64's."""


class Reasons(logging.Handler):
    """Keeps the messages that eyas logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def small_config(kind: str, hidden: int) -> Any:
    """The config of a type, with every size and limit small."""
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
    """Make a model, load it as a target with native weights, and compare it if it is accepted."""
    said = Reasons()
    log = logging.getLogger("eyas")
    log.addHandler(said)
    log.setLevel(logging.DEBUG)
    try:
        try:
            config = small_config(row.kind, row.hidden)
            refuse_large(config)
            stock = build(config, row.scale).to(dtype)
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
    """Compare a target's native passes with an untouched copy of its model, and record the result."""
    row.result, layers, exact = NATIVE, decoder_layers(stock, target.num_layers), ExactModel(stock, target.num_layers)
    ratios = list[float]()
    for length in LENGTHS:
        tokens = (7 * torch.arange(length) ** 2 + 3).unsqueeze(0) % target.vocab_size
        calls, _ = stock_calls(stock, layers, tokens)
        assert target.native is not None
        staged = Staged(range(1), length, None, [0], None)
        cache = target.allocate(1, length)
        states = target.native.run(cache, staged, tokens, taps=range(target.num_layers + 1)).taps.unbind(1)
        for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
            trial = RoundingTrial(exact.layers[index], target.dtype, partial(exact.layer, index, call, states[index]))
            native, modules = states[index + 1].double(), call.run(layer, states[index]).double()
            row.apart = max(row.apart, found := round(float(trial.apart(native).max()), 3))
            row.modules_apart = max(row.modules_apart, round(float(trial.apart(modules).max()), 3))
            gaps = [(made - trial.expected).abs().amax(1) for made in (native, modules)]
            ratios.append(float((gaps[0] / gaps[1].clamp(min=1e-30)).median()))
            if found > 1 and row.result == NATIVE:
                row.result, row.reason = DIFFERS, f"layer {index} of {length} tokens"
        answer(row, target, stock, exact, tokens)
    row.ratio = round(max(ratios), 3)


def answer(row: Row, target: Target, stock: Any, exact: ExactModel, prompt: torch.Tensor) -> None:
    """Compare each token of a native answer to a prompt [1, T] with the modules' logits after the tokens before it."""
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    said = torch.tensor(Engine(target).generate([Request(tuple(prompt[0].tolist()), params)])[0].token_ids)
    tokens, first = torch.cat((prompt[0], said[:-1])).unsqueeze(0), prompt.shape[1] - 1
    calls, _ = stock_calls(stock, decoder_layers(stock, target.num_layers), tokens)

    def logits() -> torch.Tensor:
        found: torch.Tensor = stock(input_ids=tokens, use_cache=False).logits[0, first:].float()
        return found

    trial = RoundingTrial(stock, target.dtype, logits)
    own, true = trial.expected.argmax(1), exact.logits(tokens, calls)[first:].argmax(1)
    row.tokens += len(said)
    row.parted += int((said != own).sum())
    row.parted_from_exact += int((said != true).sum())
    row.modules_parted_from_exact += int((own != true).sum())
    near, at = trial.expected.clone(), torch.arange(len(said))
    near[at, said] += (trial.expected.amax(1) - trial.expected[at, said]) / 2  # rounding may move both of two logits
    row.answers_apart = max(row.answers_apart, round(float(trial.apart(near).max()), 3))
    if row.answers_apart > 1 and row.result == NATIVE:
        row.result, row.reason = DIFFERS, f"an answer to {prompt.shape[1]} tokens"


def stock_calls(stock: Any, layers: Any, tokens: torch.Tensor) -> tuple[list[LayerCall], torch.Tensor]:
    """How transformers calls each layer for tokens [1, T] with its own masks, and the logits [T, V]."""
    calls = list[LayerCall]()

    def keep(_layer: Any, args: Any, kwargs: Any) -> None:
        calls.append(LayerCall(args, kwargs))

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    logits = stock(input_ids=tokens, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return calls, logits


def rows(kinds: Sequence[str], turns: int) -> Iterator[tuple[Row, torch.dtype]]:
    """In each turn, one way of trying each type; neighboring types start at different scales."""
    for turn, (place, kind) in product(range(turns), enumerate(kinds)):
        fours, step = divmod(turn, len(SCALES))
        scale = SCALES[(place + step) % len(SCALES)]
        hidden = HIDDEN[(place // 4 + step + fours) % 2]
        dtype = TYPES[(place // 8 + step + fours // 2) % 2]
        yield Row(kind, scale, hidden, str(dtype).removeprefix("torch.")), dtype


def tried_before(output: Path | None) -> list[Row]:
    """The rows of an output file that were tried with this release of transformers."""
    if output is None or not output.exists():
        return []
    found = json.loads(output.read_text(encoding="utf-8"))
    return [Row(**row) for row in found["rows"]] if found["transformers"] == transformers.__version__ else []


def findings(done: Sequence[Row]) -> dict[str, Any]:
    """The contents of the output file."""
    counts = Counter(row.result for row in done)
    native = [row for row in done if row.result in (NATIVE, DIFFERS)]
    return {
        "transformers": transformers.__version__,
        "models": len(done),
        "types": len({row.kind for row in done if row.result != UNTRIED}),
        "types_native": len({row.kind for row in native}),
        "counts": dict(counts),
        "modules_beyond": sum(row.modules_apart > 1 for row in native),
        "tokens": sum(row.tokens for row in native),
        "parted": sum(row.parted for row in native),
        "parted_from_exact": sum(row.parted_from_exact for row in native),
        "modules_parted_from_exact": sum(row.modules_parted_from_exact for row in native),
        "accepted_that_differ": counts[DIFFERS],
        "refusals": dict(Counter(f"{row.kind}: {row.reason}" for row in done if row.result in (REFUSED, OTHER))),
        "rows": [asdict(row) for row in done],
    }


@script
def main(
    *,
    only: Annotated[str | None, "comma-separated model types"] = None,
    turns: Annotated[int, "in how many of the sixteen ways each type is tried"] = 16,
    minutes: Annotated[float, "time limit; models not reached are left out"] = 60.0,
    output: Output = None,
) -> int:
    kinds = only.split(",") if only else [kind for kind in REGISTERED if not isinstance(SPECIAL.get(kind), str)]
    transformers.logging.set_verbosity_error()
    done, until = tried_before(output), time.monotonic() + 60 * minutes
    known = {(row.kind, row.scale, row.hidden, row.dtype) for row in done}
    out = {row.kind for row in done if row.result in (UNTRIED, OTHER)}  # at any scale
    for row, dtype in rows(kinds, turns):
        if time.monotonic() > until:
            break
        if row.kind in out or (row.kind, row.scale, row.hidden, row.dtype) in known:
            continue
        done.append(tried(row, dtype))
        if row.result in (UNTRIED, OTHER):
            out.add(row.kind)
        print(
            f"{row.kind} {row.scale:g} {row.hidden} {row.dtype}: {row.result} {row.apart} ({row.modules_apart}) "
            f"answers {row.answers_apart} {row.parted} {row.reason[:90]}",
            flush=True,
        )
        if output is not None:
            write_json(output, described(findings(done)))
    return any(row.result == DIFFERS for row in done)


if __name__ == "__main__":
    raise SystemExit(main())
