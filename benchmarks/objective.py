"""Step time (forward and backward) and peak memory of eyas's objectives against those of `plain_objective.py`.

All sides see the same chats, of which the first third or so is prompt (a fifth to almost a half). Loss and gradients
are compared first. Times are medians of interleaved runs in one process, with the ratios of runs in the same turn;
memory is what a fresh process's resident set grows by, at its highest, over two steps, gradients included.

    python -m benchmarks.objective [--kinds eagle3 dflash dspark] [--bf16] --output FILE.json
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

from benchmarks.harness import Output, interleave, paired, report, script, seconds_of
from benchmarks.plain_objective import plain_block_loss, plain_loss
from eyas.data.features import FeatureBatch
from eyas.drafters.block.network import BlockNetwork
from eyas.drafters.kinds.dflash import DFlashConfig
from eyas.drafters.kinds.dspark import DSparkConfig, DSparkNetwork
from eyas.drafters.kinds.eagle3 import Eagle3Config, Eagle3Network
from eyas.runtime import keep_freed_memory
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftObjective

WIDTH, VOCAB, DRAFT, GUESSES = 512, 4096, 1024, 7
PROMPTS = (0.33, 0.21, 0.45, 0.33, 0.27, 0.39, 0.24, 0.42)
"""The parts of chats that are prompts."""
Kind = Literal["eagle3", "dflash", "dspark"]
Side = Literal["eyas", "plain"]


@dataclass(frozen=True)
class Case:
    """What is trained, and on what."""

    kind: Kind
    chats: int
    length: int
    """Tokens of a chat."""
    anchors: int
    """Blocks of a chat; 0 for EAGLE-3."""
    bf16: bool
    """Under bfloat16 autocast."""
    prompts: bool


def network_of(kind: Kind) -> tuple[Any, int]:
    """A fresh network with all the same sizes but those of its heads, and the number of its taps."""
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": VOCAB, "target_hidden_size": WIDTH,
    }  # fmt: skip
    if kind == "eagle3":
        network = Eagle3Network(Eagle3Config(**sizes, draft_vocab_size=DRAFT))
        network.embed_tokens.requires_grad_(False)
        network.set_vocabulary(torch.randperm(VOCAB)[:DRAFT].sort().values)
        return network, 3
    sizes |= {"draft_vocab_size": VOCAB, "num_aux_hidden_states": 2, "num_hidden_layers": 2, "mask_token_id": 0}
    heads: dict[str, Any] = {"enable_confidence_head": False, "confidence_head_with_markov": False}
    block: BlockNetwork = (
        BlockNetwork(DFlashConfig(**sizes, block_size=GUESSES + 1))
        if kind == "dflash"
        else DSparkNetwork(DSparkConfig(**sizes, block_size=GUESSES, **heads))
    )
    block.embed_tokens.requires_grad_(False)
    block.lm_head.requires_grad_(False)
    return block, 2


def build(case: Case) -> tuple[nn.Module, dict[Side, Callable[[], Tensor]]]:
    """The network and, for each side, a call that computes the loss."""
    torch.manual_seed(0)
    network, taps = network_of(case.kind)
    head = nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)
    shape = (case.chats, case.length)
    mask = torch.ones(shape, dtype=torch.bool)
    for chat, share in enumerate(PROMPTS[: case.chats]):
        mask[chat, : int(share * case.length) if case.prompts else 0] = False
    tokens, states = torch.randint(VOCAB, shape), torch.randn(*shape, taps, WIDTH)
    batch = FeatureBatch(tokens, mask, states, torch.randn(*shape, WIDTH))
    config = LossConfig(unroll=GUESSES, anchors=case.anchors) if case.anchors else LossConfig()
    objective = DraftObjective(network, head, VOCAB, lambda _: batch, config, case.bf16)

    def plain() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            if case.anchors:
                return plain_block_loss(network, head, batch, config)
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
    """Median seconds of each side, in turns, and eyas's share of the other's."""
    network, sides = build(case)
    found = interleave(
        {side: partial(seconds_of, partial(step, network, loss)) for side, loss in sides.items()}, repeats
    )
    return {side: round(median(values), 4) for side, values in found.items()} | {
        "of_plain": paired(found["eyas"], found["plain"])
    }


def growth(side: Side, case: Case, threads: int) -> float:
    """MiB that this process grows by over two steps."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    network, sides = build(case)
    torch.optim.SGD(network.parameters())  # loads what optimizers load, as every training does: sympy and more
    before = resident("VmRSS")
    for _ in range(2):
        step(network, sides[side])
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """MiB of this process's resident set: now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def memory(case: Case) -> dict[str, float]:
    """`growth` of each side in a process of its own, and eyas's share of the other's."""
    found = {}
    for side in get_args(Side):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            found[side] = round(fresh.submit(growth, side, case, torch.get_num_threads()).result(), 1)
    return found | {"of_plain": round(found["eyas"] / found["plain"], 3)}


@script
def main(
    *,
    kinds: Sequence[Kind] = ("eagle3",),
    chats: Sequence[int] = (1, 2, 4),
    anchors: Annotated[Sequence[int], "blocks of a chat, of block drafters"] = (64, 256),
    length: Annotated[int, "tokens of a chat"] = 512,
    repeats: int = 7,
    threads: int = 2,
    bf16: Annotated[bool, "only this type, instead of both"] = False,
    no_prompts: Annotated[bool, "every token is an answer token"] = False,
    output: Output = None,
) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()
    cases = [
        Case(kind, count, length, blocks, dtype, not no_prompts)
        for kind, dtype, count in product(kinds, (True,) if bf16 else (False, True), chats)
        for blocks in ([0] if kind == "eagle3" else anchors)
    ]
    rows = []
    for case in cases:
        found = {"relative_difference": difference(case), "seconds": times(case, repeats), "mebibytes": memory(case)}
        rows.append(asdict(case) | found)
        print(rows[-1], flush=True)
    report({"threads": threads, "rows": rows}, output)


if __name__ == "__main__":
    raise SystemExit(main())
