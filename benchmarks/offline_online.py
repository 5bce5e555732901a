"""Training from a store against training with the target in the loop: the same rows, the same steps.

The store is captured first (its seconds are reported beside the others), then both runs take turns, `--repeats` times
each in a fresh folder. Speed is tokens of the micro-batches, padding counted, per second of training (validation left
out); every step counts with its fastest repeat, because whatever else the machine does only slows it down.

    python -m benchmarks.offline_online CHATS [--kind eagle3] [--steps 30] [--states bf16] [--output FILE.json]
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import KW_ONLY, asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.harness import Output, report, script, seconds_of
from eyas.data.capture.capture import Capture, CaptureConfig
from eyas.data.capture.shard import CaptureRows, read_rows
from eyas.data.chats.folder import splits
from eyas.data.tokens.batches import ChatBatches
from eyas.targets import load_target, load_tokenizer
from eyas.text.chats import write_chats
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter
from tests.toy.pair import TOY_TARGET

SHARE, BATCH, LONGEST = 0.1, 4096, 1024
"""Of the chats held out; tokens of a micro-batch and of a row."""


@dataclass(frozen=True)
class Options:
    """What is trained, and how often."""

    chats: Path
    _: KW_ONLY
    kind: Annotated[str, "its sizes are the target's"] = "eagle3"
    vocabulary: Annotated[int, "draft tokens"] = 2048
    limit: Annotated[int, "chats used"] = 400
    steps: int = 30
    repeats: int = 2
    states: Literal["float32", "bf16", "fp8"] = "bf16"
    output: Output = None


def capture(options: Options, chats: Path, folder: Path) -> tuple[float, CaptureRows]:
    """Store the features; returns the seconds it took, and the rows."""
    target = load_target(TOY_TARGET, dtype="bfloat16", device="cpu")
    rows = read_rows(load_tokenizer(TOY_TARGET), chats, SHARE, LONGEST, target.vocab_size)
    final: Literal["all", "answers"] = "all" if options.kind in ("eagle1", "mlp") else "answers"
    config = CaptureConfig(states=options.states, batch_tokens=BATCH, final=final)
    made = Capture(target, rows, config, folder, name="toy", chats=chats.name)
    with made.begun():
        return seconds_of(made.run), rows


def run(options: Options, output: Path, **source: Any) -> list[dict[str, float]]:
    """Train; the records of the steps."""
    recipe = DrafterTrainConfig.model_validate(
        {
            "target": str(TOY_TARGET), "target_dtype": "bfloat16", "device": "cpu", "output": output,
            "shape": {"kind": options.kind, "draft_vocab_size": options.vocabulary},
            "batch_tokens": BATCH, "max_length": LONGEST, "validation": {"batches": 1, "decode": False},
            "loop": {"steps": options.steps, "log_every": 1, "bf16": True}, **source,
        }
    )  # fmt: skip
    train_drafter(recipe)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in records if "loss" in record]


def step_seconds(records: list[dict[str, float]]) -> list[float]:
    """How long each step took."""
    ends = [0.0, *(record["seconds"] for record in records)]
    return [after - before for before, after in pairwise(ends)]


@script
def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        chats, store = folder / "chats.jsonl", folder / "store"
        given = [chat for split in splits(options.chats, SHARE).values() for chat in split]
        write_chats(chats, given[:: max(1, len(given) // options.limit)][: options.limit])
        seconds, rows = capture(options, chats, store)
        sources: dict[str, dict[str, Any]] = {
            "offline": {"source": "offline", "store": store},
            "online": {"source": "online", "chats": chats, "held_out_share": SHARE},
        }
        runs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in sources}
        for repeat in range(options.repeats):
            for name, source in sources.items():
                runs[name].append(run(options, folder / f"{name}-{repeat}", **source))
    batches = ChatBatches(rows.rows["train"], BATCH, LONGEST, seed=0)
    tokens = sum(batches.batch(number).tokens.numel() for number in range(options.steps))
    fastest = {name: sum(map(min, zip(*map(step_seconds, found), strict=True))) for name, found in runs.items()}
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(runs["offline"][0], runs["online"][0], strict=True))
    report(
        {
            "tokens_per_second": {name: round(tokens / found, 1) for name, found in fastest.items()},
            "speedup": round(fastest["online"] / fastest["offline"], 3),
            "largest_loss_difference": apart,
            "losses": {name: [round(record["loss"], 5) for record in found[0]] for name, found in runs.items()},
            "capture_tokens_per_second": round(
                sum(len(r.tokens) for part in rows.rows.values() for r in part) / seconds, 1
            ),
            "settings": {k: str(v) for k, v in asdict(options).items() if k not in ("output", "chats")},
        },
        options.output,
    )


if __name__ == "__main__":
    raise SystemExit(main())
