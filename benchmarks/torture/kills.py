"""kill -9 at random moments: does a verb, started again and again, end with the bytes of an uninterrupted run?

    python -m benchmarks.torture.kills regenerate capture [--kills 10] [--seed 0] [--folder DIRECTORY]

One uninterrupted run is timed; then runs into another folder are killed at random moments (spread over what a run
takes, start and finish included), and a last one comes to its end. Which files must be the same says the `Case`.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from benchmarks.harness import Output, report, script
from eyas.data.chats.folder import write_report
from eyas.data.chats.stdlib import chats_of, library_modules
from eyas.text.chats import write_chats
from tests.toy.pair import TOY_DRAFTER, TOY_TARGET


class Case(NamedTuple):
    """A verb that can be interrupted."""

    words: Sequence[str]
    """Those of `eyas`; the output folder, which may not exist yet, is put behind the last."""
    results: Sequence[str]
    """Files of the output folder, as glob patterns, that must not depend on interruptions."""


def forty_chats(work: Path) -> Path:
    """A chat folder about Python's library."""
    source = work / "chats"
    source.mkdir(parents=True)
    chats = [chat for module in islice(library_modules(), 120) for chat in chats_of(module)]
    chosen = [chats[i * len(chats) // 40] for i in range(40)]
    write_chats(source / "train.jsonl", chosen[:36])
    write_chats(source / "validation.jsonl", chosen[36:])
    write_report(source, {"chats": 40})
    return source


def capture(chats: Path) -> Case:
    """A shard for every one or two chats."""
    words = f"data capture --shard-mib 0.25 --batch-tokens 1024 --model {TOY_TARGET} --chats {chats} --output="
    return Case(words.split(), ("*",))


def regenerate(chats: Path) -> Case:
    """Every answer at a temperature, four at a time, speculating."""
    words = "data regenerate --batch-size 4 --temperature 0.7 --max-new-tokens 96 --seed 3"
    words += f" --model {TOY_TARGET} --draft-model {TOY_DRAFTER} --chats {chats} --output="
    return Case(words.split(), ("train.jsonl", "validation.jsonl", "report.json"))


def train(chats: Path) -> Case:
    """Thirty steps of an EAGLE-3 drafter, the target in the loop, validated and decoded every five."""
    recipe = {
        "target": str(TOY_TARGET), "source": "online", "chats": str(chats), "output": "",
        "device": "cpu", "shape": {"kind": "eagle3", "draft_vocab_size": 512}, "batch_tokens": 512, "max_length": 256,
        "validation": {"batches": 1, "prompts": 2, "max_tokens": 8, "tree": "chain:3"},
        "loop": {"steps": 30, "log_every": 1, "validate_every": 5, "save_seconds": 1},
    }  # fmt: skip
    path = chats.with_name("recipe.yaml")
    path.write_text(json.dumps({"drafter": recipe}), encoding="utf-8")
    results = ("drafter/model.safetensors", "best/*.safetensors", "checkpoints/*/*.safetensors")
    return Case(("train", str(path), "drafter.output="), results)


CASES: dict[str, Callable[[Path], Case]] = {"regenerate": regenerate, "capture": capture, "train": train}


def start(case: Case, output: Path) -> subprocess.Popen[bytes]:
    """The verb in a process of its own."""
    command = [sys.executable, "-m", "eyas", *case.words[:-1], f"{case.words[-1]}{output}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(case: Case, output: Path) -> float:
    """Run to the end; returns the seconds it took."""
    began = time.monotonic()
    process = start(case, output)
    _, complaint = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the run failed:\n{complaint.decode()}")
    return time.monotonic() - began


def results(case: Case, output: Path) -> dict[str, bytes]:
    """The files that count, by name."""
    paths = {path for pattern in case.results for path in output.glob(pattern)}
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(paths)}


def run(case: Case, work: Path, kills: int, chance: random.Random) -> dict[str, object]:
    """Kill it `kills` times and compare.

    A run that is over before its moment has come has been given too long: the output is then finished, so it is put
    aside and the torture begins anew in another folder, until that many runs were really killed.
    """
    seconds = finish(case, work / "whole")
    wanted = results(case, work / "whole")
    moments: list[float] = []
    attempt, same = 0, True
    while len(moments) < kills:
        output, over = work / f"torn{attempt}", False
        attempt += 1
        while len(moments) < kills and not over:
            process, moment = start(case, output), chance.uniform(0, seconds)
            try:
                process.communicate(timeout=moment)
                over = True
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                moments.append(round(moment, 2))
        finish(case, output)
        same = same and results(case, output) == wanted
    return {
        "identical": same and bool(wanted),
        "files": {name: len(data) for name, data in wanted.items()},
        "uninterrupted_seconds": round(seconds, 1),
        "killed_after_seconds": moments,
        "finished_in_between": attempt - 1,
    }


@script
def main(
    verbs: Sequence[Literal["capture", "regenerate", "train"]],
    *,
    kills: int = 10,
    seed: int = 0,
    folder: Annotated[Path | None, "keep the runs here (default: a temporary folder)"] = None,
    output: Output = None,
) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        work = folder or Path(temporary)
        found: dict[str, dict[str, object]] = {
            verb: run(CASES[verb](forty_chats(work / verb)), work / verb, kills, random.Random(seed)) for verb in verbs
        }
    report(found, output)
    return not all(case["identical"] for case in found.values())


if __name__ == "__main__":
    raise SystemExit(main())
