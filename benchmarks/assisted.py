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

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

import eyas
from benchmarks.engines.prompts import make_prompts
from benchmarks.harness import Output, interleave, paired, report, script
from eyas.assets import named_target
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
    """Every prompt by both sides in turns."""
    runs: dict[str, list[Answer]] = {"transformers": [], "eyas": []}
    for prompt in prompts:
        found = interleave({"transformers": partial(theirs, prompt), "eyas": partial(ours, prompt)}, repeats)
        for side, answers in found.items():
            runs[side] += answers
    seconds = {side: [one.seconds for one in done] for side, done in runs.items()}
    differing = sum(a.tokens != b.tokens for a, b in zip(*runs.values(), strict=True))
    return {
        "speed_ratio": paired(seconds["transformers"], seconds["eyas"]),
        "answers_that_differ": f"{differing} of {len(seconds['eyas'])}",
        **{
            side: {
                "accept_length": round(sum(one.drafted for one in done) / sum(one.passes for one in done), 4),
                "tokens_per_second": round(median(len(one.tokens) / one.seconds for one in done), 2),
            }
            for side, done in runs.items()
        },
    }


@script
def main(
    model: str,
    assistant: Annotated[str, "a small language model of the same vocabulary, or none"],
    *,
    dtype: str = "float32",
    tokens: int = 128,
    drafted: Annotated[int, "draft tokens of the small LM"] = 5,
    looked_up: Annotated[int, "draft tokens of prompt lookup"] = 10,
    prompts: int = 8,
    repeats: int = 3,
    output: Output = None,
) -> None:
    precision = resolve_dtype(dtype)
    stock = AutoModelForCausalLM.from_pretrained(named_target(model), dtype=precision).eval()
    ngram = eyas.load(model, method="ngram", tree=f"chain:{looked_up}", dtype=precision)
    asked = make_prompts(ngram.tokenizer, prompts)
    theirs = by_transformers(stock, tokens, prompt_lookup_num_tokens=looked_up, max_matching_ngram_size=NGRAM)
    found = {"prompt_lookup": compare(asked, theirs, by_eyas(ngram, tokens), repeats)}
    if assistant != "none":
        small = AutoModelForCausalLM.from_pretrained(assistant, dtype=precision).eval()
        settings = small.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = drafted, "constant"
        settings.assistant_confidence_threshold = 0.0
        engine = eyas.load(model, assistant, method="draft_model", tree=f"chain:{drafted}", dtype=precision)
        theirs = by_transformers(stock, tokens, assistant_model=small)
        found["small_lm"] = compare(asked, theirs, by_eyas(engine, tokens), repeats)
    report({"dtype": dtype, "tokens": tokens, "prompts": len(asked), **found}, output)


if __name__ == "__main__":
    raise SystemExit(main())
