"""Step time (forward and backward) and peak memory of the EAGLE-3 objective against `plain_objective.py`.

Both sides see the same chats: S tokens, of which the first third or so is prompt (a fifth to almost a half). Loss and
gradients are compared first. Times are medians of interleaved runs in one process; memory is what a fresh process's
resident set grows by, at its highest, over two steps.

    python -m benchmarks.objective --output FILE.json
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
from typing import Any

import torch
from torch import nn

from benchmarks.plain_objective import plain_loss
from eyas.bench.machine import describe_machine
from eyas.data.features import FeatureBatch
from eyas.drafters.kinds.eagle3 import Eagle3Config, Eagle3Network
from eyas.runtime import keep_freed_memory
from eyas.train.loss.config import LossConfig
from eyas.train.loss.cpu_linear import fast_linears
from eyas.train.loss.objective import DraftObjective

WIDTH, VOCAB, DRAFT, LENGTH = 512, 4096, 1024, 512
CONFIG = LossConfig()
SIDES = ("eyas", "plain", "plain_fused", "plain_onednn")
"""eyas; attention as masked matmuls; through torch's masked kernel; as matmuls, with eyas's float32 linear layers."""


def build(chats: int, bf16: bool, prompts: bool) -> tuple[Eagle3Network, dict[str, Callable[[], torch.Tensor]]]:
    """The network and, for each side, a call that computes the loss."""
    torch.manual_seed(0)
    config = Eagle3Config(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        vocab_size=VOCAB, draft_vocab_size=DRAFT, target_hidden_size=WIDTH,
    )  # fmt: skip
    network = Eagle3Network(config)
    network.embed_tokens.requires_grad_(False)
    network.set_vocabulary(torch.randperm(VOCAB)[:DRAFT].sort().values)
    head = nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)
    mask = torch.ones(chats, LENGTH, dtype=torch.bool)
    for chat, share in enumerate((0.33, 0.21, 0.45, 0.33, 0.27, 0.39, 0.24, 0.42)[:chats]):
        mask[chat, : int(share * LENGTH) if prompts else 0] = False
    tokens = torch.randint(VOCAB, (chats, LENGTH))
    batch = FeatureBatch(tokens, mask, torch.randn(chats, LENGTH, 3, WIDTH), torch.randn(chats, LENGTH, WIDTH))
    objective = DraftObjective(network, head, VOCAB, lambda _: batch, CONFIG, bf16)

    def plain(fused: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return plain_loss(network, head, batch, CONFIG.unroll, CONFIG.decay, fused)

    def onednn() -> torch.Tensor:
        with fast_linears(batch.tokens.device):
            return plain(False)

    return network, {
        "eyas": lambda: objective.score(batch).loss,
        "plain": lambda: plain(False),
        "plain_fused": lambda: plain(True),
        "plain_onednn": onednn,
    }


def step(network: nn.Module, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """One training step without the optimizer."""
    network.zero_grad()
    value = loss()
    value.backward()
    return value.detach()


def difference(chats: int, bf16: bool) -> dict[str, float]:
    """Relative difference of loss and of all gradients between eyas and the plain side."""
    network, sides = build(chats, bf16, True)
    found = {}
    for side in ("eyas", "plain"):
        loss = step(network, sides[side])
        found[side] = loss, torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
    (a, grad_a), (b, grad_b) = found["eyas"], found["plain"]
    return {"loss": abs(a / b - 1).item(), "gradient": ((grad_a - grad_b).norm() / grad_b.norm()).item()}


def times(chats: int, bf16: bool, prompts: bool, repeats: int) -> dict[str, float]:
    """Median seconds of each side, in turns."""
    network, sides = build(chats, bf16, prompts)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(repeats + 1):
        for side in SIDES:
            began = time.perf_counter()
            step(network, sides[side])
            if repeat:  # the first is a warm-up
                found[side].append(time.perf_counter() - began)
    return {side: statistics.median(values) for side, values in found.items()}


def growth(side: str, chats: int, bf16: bool, prompts: bool) -> float:
    """MiB that this process grows by over two steps."""
    network, sides = build(chats, bf16, prompts)
    before = resident("VmRSS")
    for _ in range(2):
        step(network, sides[side])
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """MiB of this process's resident set: now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def memory(chats: int, bf16: bool, prompts: bool) -> dict[str, float]:
    """`growth` of each side in a process of its own."""
    found = {}
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.objective", "--grow", side, "--chats", str(chats)]
        command += ["--bf16"] * bf16 + ["--no-prompts"] * (not prompts)
        found[side] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def ratios(values: dict[str, float]) -> dict[str, float]:
    """Values with eyas's share of each plain side."""
    rounded = {side: round(value, 4) for side, value in values.items()}
    return {**rounded, **{f"of_{side}": round(values["eyas"] / values[side], 3) for side in SIDES[1:]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="only this type, instead of both")
    parser.add_argument("--no-prompts", action="store_true", help="every token is an answer token")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--grow", choices=SIDES, help="measure the memory of one side in this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    if options.grow:
        print(growth(options.grow, options.chats[0], options.bf16, not options.no_prompts))
        return

    rows: list[dict[str, Any]] = []
    for bf16 in (True,) if options.bf16 else (False, True):
        for chats in options.chats:
            shape = (chats, bf16, not options.no_prompts)
            row = {
                "chats": chats,
                "dtype": "bfloat16 autocast" if bf16 else "float32",
                "prompts": not options.no_prompts,
                "relative_difference": difference(chats, bf16),
                "seconds": ratios(times(*shape, options.repeats)),
                "mebibytes": ratios(memory(*shape)),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    report = {
        "date": date.today().isoformat(),
        "what": "EAGLE-3 objective, forward and backward: H=512, V=4096 -> 1024, S=512, 7 steps, intermediate 1536, "
        "8 heads on 4 key heads, 3 taps. seconds: medians of interleaved runs; mebibytes: growth of the resident set's "
        "high-water mark over two steps in a fresh process (gradients of the weights included)",
        "threads": options.threads,
        "rows": rows,
        "machine": describe_machine(),
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
