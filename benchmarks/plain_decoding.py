"""Plain decoding against `transformers.generate`: same weights, same dtype, same prompts, taking turns in one process.

python -m benchmarks.plain_decoding MODEL_DIR [--dtype bfloat16] [--tokens 64] [--repeats 5] [--batch 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import eyas
from eyas.bench.machine import describe_machine
from eyas.targets.loading import resolve_dtype


def transformers_rate(model: Any, prompts: torch.Tensor, tokens: int) -> float:
    """Tokens per second of decoding: the time of one token (prefill) is taken off the time of `tokens`."""
    seconds = []
    for count in (1, tokens):
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(prompts, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        seconds.append(time.perf_counter() - began)
    return (tokens - 1) * len(prompts) / (seconds[1] - seconds[0])


def eyas_rate(engine: eyas.Engine, prompts: torch.Tensor, tokens: int) -> float:
    """Tokens per second of decoding, by the engine's own counter."""
    params = eyas.SamplingParams(max_tokens=tokens, ignore_eos=True)
    done = engine.generate([eyas.Request(tuple(row), params) for row in prompts.tolist()])
    return sum(c.stats.tokens for c in done) / max(c.stats.decode_seconds for c in done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()

    engine = eyas.load(options.model, dtype=options.dtype, batch_size=options.batch)
    stock = AutoModelForCausalLM.from_pretrained(options.model, dtype=resolve_dtype(options.dtype)).eval()
    torch.manual_seed(0)
    prompts = torch.randint(5, engine.target.vocab_size, (options.batch, 64))
    rates: dict[str, list[float]] = {"transformers": [], "eyas": []}
    for repeat in range(options.repeats + 1):
        measured = {
            "transformers": transformers_rate(stock, prompts, options.tokens),
            "eyas": eyas_rate(engine, prompts, options.tokens),
        }
        if repeat:  # the first round warms up
            for name, rate in measured.items():
                rates[name].append(rate)
    ratios = [a / b for a, b in zip(rates["eyas"], rates["transformers"], strict=True)]
    report = {
        "tokens_per_second": {name: round(statistics.median(values), 2) for name, values in rates.items()},
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min_max": [round(min(ratios), 3), round(max(ratios), 3)],
        "dtype": options.dtype,
        "batch": options.batch,
        "parameters": sum(p.numel() for p in stock.parameters()),
        "machine": describe_machine(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
