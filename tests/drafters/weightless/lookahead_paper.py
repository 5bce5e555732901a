"""A restatement of Lookahead's algorithm (arXiv 2402.02057), greedy, one sequence at a time.

It shares no code with eyas and has no trees, masks or slots. Every guess's successor is computed from the text and the
guess's own path, which is slow but simple.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from eyas.targets.transformers_names import cache_kwargs


def decode_by_paper(
    model: Any, text: Sequence[int], guesses: Sequence[int], sizes: tuple[int, int, int], tokens: int
) -> tuple[list[int], list[int]]:
    """At least `tokens` greedy tokens after `text`, and the number of tokens that each step emitted.

    `sizes` are W, N and G; `guesses` are the W + N - 3 tokens that the window begins with.
    """
    window, ngram, most = sizes
    known = list(text)
    lengths = list[int]()
    rows = [list(guesses)]  # the window: row 0 follows the last token, so its first entry belongs to column 1
    pool: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    while sum(lengths) < tokens:
        last = known[-1]
        columns = len(rows[0]) + 1
        filling = len(rows) < ngram - 1
        ends = [rows[0][:column] + [row[column] for row in rows[1:]] for column in range(columns)]
        candidates = [] if filling else list(pool[last])
        said = successors(model, known, [*ends, *map(list, candidates)])
        found = [after[-1] for after in said[:columns]]

        emitted = said[0][:1]
        for candidate, after in zip(candidates, said[columns:], strict=True):
            right = 0
            while right < len(candidate) and candidate[right] == after[right]:
                right += 1
            if right >= len(emitted):
                emitted = after[: right + 1]

        if filling:  # rows keep their positions: the entry at the next token's position is dropped
            rows = [row[1:] for row in rows] + [found[1:]]
        else:
            assert columns == len(found) == window
            for column in range(window):
                first = last if column == 0 else rows[0][column - 1]
                entry = (*(row[column] for row in rows[1:]), found[column])
                if entry in pool[first]:
                    pool[first].remove(entry)
                pool[first] = [*pool[first], entry][-most:]
            rows = [rows[1][1:], *rows[2:], found]
        known += emitted
        lengths.append(len(emitted))
    return known[len(text) :], lengths


@torch.inference_mode()
def successors(model: Any, known: Sequence[int], paths: Sequence[list[int]]) -> list[list[int]]:
    """For each path after the `known` text, the most probable token after its root and after each of its tokens."""
    cache = DynamicCache(config=model.config)
    if len(known) > 1:
        model(torch.tensor([known[:-1]], device=model.device), use_cache=True, **cache_kwargs(model, cache))
        cache.batch_repeat_interleave(len(paths))
    some = [[known[-1], *path] for path in paths]
    width = max(map(len, some))
    ids = torch.tensor([path + [0] * (width - len(path)) for path in some], device=model.device)
    best = model(ids, use_cache=True, **cache_kwargs(model, cache)).logits.argmax(-1).tolist()
    return [row[: len(path)] for row, path in zip(best, some, strict=True)]
