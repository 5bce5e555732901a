"""A drafter that learns from traffic against the same drafter that doesn't: the day, attacks, kills and costs.

    python -m benchmarks.learning day smollm2 smollm2 WORK --store STORE --mix TRAIN.jsonl ... --unseen EVAL.jsonl ...
    python -m benchmarks.learning others smollm2 static WORK --drafter smollm2 --mix ... --unseen ...
    python -m benchmarks.learning others smollm2 plain WORK --mix ... --unseen ...
    python -m benchmarks.learning figures WORK --output FILE.json --plot FILE.svg
    python -m benchmarks.learning harvest smollm2 smollm2 ROWS
    python -m benchmarks.learning poison ROWS STORE | gate ROWS | forced smollm2 smollm2 ROWS | lowrank ROWS
    python -m benchmarks.learning kills smollm2 smollm2 NEW
    python -m benchmarks.learning cost smollm2 smollm2 ROWS --mix TRAIN.jsonl

Only `cost` measures seconds; the others only count, so a busy machine gives the same results as an idle one.
"""

from __future__ import annotations

from benchmarks.harness import script
from benchmarks.learning.attacks import forced, gate, harvest, lowrank, poison
from benchmarks.learning.cost import cost
from benchmarks.learning.day import day, figures, others
from benchmarks.learning.kills import kills

if __name__ == "__main__":
    raise SystemExit(script(day, others, figures, harvest, poison, gate, forced, lowrank, kills, cost)())
