"""Step time (forward and backward) and peak memory of a block drafter's objective against a plain masked one.

The plain side lays a chat's context and all of its blocks end to end, under one full mask through torch's
`scaled_dot_product_attention`, and makes the logits of teacher and drafter for all guesses at once. Both sides draw the
same anchors; loss and gradients are compared first. Times are medians of interleaved runs in one process; memory is
what a fresh process's resident set grows by, at its highest, over two steps.

    python -m benchmarks.block_training --output FILE.json

Shapes: C chats, S positions, n anchors, B slots, K guesses of a block, Vd draft vocabulary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.objective import resident, step
from eyas.bench.machine import describe_machine
from eyas.data.features import FeatureBatch
from eyas.drafters.block.network import BlockNetwork
from eyas.drafters.kinds.dflash import DFlashConfig
from eyas.drafters.kinds.dspark import DSparkConfig, DSparkNetwork
from eyas.runtime import keep_freed_memory
from eyas.train.loss.block import sampled_anchors
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftObjective

WIDTH, VOCAB, LAYERS = 512, 4096, 2
SIDES = ("eyas", "plain")
KINDS = ("dflash", "dspark")
GUESSES = 7


class TrainingCase(NamedTuple):
    """What is trained, and on what."""

    kind: str
    chats: int
    anchors: int
    """Blocks of a chat."""
    length: int
    """Tokens of a chat."""
    bf16: bool
    """Under bfloat16 autocast."""


def network_of(kind: str) -> BlockNetwork:
    """A fresh network of a kind, with the same sizes for all but its heads."""
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "target_hidden_size": WIDTH,
        "num_aux_hidden_states": LAYERS, "num_hidden_layers": LAYERS, "mask_token_id": 0,
    }  # fmt: skip
    made: BlockNetwork
    if kind == "dflash":
        made = BlockNetwork(DFlashConfig(**sizes, block_size=GUESSES + 1))
    else:
        made = DSparkNetwork(
            DSparkConfig(**sizes, block_size=GUESSES, enable_confidence_head=False, confidence_head_with_markov=False)
        )
    made.embed_tokens.requires_grad_(False)
    made.lm_head.requires_grad_(False)
    return made


def build(shape: TrainingCase) -> tuple[BlockNetwork, dict[str, Callable[[], Tensor]]]:
    """The network and, for each side, a call that computes the loss."""
    torch.manual_seed(0)
    kind, chats, anchors, length, bf16 = shape
    network = network_of(kind)
    head = nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)
    mask = torch.ones(chats, length, dtype=torch.bool)
    for chat, share in enumerate((0.33, 0.21, 0.45, 0.33, 0.27, 0.39, 0.24, 0.42)[:chats]):
        mask[chat, : int(share * length)] = False
    taps = torch.randn(chats, length, LAYERS, WIDTH)
    batch = FeatureBatch(torch.randint(VOCAB, (chats, length)), mask, taps, torch.randn(chats, length, WIDTH))
    config = LossConfig(unroll=GUESSES, anchors=anchors)
    objective = DraftObjective(network, head, VOCAB, lambda _: batch, config, bf16)

    def plain() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return plain_loss(network, head, batch, config)

    return network, {"eyas": lambda: objective.score(batch).loss, "plain": plain}


class MaskedBlocks:
    """Attention of one chat's blocks under a full mask; its context's keys and values come first."""

    def __init__(self, positions: Tensor, width: int, slots: int) -> None:
        """`positions` [n] are the last context positions that the blocks see."""
        count = len(positions)
        context = torch.arange(width) <= positions.repeat_interleave(slots).unsqueeze(1)
        block = torch.arange(count).repeat_interleave(slots)
        self._mask = torch.cat((context, block.unsqueeze(1) == block), dim=1)  # [n * B, S + n * B]
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's keys and values [1, kv, S, D] of the context."""
        self._context[layer] = keys, values

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, n * B, D], k, v [1, kv, n * B, D] -> [1, heads, n * B, D]."""
        keys, values = (
            torch.cat((old.to(new.dtype), new), dim=2) for old, new in zip(self._context[layer], (k, v), strict=True)
        )
        return F.scaled_dot_product_attention(
            q.to(v.dtype), keys.to(v.dtype), values, attn_mask=self._mask, enable_gqa=q.shape[1] > k.shape[1]
        )


def plain_loss(
    network: BlockNetwork, head: Callable[[Tensor], Tensor], batch: FeatureBatch, config: LossConfig
) -> Tensor:
    """Summed loss [] of a batch, a chat at a time."""
    drafts, size, first = network.config, network.config.block_size, 0 if network.config.sample_from_anchor else 1
    anchors = sampled_anchors(batch.loss_mask, config.anchors, (0,))
    steps, loss = config.unroll, torch.zeros(())
    for chat in range(len(batch.tokens)):
        tokens, mask = F.pad(batch.tokens[chat], (0, size + 2)), F.pad(batch.loss_mask[chat], (0, size + 2))
        at = torch.tensor([p for c, p in zip(anchors.chats, anchors.positions, strict=True) if c == chat])
        with torch.no_grad():
            teacher = F.pad(head(batch.final[chat]).float().softmax(-1), (0, 0, 0, size + 2))  # [S + ., V]
        attention = MaskedBlocks(at, batch.tokens.shape[1], size)
        context = network.fuse(batch.taps[chat : chat + 1]).to(batch.taps.dtype)
        network.read(context, torch.arange(batch.tokens.shape[1]).unsqueeze(0), attention.store)
        blocks = F.pad(tokens[at + 1].unsqueeze(1), (0, size - 1), value=drafts.mask_token_id)  # [n, B]
        positions = at.unsqueeze(1) + 1 + torch.arange(size)
        states = network.block(blocks.view(1, -1), positions.view(1, -1), attention)
        states = states.view(len(at), size, -1)[:, first : first + steps].contiguous()  # else torch multiplies slowly
        ahead = at.unsqueeze(1) + 1 + torch.arange(steps)  # [n, K] the token before each guess
        log_q = network.joined_logits(network.joined(states, tokens[ahead])).float().log_softmax(-1)  # [n, K, Vd]
        counts = mask[ahead + 1].long().cumprod(1) * config.decay ** torch.arange(steps)
        loss = loss - ((teacher[ahead] * log_q).sum(-1) * counts).sum()
    return loss


def difference(shape: TrainingCase) -> dict[str, float]:
    """Relative difference of loss and of all gradients between eyas and the plain side."""
    network, sides = build(shape)
    found = {}
    for side in SIDES:
        loss = step(network, sides[side])
        found[side] = loss, torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
    (a, grad_a), (b, grad_b) = found["eyas"], found["plain"]
    return {"loss": abs(a / b - 1).item(), "gradient": ((grad_a - grad_b).norm() / grad_b.norm()).item()}


def times(shape: TrainingCase, repeats: int) -> dict[str, float]:
    """Median seconds of each side in turns, and the median of the ratios of runs that follow each other."""
    network, sides = build(shape)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(repeats + 1):
        for side in SIDES:
            began = time.perf_counter()
            step(network, sides[side])
            if repeat:  # the first is a warm-up
                found[side].append(time.perf_counter() - began)
    ratio = statistics.median(a / b for a, b in zip(found["eyas"], found["plain"], strict=True))
    return {side: round(statistics.median(values), 4) for side, values in found.items()} | {"ratio": round(ratio, 3)}


def growth(side: str, shape: TrainingCase) -> float:
    """MiB that this process grows by over two steps."""
    network, sides = build(shape)
    torch.optim.SGD(network.parameters())  # loads what optimizers load, as every training does: sympy and more
    before = resident("VmRSS")
    for _ in range(2):
        step(network, sides[side])
    return resident("VmHWM") - before


def memory(shape: TrainingCase, threads: int) -> dict[str, float]:
    """`growth` of each side in a process of its own, and their ratio."""
    found = {}
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.block_training", "--grow", side, "--kinds", shape.kind]
        command += ["--chats", str(shape.chats), "--anchors", str(shape.anchors), "--length", str(shape.length)]
        command += ["--threads", str(threads)] + ["--bf16"] * shape.bf16
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[side] = round(float(done.stdout), 1)
    return found | {"ratio": round(found["eyas"] / found["plain"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--chats", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--anchors", type=int, nargs="+", default=[64, 256], help="blocks of a chat")
    parser.add_argument("--length", type=int, default=512, help="tokens of a chat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--grow", choices=SIDES, help="measure the memory of one side in this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    if options.grow:
        shape = TrainingCase(options.kinds[0], options.chats[0], options.anchors[0], options.length, options.bf16)
        print(growth(options.grow, shape))
        return

    rows: list[dict[str, Any]] = []
    for kind in options.kinds:
        for chats in options.chats:
            for anchors in options.anchors:
                shape = TrainingCase(kind, chats, anchors, options.length, options.bf16)
                row = {
                    "kind": kind,
                    "chats": chats,
                    "anchors": anchors,
                    "length": options.length,
                    "dtype": "bfloat16 autocast" if options.bf16 else "float32",
                    "relative_difference": difference(shape),
                    "seconds": times(shape, options.repeats),
                    "mebibytes": memory(shape, options.threads),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    report = {
        "date": date.today().isoformat(),
        "what": f"objective of block drafters, forward and backward: H={WIDTH}, V={VOCAB}, {LAYERS} "
        f"layers, {GUESSES} guesses, 8 heads on 4 key heads, {LAYERS} taps. seconds: medians of interleaved runs; "
        "mebibytes: growth of the resident set's high-water mark over two steps in a fresh process (gradients of the "
        "weights included)",
        "threads": options.threads,
        "rows": rows,
        "machine": describe_machine(),
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
