"""Milliseconds of drafting a round: drafters of one target in turns, on the same prompts.

Each DRAFTER is a path or name, and a tree after `=` if it is not to be `--tree`. Every prompt is answered by all
drafters in turn, so that a ratio pairs runs that follow each other; the first turn is not counted. Drafting is what the
engine's counter (`Stats.draft_seconds`) says: drafts, and the reading of committed pairs. Answers have a fixed length,
and are compared: with the same seeds they must be equal.

    python -m benchmarks.draft_time MODEL eagle3=chain:7 dflash=chain:7 --prompt-file FILE.jsonl --output FILE.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from eyas.bench.machine import describe_machine
from eyas.bench.offline.runner import read_task
from eyas.drafters.loading import open_drafter
from eyas.engine import Engine, Speculation
from eyas.engine.load import default_tree, tree_for
from eyas.targets import Target, load_target, load_tokenizer
from eyas.text.dialogue import Dialogue
from eyas.text.prompts import PromptRow
from eyas.tree import parse_tree
from eyas.types import Completion, SamplingParams

SETTINGS = ("limit", "repeats", "max_new_tokens", "temperature", "dtype")


def engine_of(target: Target, tokenizer: Any, model: str, drafter: str, tree: str | None) -> tuple[Engine, str]:
    """An engine with this drafter, and the name of its tree."""
    opened = open_drafter(drafter, target, tokenizer=tokenizer, model=model)
    name = tree or default_tree(opened)
    return Engine(target, tokenizer, Speculation(opened, tree_for(opened, parse_tree(name)))), name


def measure(
    engines: Sequence[Engine], rows: Sequence[PromptRow], params: SamplingParams, repeats: int
) -> list[list[Completion]]:
    """Each engine's answers, in the same order of prompts and repeats."""
    found: list[list[Completion]] = [[] for _ in engines]
    for repeat in range(repeats + 1):
        for row in rows:
            for engine, answers in zip(engines, found, strict=True):
                request = Dialogue(row).next_request(engine, params)
                if request is None:
                    continue
                (done,) = engine.generate([request])
                if repeat:
                    answers.append(done)
    return found


def per_round(done: Completion) -> float:
    """Milliseconds of drafting in a round."""
    return 1000 * done.stats.draft_seconds / max(1, done.stats.target_passes)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of some values."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def figures(found: Sequence[Sequence[Completion]], names: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """What each drafter took, and its share of the first one's time, answer by answer."""
    first = [per_round(done) for done in found[0]]
    rows = []
    for (drafter, tree), answers in zip(names, found, strict=True):
        times = [per_round(done) for done in answers]
        walked, passes = (sum(getattr(done.stats, key) for done in answers) for key in ("walked", "target_passes"))
        rows.append({
            "drafter": drafter,
            "tree": tree,
            "milliseconds_a_round": spread(times),
            "of_the_first": spread([one / other for one, other in zip(times, first, strict=True)]),
            "accept_length": round(1 + walked / max(1, passes), 3),
            "rounds": passes,
            "answers_equal_the_first_s": [a.token_ids for a in answers] == [b.token_ids for b in found[0]],
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER[=TREE]")
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--tree", default=None, help="of drafters that name none (default: the drafter's own)")
    parser.add_argument("--limit", type=int, default=8, help="rows of the file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    target, tokenizer = load_target(options.model, dtype=options.dtype), load_tokenizer(options.model)
    engines, names = [], []
    for text in options.drafters:
        drafter, _, tree = text.partition("=")
        engine, tree = engine_of(target, tokenizer, options.model, drafter, tree or options.tree)
        engines.append(engine)
        names.append((drafter, tree))
    rows = [row for (row,) in read_task(options.prompt_file, 1, options.limit).groups]
    params = SamplingParams(
        max_tokens=options.max_new_tokens, temperature=options.temperature, seed=0, ignore_eos=True
    )  # fmt: skip
    report = {
        "date": date.today().isoformat(),
        "what": "milliseconds of drafting a round (drafts and the reading of committed pairs); of_the_first: the ratio "
        "to the first drafter's, answer by answer; one sequence, drafters in turns",
        "model": options.model,
        "settings": {
            key: getattr(options, key) for key in ("limit", "repeats", "max_new_tokens", "temperature", "dtype")
        },
        "rows": figures(measure(engines, rows, params, options.repeats), names),
        "machine": describe_machine(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
