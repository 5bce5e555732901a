"""Training from a store against training with the target in the loop: the same rows, the same steps.

The store is captured first (its seconds are reported beside the others), then both runs take turns, `--repeats` times
each in a fresh folder. Speed is tokens of the micro-batches, padding counted, per second of training (validation left
out); every step counts with its fastest repeat, because whatever else the machine does only slows it down.

    python -m benchmarks.offline_online CHATS [--kind eagle3] [--steps 30] [--states bf16] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from eyas.bench.machine import describe_machine
from eyas.data.capture.capture import Capture, CaptureConfig
from eyas.data.capture.rows import CaptureRows, read_rows
from eyas.data.chats.folder import splits
from eyas.data.tokens.batches import ChatBatches
from eyas.targets import load_target, load_tokenizer
from eyas.text.chats import write_chats
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter


def capture(options: argparse.Namespace, chats: Path, folder: Path) -> tuple[float, CaptureRows]:
    """Store the features; returns the seconds it took, and the rows."""
    target = load_target(options.model, dtype=options.dtype, device=options.device)
    rows = read_rows(load_tokenizer(options.model), chats, options.share, options.max_length, target.vocab_size)
    config = CaptureConfig(
        states=options.states, batch_tokens=options.batch_tokens,
        final="all" if options.kind in ("eagle1", "mlp") else "answers",
    )  # fmt: skip
    began = time.perf_counter()
    made = Capture(target, rows, config, folder, name=options.model, chats=chats.name)
    with made.begun():
        made.run()
    return time.perf_counter() - began, rows


def run(options: argparse.Namespace, output: Path, **source: Any) -> list[dict[str, float]]:
    """Train; the records of the steps."""
    recipe = DrafterTrainConfig.model_validate(
        {
            "target": options.model, "target_dtype": options.dtype, "device": options.device, "output": output,
            "shape": {"kind": options.kind, "draft_vocab_size": options.vocabulary},
            "loss": {} if options.unroll is None else {"unroll": options.unroll},
            "batch_tokens": options.batch_tokens, "max_length": options.max_length,
            "validation": {"batches": 1, "decode": False},
            "loop": {"steps": options.steps, "log_every": 1, "bf16": options.dtype == "bfloat16"}, **source,
        }
    )  # fmt: skip
    train_drafter(recipe)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in records if "loss" in record]


def step_seconds(records: list[dict[str, float]]) -> list[float]:
    """How long each step took."""
    ends = [0.0, *(record["seconds"] for record in records)]
    return [after - before for before, after in pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kind", default="eagle3", help="its sizes are the target's")
    parser.add_argument("--vocabulary", type=int, default=2048, help="draft tokens")
    parser.add_argument("--unroll", type=int, help="steps of the training-time test (default: the kind's)")
    parser.add_argument("--limit", type=int, default=400, help="chats used")
    parser.add_argument("--share", type=float, default=0.1, help="of them held out")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--states", default="bf16")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        chats, store = folder / "chats.jsonl", folder / "store"
        given = [chat for split in splits(options.chats, options.share).values() for chat in split]
        write_chats(chats, given[:: max(1, len(given) // options.limit)][: options.limit])
        seconds, rows = capture(options, chats, store)
        sources: dict[str, dict[str, Any]] = {
            "offline": {"source": "offline", "store": store},
            "online": {"source": "online", "chats": chats, "held_out_share": options.share},
        }
        runs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in sources}
        for repeat in range(options.repeats):
            for name, source in sources.items():
                runs[name].append(run(options, folder / f"{name}-{repeat}", **source))
    batches = ChatBatches(rows.rows["train"], options.batch_tokens, options.max_length, seed=0)
    tokens = sum(batches.batch(number).tokens.numel() for number in range(options.steps))
    fastest = {name: sum(map(min, zip(*map(step_seconds, found), strict=True))) for name, found in runs.items()}
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(runs["offline"][0], runs["online"][0], strict=True))
    report = {
        "benchmark": "offline_online",
        "date": date.today().isoformat(),
        "tokens_per_second": {name: round(tokens / found, 1) for name, found in fastest.items()},
        "speedup": round(fastest["online"] / fastest["offline"], 3),
        "largest_loss_difference": apart,
        "losses": {name: [round(record["loss"], 5) for record in found[0]] for name, found in runs.items()},
        "capture_tokens_per_second": round(
            sum(len(r.tokens) for part in rows.rows.values() for r in part) / seconds, 1
        ),
        "settings": {k: str(v) for k, v in vars(options).items() if k not in ("output", "chats")},
        "machine": describe_machine(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
