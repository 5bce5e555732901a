"""The kernels in Triton at an 8B model's shapes: right, a row's bits the same anywhere, how fast weights are read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.gpu.oracle import chain_trees
from benchmarks.gpu.pairs import Sizes, make_pair
from benchmarks.gpu.steps import Outcome, Row, Skipped
from eyas.targets.native.packed import round_to_int4, round_to_int8
from eyas.targets.triton import why_unusable
from eyas.tree import DraftTree

NODES = (1, 4, 16, 64)
"""Tokens of a row in a pass."""
CLOSE = 2e-2
"""Greatest difference from float32 of products in bfloat16, as a share of the greatest output."""


def linears(sizes: Sizes, device: torch.device) -> Outcome:
    """Products with a norm before them, in bfloat16 and packed in 8 and 4 bits."""
    why = why_unusable(device)
    if why is not None:
        raise Skipped(why)
    from eyas.targets.native.forms import NormForm
    from eyas.targets.triton.linear import Norm, Weight, linear

    hidden, inner = sizes.llama["hidden_size"], sizes.llama["intermediate_size"]
    rows: list[Row] = []
    wrong: list[str] = []
    for inputs, outputs in ((hidden, hidden), (hidden, inner), (inner, hidden)):
        torch.manual_seed(0)
        module = nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
        form = NormForm(1 + torch.rand(inputs, device=device), 1e-5, False)
        norm = Norm.of(form, torch.bfloat16)
        weights = {"bf16": Weight.of(module)}
        for name, pack in (("int8", round_to_int8), ("int4", round_to_int4)):
            weights[name] = Weight.of_blocks(pack(module.weight.cpu()), inputs).to(device)
        x = torch.randn(64, inputs, device=device, dtype=torch.bfloat16)
        wide = form._norm(x).float() @ module.weight.float().T
        for name, weight in weights.items():
            found = linear(x, weight, norm)
            apart = float((found.float() - wide).abs().max() / wide.abs().max())
            same = all(
                linear(x[first : first + count].contiguous(), weight, norm).equal(found[first : first + count])
                for count in (1, 2, 7, 33)
                for first in range(0, 64 - count, 5)
            )
            seconds = _seconds(partial(linear, x[:1], weight, norm), device)
            stored = weight.values.nbytes + sum(
                part.nbytes for part in (weight.scales, weight.offsets) if part is not None
            )
            rows.append(
                {"inputs": inputs, "outputs": outputs, "weights": name, "apart": apart, "same bits": str(same),
                 "GB/s": round(stored / seconds / 1e9)}
            )  # fmt: skip
            limit = CLOSE if name != "int4" else 0.2
            if apart > limit or not same:
                wrong.append(f"{name} {inputs} to {outputs}: {apart:.3g} apart, same bits: {same}")
    return Outcome(rows, wrong)


def passes(sizes: Sizes, device: torch.device) -> Outcome:
    """Verification passes of the random pair over a chain of some nodes, behind a prompt."""
    target = make_pair("random", sizes, device).target
    cache = target.allocate(1)
    for _ in target.prefill(cache, range(1), [list(range(5, 5 + sizes.prompt))], ()):
        pass
    weights = sum(parameter.nbytes for parameter in target.model.parameters())
    rows: list[Row] = []
    for nodes in NODES:
        tokens = torch.arange(nodes, device=device).unsqueeze(0) + 5
        tree = chain_trees(tokens[:, 1:]) if nodes > 1 else DraftTree.empty(1, device)

        def verify(tree: DraftTree = tree, root: Tensor = tokens[:, 0]) -> object:
            return target.verify(cache, range(1), root, tree, ()).logits.best()

        seconds = _seconds(verify, device)
        row: Row = {
            "nodes": nodes,
            "passes": "modules" if target.decoder is None else target.decoder.name,
            "ms": round(1e3 * seconds, 3),
        }
        rows.append(
            row
            | {
                "to one": round(row["ms"] / (rows[0]["ms"] if rows else row["ms"]), 3),
                "GB/s": round(weights / seconds / 1e9),
            }
        )
    return Outcome(rows)


def prompts(sizes: Sizes, device: torch.device) -> Outcome:
    """Reading a prompt of the random pair: how fast, and whether the bits after it are the same if read in pieces."""
    target = make_pair("random", sizes, device).target
    torch.manual_seed(0)
    tokens = torch.randint(5, target.vocab_size, (1, sizes.train_length), device=device)
    found = []

    def read(piece: int) -> None:
        cache = target.allocate(1)
        for _ in target.prefill(cache, range(1), tokens.tolist(), (), piece):
            pass
        done = target.verify(cache, range(1), tokens[:, -1], DraftTree.empty(1, device), ())
        found.append(done.logits.rows.clone())

    rows: list[Row] = []
    for piece in (sizes.train_length, sizes.train_length // 3 + 1):
        seconds = _seconds(partial(read, piece), device, 3)
        rows.append({"tokens": sizes.train_length, "piece": piece, "tokens/s": round(sizes.train_length / seconds)})
    same = found[0].equal(found[-1])
    rows[-1]["same bits"] = str(same)
    promised = target.decoder is not None and not same
    return Outcome(rows, ["a prompt read in pieces gives other bits"] * promised)


def _seconds(run: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """The median time of a call, in which the device finishes."""
    found = []
    for _ in range(times + 4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[4:])
