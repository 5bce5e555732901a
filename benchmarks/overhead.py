"""A round's time outside target and drafter forwards.

The target's forward and the drafter's network calls, or their native passes, are timed where they are called;
everything else in a round (tree growth, masks' bookkeeping, walk, commit, the host sync) is overhead.

    python -m benchmarks.overhead MODEL DRAFTER [--tree T] [--dtype D] [--limit N] [--batch-size B] \
        --prompt-file F
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eyas
from eyas.bench.machine import describe_machine
from eyas.engine import runner


class Stopwatch:
    """Adds up the time spent inside wrapped calls while it is armed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.armed = False

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                if self.armed:
                    self.seconds += time.perf_counter() - began

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafter")
    parser.add_argument("--tree")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()

    engine = eyas.load(
        options.model, options.drafter, tree=options.tree, dtype=options.dtype, batch_size=options.batch_size
    )
    assert engine.speculation is not None
    rows = [json.loads(line) for line in options.prompt_file.read_text(encoding="utf-8").splitlines()]
    params = eyas.SamplingParams(max_tokens=options.max_new_tokens)
    requests = []
    for row in rows[: options.limit]:
        chat = [{"role": "user", "content": row["turns"][0]}]
        text = engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        requests.append(eyas.Request(tuple(engine.tokenizer(text, add_special_tokens=False).input_ids), params))
    engine.generate(requests[:2])  # warm-up

    target, drafter, rounds = Stopwatch(), Stopwatch(), Stopwatch()
    model, network = engine.target.model, engine.speculation.drafter.network
    model.forward = target.wrap(model.forward)
    for name in ("step", "fuse", "logits"):
        setattr(network, name, drafter.wrap(getattr(network, name)))
    if engine.target.native is not None:  # passes that no module sees
        engine.target.native.run = target.wrap(engine.target.native.run)
    if (decoder := engine.speculation.drafter._decoder) is not None:
        decoder.run, decoder.read = drafter.wrap(decoder.run), drafter.wrap(decoder.read)
    plain_round = runner.run_round
    count = 0

    def armed_round(*args: Any) -> Any:
        """Count inside rounds only: prefill calls the drafter's network too."""
        nonlocal count
        count += 1
        target.armed = drafter.armed = rounds.armed = True
        try:
            return rounds.wrap(plain_round)(*args)
        finally:
            target.armed = drafter.armed = rounds.armed = False

    runner.run_round = armed_round
    done = engine.generate(requests)
    passes = sum(c.stats.target_passes for c in done)
    outside = rounds.seconds - target.seconds - drafter.seconds
    report = {
        "milliseconds_per_round": {
            name: round(1e3 * seconds / count, 3)
            for name, seconds in (
                ("all", rounds.seconds),
                ("target", target.seconds),
                ("drafter", drafter.seconds),
                ("outside", outside),
            )
        },
        "outside_share": round(outside / rounds.seconds, 4),
        "accept_length": round(sum(c.stats.walked for c in done) / passes + 1, 3),
        "tree": options.tree or "the drafter's default",
        "dtype": options.dtype,
        "batch_size": options.batch_size,
        "machine": describe_machine(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
