"""The feature store on the demo target: bytes a token, what the teacher loses, and the speed of capture and reading.

    python -m benchmarks.store CHATS.jsonl [--limit 300] [--threads 2]

`kl` is the mean KL divergence, over answer tokens, of the teacher made from stored final states (or top tokens, the
tail spread as the exact teacher has it) against the exact one; `greedy` how often its best token is the same.
Reading goes over every batch twice, the second time from the page cache. Prints one JSON object.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Output, report, script, seconds_of
from eyas.data.capture.capture import Capture, CaptureConfig
from eyas.data.capture.rows import CaptureRows, read_rows
from eyas.data.features import OnlineSource, taught
from eyas.data.plan import VARIANTS
from eyas.data.store import FeatureStore, StoreSource, classic_bytes
from eyas.data.tokens.batches import ChatBatches
from eyas.targets import Target, load_target, load_tokenizer
from tests.toy.pair import TOY_TARGET

LONGEST, BATCH_TOKENS = 1024, 4096


def teacher_loss(target: Target, stored: StoreSource, exact: OnlineSource, batches: int) -> dict[str, float]:
    """Mean KL and greedy agreement of the stored teacher."""
    total = same = count = 0.0
    for number in range(batches):
        a, b = stored(number), exact(number)
        assert b.final is not None
        where = taught(b.loss_mask)
        log_p = target.head(b.final[where]).float().log_softmax(-1)  # [M, V]
        if a.final is not None:
            log_q = target.head(a.final[where].to(b.final.dtype)).float().log_softmax(-1)
            total += (log_p.exp() * (log_p - log_q)).sum().item()
            best = log_q.argmax(-1)
        else:
            assert a.top is not None
            log_q = a.top.logprobs[where]  # [M, k]
            kept = log_p.gather(1, a.top.ids[where])
            tail = 1 - kept.exp().sum(-1)
            total += (kept.exp() * (kept - log_q)).sum().item()
            total += (tail * (tail.clamp_min(1e-9) / a.top.tail[where].clamp_min(1e-9)).log()).sum().item()
            best = a.top.ids[where][:, 0]
        same += (best == log_p.argmax(-1)).sum().item()
        count += len(log_p)
    return {"kl": total / count, "greedy": same / count}


def measure(target: Target, found: CaptureRows, options: dict[str, Any], folder: Path) -> dict[str, float]:
    config = CaptureConfig(**options, batch_tokens=BATCH_TOKENS)
    capture = Capture(target, found, config, folder, name="demo", chats="chats")
    tokens = sum(split.tokens for split in capture.settings.splits.values())
    with capture.begun():
        seconds = seconds_of(capture.run)
    store = FeatureStore.open(folder)
    batches = ChatBatches(store.rows("train"), BATCH_TOKENS, LONGEST, seed=0)
    taps = store.served_taps
    source = StoreSource(store, batches, taps)
    _, reading = (seconds_of(lambda: [source(number) for number in range(batches.per_epoch)]) for _ in range(2))
    exact = OnlineSource(target, batches, taps)
    return {
        "bytes_per_token": capture.total_bytes / tokens,
        "of_classic": capture.total_bytes / classic_bytes(tokens, target.hidden_size),
        "capture_tokens_per_second": tokens / seconds,
        "read_tokens_per_second": store.settings.splits["train"].tokens / reading,
        **teacher_loss(target, source, exact, min(8, batches.per_epoch)),
    }


@script
def main(chats: Path, *, limit: int = 300, threads: int = 2, output: Output = None) -> None:
    torch.set_num_threads(threads)
    target = load_target(TOY_TARGET, dtype="bfloat16")
    found = read_rows(load_tokenizer(TOY_TARGET), chats, 0.0, LONGEST, target.vocab_size)
    found = replace(found, rows={"train": list(islice(found.rows["train"], limit))}, dropped={"train": 0})
    results = {}
    for name, options in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(target, found, options, Path(folder) / "store")
    report({"threads": threads, "results": results}, output)


if __name__ == "__main__":
    raise SystemExit(main())
