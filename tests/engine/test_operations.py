"""How many PyTorch operations the host dispatches in a round: on small targets they are what a round costs."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import drafter_of
from eyas.engine import Engine, Speculation
from eyas.targets import Target
from eyas.targets.graphs import Outputs, Record, Recording
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.tree import parse_tree
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.types import Request, SamplingParams

from .. import recording, tiny

NATIVE = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
PRICES = tuple(0.01 * n for n in range(1, 17))


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Uploads(TorchFunctionMode):
    """Notes calls of `torch.tensor` that name a device: on an accelerator the host waits in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.tensor, torch.as_tensor) and (kwargs or {}).get("device") is not None:
            caller = next(f for f in reversed(traceback.extract_stack()[:-1]) if "eyas" in f.filename)
            if caller.name != "to_device":
                self.found.append(f"{caller.filename}:{caller.lineno}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", [None, parse_tree("chain:3"), parse_tree("dynamic:3,3,8"), SharedTree(3, 3, 16)])
def test_a_round_copies_to_the_device_without_waiting(tree: Any, temperature: float) -> None:
    target = tiny.target("llama")
    drafter = tiny.drafter("eagle3")
    engine = Engine(target, None, Speculation(drafter, tree), batch_size=2)
    for i, prompt in enumerate(tiny.prompts(7, 9)):
        engine.submit(
            Request(tuple(prompt), SamplingParams(max_tokens=40, temperature=temperature, seed=i, logprobs=2))
        )
    with Uploads() as uploads:
        for _ in range(4):
            engine.step()
    assert uploads.found == []


@pytest.fixture(scope="module")
def native() -> tuple[Target, NetworkDrafter]:
    model = tiny.build_model("llama", head_dim=16)
    prepack_linears(model, NativeLinear)
    target = Target(model, decoder=transformers_decoder(model))
    network = tiny.network("eagle3", head_dim=16)
    prepack_linears(network, NativeLinear)
    return target, drafter_of(network, network.config.taps or network.config.default_taps(tiny.LAYERS))


@NATIVE
@pytest.mark.parametrize(
    ("tree", "rows", "temperature", "most"),
    [
        (None, 1, 0.0, 37),
        (parse_tree("chain:3"), 1, 0.0, 72),
        (parse_tree("chain:3"), 4, 0.0, 76),
        (parse_tree("chain:3"), 1, 0.8, 84),
        (parse_tree("dynamic:3,3,8"), 1, 0.0, 92),
        (PlannedTree(SharedTree(3, 3, 16, per_row=8, threshold=0.001), prices=PRICES), 1, 0.0, 67),
    ],
)
def test_a_round_dispatches_few_operations(
    native: tuple[Target, NetworkDrafter], tree: Any, rows: int, temperature: float, most: int
) -> None:
    target, drafter = native
    assert target.native is not None
    engine = Engine(target, None, Speculation(drafter, tree), batch_size=rows)
    for i, prompt in enumerate(tiny.prompts(*[7] * rows)):
        engine.submit(
            Request(tuple(prompt), SamplingParams(max_tokens=40, temperature=temperature, seed=i, ignore_eos=True))
        )
    for _ in range(4):
        engine.step()
    with Operations() as counted:
        engine.step()
    assert engine.outcome is not None
    assert engine.outcome.pass_tokens >= rows * (1 if tree is None else 4)
    assert sum(counted.counts.values()) <= most, counted.counts.most_common(15)


def dispatched(layers: int, tree: str | None, record: Record | None) -> int:
    """The operations of a greedy round, what is replayed not counted: the fewest of some rounds."""
    target = Target(tiny.build_model("llama", num_hidden_layers=layers))
    drafter = tiny.eagle3_drafter()
    if record is not None:
        target.record = drafter.pairs.record = record
    engine = Engine(target, None, Speculation(drafter, None if tree is None else parse_tree(tree)))
    engine.submit(Request(tuple(tiny.prompts(7)[0]), SamplingParams(max_tokens=80, ignore_eos=True)))
    found = []
    for _ in range(12):
        with Operations() as counted:
            engine.step()
        found.append(sum(counted.counts.values()))
    return min(found)


@pytest.mark.parametrize(("tree", "most"), [(None, 51), ("chain:3", 84), ("dynamic:5,4,15", 97)])
def test_recorded_rounds_dispatch_few_operations_however_many_layers(tree: str | None, most: int) -> None:
    def started_at_once(compute: Callable[[], Outputs]) -> Recording:
        return Recording(lambda: None, recording.record(compute).outputs)

    assert dispatched(12, tree, started_at_once) == dispatched(4, tree, started_at_once) <= most
    assert dispatched(12, tree, None) > dispatched(4, tree, None) + 300
