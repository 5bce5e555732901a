"""Small-LM drafting and prompt lookup against transformers' own assisted generation, the same settings on both sides.

    python -m benchmarks.assisted MODEL ASSISTANT [--tokens 128] [--drafted 5] [--prompts 8] [--repeats 3]

Greedy, one sequence, chains of a fixed number of draft tokens (`num_assistant_tokens_schedule="constant"`, no
confidence threshold), answers of a fixed length. Each prompt is answered by all in turn, so that a ratio pairs runs
that follow each other. Accept length is tokens per pass of the target that verifies a draft: there all passes, counted
by a hook, as the prompt's verifies one too; here all but the prompt's, by the engine's counter. So drafts begin one
token later here, and the two agree but for the ends of answers. The script says how many answers differ: none should.
Seconds are those of whole answers, prefill included, on both sides. ASSISTANT `none` leaves out the small LM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

import eyas
from benchmarks.engines.prompts import make_prompts
from eyas.assets import named_target
from eyas.bench.machine import describe_machine
from eyas.targets.loading import resolve_dtype

NGRAM = 3
"""The longest n-gram that prompt lookup searches for, on both sides."""


class Answer(NamedTuple):
    """What one side made of a prompt."""

    tokens: list[int]
    drafted: int
    """The tokens among them that passes with a draft emitted."""
    passes: int
    """Those passes."""
    seconds: float


Side = Callable[[tuple[int, ...]], Answer]


def by_transformers(model: Any, tokens: int, **options: Any) -> Side:
    """Assisted generation of transformers; the target's forward calls are counted."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_pre_hook(count)

    def answer(prompt: tuple[int, ...]) -> Answer:
        nonlocal passes
        ids = torch.tensor([prompt])
        passes, began = 0, time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                pad_token_id=0, **options,
            )  # fmt: skip
        return Answer(out[0, len(prompt) :].tolist(), tokens, passes, time.perf_counter() - began)

    return answer


def by_eyas(engine: eyas.Engine, tokens: int) -> Side:
    """The engine with a drafter of its own."""
    # transformers forbids end tokens where an answer is too short yet, and so does this
    params = eyas.SamplingParams(max_tokens=tokens, min_tokens=tokens)

    def answer(prompt: tuple[int, ...]) -> Answer:
        began = time.perf_counter()
        (done,) = engine.generate([eyas.Request(prompt, params)])
        seconds = time.perf_counter() - began
        return Answer(done.token_ids, tokens - done.stats.prefill_tokens, done.stats.target_passes, seconds)

    return answer


def compare(prompts: list[tuple[int, ...]], theirs: Side, ours: Side, repeats: int) -> dict[str, Any]:
    """All prompts with both sides in turn, `repeats` times after one that warms up."""
    ratios: list[float] = []
    runs: dict[str, list[Answer]] = {"transformers": [], "eyas": []}
    differing = 0
    for repeat in range(repeats + 1):
        for prompt in prompts:
            answers = {"transformers": theirs(prompt), "eyas": ours(prompt)}
            if repeat:
                ratios.append(answers["transformers"].seconds / answers["eyas"].seconds)
                differing += answers["transformers"].tokens != answers["eyas"].tokens
                for side, one in answers.items():
                    runs[side].append(one)
    return {
        "speed_ratio_median": round(statistics.median(ratios), 3),
        "speed_ratio_min_max": [round(min(ratios), 3), round(max(ratios), 3)],
        "answers_that_differ": f"{differing} of {len(ratios)}",
        **{
            side: {
                "accept_length": round(sum(one.drafted for one in done) / sum(one.passes for one in done), 4),
                "tokens_per_second": round(statistics.median(len(one.tokens) / one.seconds for one in done), 2),
            }
            for side, done in runs.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("assistant", help="a small language model of the same vocabulary, or none")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafted", type=int, default=5, help="draft tokens of the small LM")
    parser.add_argument("--looked-up", type=int, default=10, help="draft tokens of prompt lookup")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    dtype = resolve_dtype(options.dtype)
    stock = AutoModelForCausalLM.from_pretrained(named_target(options.model), dtype=dtype).eval()
    ngram = eyas.load(options.model, method="ngram", tree=f"chain:{options.looked_up}", dtype=dtype)
    prompts = make_prompts(ngram.tokenizer, options.prompts)
    report: dict[str, Any] = {
        "dtype": options.dtype,
        "tokens": options.tokens,
        "prompts": len(prompts),
        "machine": describe_machine(),
    }
    lookup = {"prompt_lookup_num_tokens": options.looked_up, "max_matching_ngram_size": NGRAM}
    report["prompt_lookup"] = compare(
        prompts, by_transformers(stock, options.tokens, **lookup), by_eyas(ngram, options.tokens), options.repeats
    )
    if options.assistant != "none":
        assistant = AutoModelForCausalLM.from_pretrained(options.assistant, dtype=dtype).eval()
        settings = assistant.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = options.drafted, "constant"
        settings.assistant_confidence_threshold = 0.0
        engine = eyas.load(
            options.model, options.assistant, method="draft_model", tree=f"chain:{options.drafted}", dtype=dtype
        )
        theirs = by_transformers(stock, options.tokens, assistant_model=assistant)
        report["small_lm"] = compare(prompts, theirs, by_eyas(engine, options.tokens), options.repeats)
    text = json.dumps(report, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
