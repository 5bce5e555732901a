"""One process of a group: shards a target and writes its shards' sizes and its results: `shards.py TARGET FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from eyas.targets import load_target
from eyas.targets import target as tracing
from eyas.targets.fingerprint import fingerprint
from eyas.train.drafter.target import RunTarget
from eyas.train.loop.distributed import ProcessGroup

TAPS = (1, 3, 4)
CHUNK = 8
"""Tokens per pass over longer rows."""
BATCHES = {0: [(2, 9)], 1: [(1, 30), (3, 5)]}
"""Rank -> the shapes [B, S] of its batches: two passes for one process, five for the other."""


def rows(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, S] and lengths [B] of a batch."""
    draw = torch.Generator().manual_seed(shape[1])
    return torch.randint(3, 200, shape, generator=draw), torch.full((shape[0],), shape[1])


def main() -> None:
    torch.set_num_threads(1)
    tracing.MAX_UNCHUNKED = tracing.CHUNK = CHUNK
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{os.environ['MEETING']}", rank=rank, world_size=2)
    processes = ProcessGroup(rank, 2, torch.device("cpu"), "fsdp")
    load = partial(load_target, sys.argv[1], dtype="float32", device="cpu", prepacked=False)
    sharded = RunTarget.sharded(load, processes)
    target = sharded.target
    states = {}
    for turn in range(2):  # weights are gathered again
        with sharded.in_step():
            for shape in BATCHES[rank]:
                traced = target.trace(*rows(shape), TAPS)
                states |= {f"{turn}-{shape[1]}-{name}": value for name, value in traced._asdict().items()}
    states["logits"] = target.head(states[f"0-{BATCHES[rank][0][1]}-final"])
    save_file(states, Path(sys.argv[2]) / f"{rank}.safetensors")
    parameters = [p for layer in target.layers for p in layer.parameters()]
    facts = {
        "held": sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor)),
        "layers": sum(p.numel() for p in parameters),
        "whole": sum(p.numel() for p in target.model.parameters() if not isinstance(p, DTensor)),
        "fingerprint": fingerprint(target.model),
        "trains": any(p.requires_grad for p in target.model.parameters()) or target.model.training,
    }
    (Path(sys.argv[2]) / f"{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # as in tests/train/loop/process.py


if __name__ == "__main__":
    main()
