"""What llama.cpp's `speculative-simple` says at its highest verbosity: drafts and, of each, what was accepted."""

from __future__ import annotations

import re

from benchmarks.engines.counts import Counts

_EVENT = re.compile(
    r"draft candidate +0, pos +\d+: +(?P<draft>\d+) \("
    r"|accepted (?P<accepted>\d+)/(?P<offered>\d+) draft tokens, the last target token is: \((?P<last>\d+)\)"
)


def read_log(log: str, chain: int, end: int) -> tuple[list[int], Counts]:
    """Tokens written, as far as the end mark `end` if it is among them, and counts."""
    tokens, draft, counts = list[int](), list[int](), Counts.none(chain)
    for event in _EVENT.finditer(log):
        if event["draft"] is not None:
            draft.append(int(event["draft"]))
            continue
        accepted, offered = int(event["accepted"]), int(event["offered"])
        tokens += [*draft[:accepted], int(event["last"])]
        counts += Counts(int(offered > 0), offered, tuple(int(i < accepted) for i in range(chain)))
        draft = []
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens, counts
