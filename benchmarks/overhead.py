"""A round's time outside target and drafter forwards.

The target's forward and the drafter's network calls are timed where they are called; everything else in a round (tree
growth, masks' bookkeeping, walk, commit, the host sync) is overhead.

    python benchmarks/overhead.py MODEL DRAFTER [--tree T] [--dtype D] [--prompt-file F] [--limit N]
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


class Stopwatch:
    """Adds up the time spent inside wrapped calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
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
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()

    engine = eyas.load(options.model, options.drafter, tree=options.tree, dtype=options.dtype)
    assert engine.speculation is not None
    rows = [json.loads(line) for line in options.prompt_file.read_text(encoding="utf-8").splitlines()]
    params = eyas.SamplingParams(max_tokens=options.max_new_tokens)
    requests = []
    for row in rows[: options.limit]:
        chat = [{"role": "user", "content": row["turns"][0]}]
        text = engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        requests.append(eyas.Request(tuple(engine.tokenizer(text, add_special_tokens=False).input_ids), params))
    engine.generate(requests[:2])  # warm-up

    target, drafter = Stopwatch(), Stopwatch()
    model, network = engine.target.model, engine.speculation.drafter.module
    model.forward = target.wrap(model.forward)
    for name in ("step", "fuse", "logits"):
        setattr(network, name, drafter.wrap(getattr(network, name)))
    done = engine.generate(requests)
    decode = sum(c.stats.decode_seconds for c in done)
    rounds = sum(c.stats.target_passes for c in done)
    # prefill runs the target's base model, not `forward`, but does run the drafter's network
    prefill_network = measure_prefill(engine, requests, drafter)
    inside = target.seconds + drafter.seconds - prefill_network
    report = {
        "milliseconds_per_round": {
            "all": round(1e3 * decode / rounds, 3),
            "target": round(1e3 * target.seconds / rounds, 3),
            "drafter": round(1e3 * (drafter.seconds - prefill_network) / rounds, 3),
            "outside": round(1e3 * (decode - inside) / rounds, 3),
        },
        "outside_share": round((decode - inside) / decode, 4),
        "accept_length": round(sum(c.stats.walked for c in done) / rounds + 1, 3),
        "tree": options.tree,
        "dtype": options.dtype,
        "machine": describe_machine(),
    }
    print(json.dumps(report, indent=2))


def measure_prefill(engine: eyas.Engine, requests: list[eyas.Request], drafter: Stopwatch) -> float:
    """The drafter network's time in prefill and one round, which is what a one-token run costs it."""
    before = drafter.seconds
    one = [eyas.Request(r.prompt, r.params.model_copy(update={"max_tokens": 1})) for r in requests]
    engine.generate(one)
    spent = drafter.seconds - before
    drafter.seconds = before
    return spent


if __name__ == "__main__":
    main()
