"""Memory of long contexts: what reading a prompt, tracing a chat and a mixed batch take, with random weights; and the
tokens per second of the mixed batch.

Each case runs in a process of its own; its figure is the highest resident size above that after loading, in MiB. A
prompt takes its keys and values, which grow with its length, and the pass over a chunk, which must not. `cache` is the
size of the keys and values of as many tokens. `--device` other than the CPU isn't measured: there the slot cache is
allocated in full, `slots x columns`, which the case `batch` reports as `allocated`.

    python -m benchmarks.long_memory [--shapes tiny demo] [--lengths 4096 16384 32768] [--cases ...]
        --output FILE.json
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eyas.bench.machine import describe_machine
from eyas.engine import Engine
from eyas.files import write_json
from eyas.targets import Target
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.train.lm.lm import LmModelConfig, build_lm
from eyas.types import Request, SamplingParams

SHAPES = {
    "tiny": {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128},
    "demo": {"hidden_size": 256, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 512},
}
"""The second is the demo target's shape with an eighth of its layers: passes hold one layer's states at a time."""
VOCAB, CHUNK = 4096, 512
CASES = ("prefill", "modules", "trace", "batch", "small-pages", "rounds")
"""A prompt read by native passes and by the modules, a chat traced, a batch, also without huge pages, and its speed."""
MIXED = {"long": [16_384] + [256] * 15, "even": [1200] * 16}


def prompt(length: int) -> tuple[int, ...]:
    """Random tokens."""
    return tuple(torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def target_of(shape: str, length: int, native: bool) -> Target:
    """A random target, run natively where that is possible, or by its modules."""
    torch.manual_seed(0)
    model = build_lm(LmModelConfig(**SHAPES[shape], context=length + 64), VOCAB, 1, 0).eval()
    if not native:
        return Target(model)
    prepack_linears(model)
    return Target(model, native=transformers_decoder(model))


def prefill(target: Target, length: int) -> dict[str, Any]:
    """Read a prompt in chunks, with three taps, and decode four tokens."""
    target.resize(1)
    tokens = prompt(length)
    for _ in target.prefill(range(1), [tokens], (0, 1, 2), CHUNK):
        pass
    return {"cache": length * cache_bytes(target) / 2**20}


def trace(target: Target, length: int) -> dict[str, Any]:
    """Teacher-force a chat, as training and capture do; its states are part of the figure."""
    tokens = torch.tensor([prompt(length)])
    found = target.trace(tokens, torch.tensor([length]), (0, 1, 2))
    return {"states": (found.taps.nbytes + found.final.nbytes) / 2**20}


def batch(target: Target, which: str) -> dict[str, Any]:
    """Run sixteen sequences together: one of 16k tokens and fifteen of 256, or all of 1,200."""
    engine = Engine(target, batch_size=16, prefill_chunk=CHUNK)
    lengths = MIXED[which]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for length in lengths:
        engine.submit(Request(prompt(length), params))
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.state().allocated_tokens)
    each = cache_bytes(target) / 2**20
    return {"tokens": sum(lengths), "cache": sum(lengths) * each, "allocated": most * each}


def rounds(target: Target) -> dict[str, Any]:
    """Tokens per second of plain rounds: fifteen rows of 256 tokens, alone and beside one of 16k, in turns."""
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name, lengths in (("short", MIXED["long"][1:]), ("mixed", MIXED["long"])):
            engine = Engine(target, batch_size=16, prefill_chunk=CHUNK)
            for length in lengths:
                engine.submit(Request(prompt(length), SamplingParams(max_tokens=96, ignore_eos=True)))
            while engine.state().running < len(lengths):
                engine.step()
            took = []
            for _ in range(24):
                began = time.perf_counter()
                engine.step()
                took.append(time.perf_counter() - began)
            found.setdefault(name, []).append(len(lengths) / median(took))
    return {name: median(speeds) for name, speeds in found.items()}


def cache_bytes(target: Target) -> int:
    """Bytes of a token's keys and values."""
    return target.empty_cache(1, 256).nbytes() // 256


def status(name: str) -> int:
    """A figure of this process's memory, in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measured(case: str, shape: str, size: str) -> dict[str, Any]:
    """One case, in this process."""
    if case == "small-pages":
        del mmap.MADV_HUGEPAGE  # a page that a short row touches is then no larger than it needs
    mixed = case in ("batch", "small-pages", "rounds")
    length = max(MIXED["long"]) if mixed else int(size)
    target = target_of(shape, length, native=mixed or case == "prefill")
    if case == "rounds":
        return {name: round(value, 1) for name, value in rounds(target).items()}
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest so far becomes the present one
    before = status("VmRSS")
    run: Callable[..., dict[str, Any]] = batch if mixed else {"trace": trace}.get(case, prefill)
    found = run(target, size if mixed else length)
    found["resident"] = (status("VmHWM") - before) / 1024
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    """Run all cases, each in its own process, and write the figures; or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--lengths", nargs="+", default=["4096", "16384", "32768"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("CASE", "SHAPE", "SIZE"), help="measure this and print it")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(*args.one)))
        return
    found: dict[str, Any] = {}
    for case in args.cases:
        for shape in args.shapes:
            sizes = list(MIXED) if case in ("batch", "small-pages") else args.lengths
            for size in ["tokens/s"] if case == "rounds" else sizes:
                command = [sys.executable, "-m", "benchmarks.long_memory", "--one", case, shape, size]
                line = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                found.setdefault(case, {}).setdefault(shape, {})[size] = line
                print(case, shape, size, line, flush=True)
    if args.output is not None:
        write_json(args.output, {"machine": describe_machine(), "shapes": SHAPES, "MiB": found})


if __name__ == "__main__":
    main()
