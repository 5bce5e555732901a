"""The counters of speculation on an engine's Prometheus page."""

from __future__ import annotations

import re

from engines.counts import Counts

_LINE = re.compile(r"^\w+:(\w+?)(?:_total)?(?:{(.*)})? ([^ ]+)$", re.M)
_POSITION = re.compile(r'position="(\d+)"')
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def read_counts(page: str, chain: int) -> Counts:
    """Counts since the server started, vLLM's and llama.cpp's alike; 0 where a counter isn't there yet.

    ValueError for a page that counts other positions than a chain of `chain` has.
    """
    accepted = [0] * chain
    for name, labels, value in _LINE.findall(page):
        if name == PER_POSITION:
            place = _POSITION.search(labels)
            if place is None or int(place[1]) >= chain:
                raise ValueError(f"{PER_POSITION}{{{labels}}} is no position of a chain of {chain}")
            accepted[int(place[1])] += int(float(value))
    return Counts(
        read_counter(page, "spec_decode_num_drafts"),
        read_counter(page, "spec_decode_num_draft_tokens"),
        tuple(accepted),
    )


def read_counter(page: str, counter: str) -> int:
    """A counter summed over its labels, whatever the engine calls itself; 0 if it isn't there."""
    return sum(int(float(value)) for name, _, value in _LINE.findall(page) if name == counter)
