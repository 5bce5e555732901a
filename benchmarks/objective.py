"""Step time (forward and backward) and peak memory of eyas's objective against a straightforward implementation.

The plain side concatenates the keys of all steps under a full mask per step, computes every position at every step,
and makes the logits of teacher and drafter for all positions together.

Both sides see the same chats, about a third of which is prompt (a fifth to almost a half). Loss and gradients are
compared first. Times are medians of interleaved runs in one process, with the ratios of runs in the same turn. Memory
is the peak growth of a fresh process's resident set over two steps, gradients included.

    python -m benchmarks.objective [--bf16] --output FILE.json

Shapes: B chats, S positions, V / Vd full / draft vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Output, interleave, paired, report, script, seconds_of
from eyas.data.features import FeatureBatch
from eyas.drafters.kinds.eagle3 import Eagle3Config, Eagle3Network
from eyas.drafters.network import DraftNetwork, set_vocabulary
from eyas.runtime import keep_freed_memory
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftObjective

WIDTH, VOCAB, DRAFT = 512, 4096, 1024
PROMPTS = (0.33, 0.21, 0.45, 0.33, 0.27, 0.39, 0.24, 0.42)
"""The share of each chat that is prompt."""
Side = Literal["eyas", "plain"]


@dataclass(frozen=True)
class Case:
    """The batch and precision of a training step."""

    chats: int
    length: int
    """Tokens per chat."""
    bf16: bool
    """Whether it runs under bfloat16 autocast."""
    prompts: bool


class MaskedAttention:
    """Softmax over the keys of all steps."""

    def __init__(self) -> None:
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, heads, S, D], k, v [B, kv, S, D] -> [B, heads, S, D]."""
        self._keys.setdefault(layer, []).append(k)
        self._values.setdefault(layer, []).append(v)
        count, width, groups = len(self._keys[layer]), q.shape[2], q.shape[1] // k.shape[1]
        keys, values = (torch.cat(x[layer], dim=2) for x in (self._keys, self._values))  # [B, kv, count*S, D]
        causal = torch.ones(width, width, dtype=torch.bool, device=q.device).tril()
        own = torch.eye(width, dtype=torch.bool, device=q.device)
        seen = torch.cat([causal] + [own] * (count - 1), dim=1)
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        scores = q @ keys.transpose(2, 3) / q.shape[-1] ** 0.5 + mask
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def plain_loss(
    network: DraftNetwork,
    head: Callable[[Tensor], Tensor],
    batch: FeatureBatch,
    steps: int,
    decay: float,
) -> Tensor:
    """The summed loss [] of a batch, written plainly."""
    width = batch.tokens.shape[1]
    with torch.no_grad():
        logits = head(batch.final).float()  # [B, S, V]
        teacher = logits[:, :, network.target_ids].softmax(-1)  # [B, S, Vd]
    positions = torch.arange(width, device=batch.tokens.device).expand_as(batch.tokens)
    attention = MaskedAttention()
    hidden = network.fuse(batch.taps).to(batch.taps.dtype)
    loss = torch.zeros((), device=batch.tokens.device)
    for step in range(steps):
        tokens = F.pad(batch.tokens[:, 1 + step :], (0, 1 + step))
        hidden, normed = network.step(tokens, hidden, positions + step, attention)
        log_q = network.logits(normed).float().log_softmax(-1)  # [B, S, Vd]
        target = F.pad(teacher[:, 1 + step :], (0, 0, 0, 1 + step))
        counts = F.pad(batch.loss_mask[:, 2 + step :], (0, 2 + step))
        loss = loss - decay**step * ((target * log_q).sum(-1) * counts).sum()
    return loss


def fresh_network() -> Eagle3Network:
    """A drafter with three taps and a frozen embedding."""
    network = Eagle3Network(
        Eagle3Config(
            hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
            vocab_size=VOCAB, target_hidden_size=WIDTH, draft_vocab_size=DRAFT,
        )
    )  # fmt: skip
    network.embed_tokens.requires_grad_(False)
    set_vocabulary(network, torch.randperm(VOCAB)[:DRAFT].sort().values)
    return network


def build(case: Case) -> tuple[nn.Module, dict[Side, Callable[[], Tensor]]]:
    """The network and, for each side, a call that computes the loss."""
    torch.manual_seed(0)
    network = fresh_network()
    head = nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)
    shape = (case.chats, case.length)
    mask = torch.ones(shape, dtype=torch.bool)
    for chat, share in enumerate(PROMPTS[: case.chats]):
        mask[chat, : int(share * case.length) if case.prompts else 0] = False
    tokens, states = torch.randint(VOCAB, shape), torch.randn(*shape, 3, WIDTH)
    batch = FeatureBatch(tokens, mask, states, torch.randn(*shape, WIDTH))
    config = LossConfig()
    objective = DraftObjective(network, head, VOCAB, lambda _: batch, config, case.bf16)

    def plain() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            return plain_loss(network, head, batch, config.unroll, config.decay)

    return network, {"eyas": lambda: objective.score(batch).loss, "plain": plain}


def step(network: nn.Module, loss: Callable[[], Tensor]) -> Tensor:
    """One training step without the optimizer."""
    network.zero_grad()
    value = loss()
    value.backward()
    return value.detach()


def difference(case: Case) -> dict[str, float]:
    """Relative difference of loss and of all gradients between eyas and the plain side."""
    network, sides = build(case)
    found = []
    for side in (sides["eyas"], sides["plain"]):
        loss = step(network, side)
        found.append((loss, torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])))
    (a, grad_a), (b, grad_b) = found
    return {"loss": abs(a / b - 1).item(), "gradient": ((grad_a - grad_b).norm() / grad_b.norm()).item()}


def times(case: Case, repeats: int) -> dict[str, Any]:
    """Median seconds of each side, measured in turns, and the ratio of eyas to the plain side."""
    network, sides = build(case)
    found = interleave(
        {side: partial(seconds_of, partial(step, network, loss)) for side, loss in sides.items()}, repeats
    )
    return {side: round(median(values), 4) for side, values in found.items()} | {
        "of_plain": paired(found["eyas"], found["plain"])
    }


def growth(side: Side, case: Case, threads: int) -> float:
    """MiB by which this process grows at most over two steps."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    network, sides = build(case)
    torch.optim.SGD(network.parameters())  # imports what optimizers need (sympy and more), as every training does
    before = resident("VmRSS")
    for _ in range(2):
        step(network, sides[side])
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """MiB of this process's resident set: current (VmRSS) or peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def memory(case: Case) -> dict[str, float]:
    """`growth` of each side in a fresh process, and the ratio of eyas to the plain side."""
    found = {}
    for side in get_args(Side):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            found[side] = round(fresh.submit(growth, side, case, torch.get_num_threads()).result(), 1)
    return found | {"of_plain": round(found["eyas"] / found["plain"], 3)}


@script
def main(
    *,
    chats: Sequence[int] = (1, 2, 4),
    length: Annotated[int, "tokens per chat"] = 512,
    repeats: int = 7,
    threads: int = 2,
    bf16: Annotated[bool, "only bfloat16, instead of both precisions"] = False,
    no_prompts: Annotated[bool, "make every token an answer token"] = False,
    output: Output = None,
) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()
    cases = [
        Case(count, length, dtype, not no_prompts)
        for dtype, count in product((True,) if bf16 else (False, True), chats)
    ]
    rows = []
    for case in cases:
        found = {"relative_difference": difference(case), "seconds": times(case, repeats), "mebibytes": memory(case)}
        rows.append(asdict(case) | found)
        print(rows[-1], flush=True)
    report({"threads": threads, "rows": rows}, output)


if __name__ == "__main__":
    raise SystemExit(main())
