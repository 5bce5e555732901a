"""From chats to a chosen drafter for the embedded demo target, with the same commands that serve a real model.

    python recipes/pipeline.py [--folder runs/pipeline] [--chats my_chats.jsonl] [--on ray[:ADDRESS]]

Minutes on two CPU cores. A stage whose result is there is not run again, and an interrupted one goes on, so the same
command resumes. The end is FOLDER/report.html: one file, open it in a browser. Delete FOLDER to start anew.

With --on the machines of a Ray cluster regenerate, capture and measure; FOLDER is one that all of them see. Chats are
prepared and the drafter is trained on this machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from eyas.assets import DEMO
from eyas.data.chats.folder import splits, write_prompts
from eyas.data.tokens.tokenize import TokenRow, tokenize_chat
from eyas.targets import load_tokenizer

RECIPE = "pipeline"


def eyas(*arguments: str | Path) -> None:
    """Run the command line; an error ends the pipeline."""
    words = [str(argument) for argument in arguments]
    print(f"$ eyas {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "eyas", *words], check=False).returncode
    if code:
        sys.exit(f"eyas {words[0]} ended with exit code {code}; run the same command again to go on from here")


def stage(name: str, result: Path, *arguments: str | Path) -> None:
    """Run a command unless its result, which it writes last, is there."""
    if result.exists():
        print(f"{name}: already done ({result})", flush=True)
        return
    began = time.monotonic()
    eyas(*arguments)
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def group_of(chat_id: str) -> str:
    """What a chat is about: code and prose of Python's library, or the name of its source."""
    source, _, rest = chat_id.partition(":")
    if source != "stdlib":
        return source
    return "code" if rest.startswith("stdlib-code") else "prose"


def held_out_prompts(chats: Path, folder: Path, count: int) -> list[Path]:
    """A prompt file for each group of held-out chats, `count` prompts each."""
    tokenizer = load_tokenizer(DEMO)
    groups: dict[str, list[TokenRow]] = defaultdict(list)
    for chat in splits(chats)["validation"]:
        groups[group_of(chat.id)].append(tokenize_chat(tokenizer, chat))
    files = []
    for name, rows in sorted(groups.items()):
        files.append(folder / f"{name}.jsonl")
        write_prompts(files[-1], rows, count)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/pipeline"), help="where everything goes")
    parser.add_argument("--chats", type=Path, help="chats of yours, to train on beside Python's library")
    parser.add_argument("--samples", type=int, default=400, help="how many chats")
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts of a group to measure on")
    parser.add_argument("--on", help="ray, or ray:ADDRESS: share what can be shared among the machines of a cluster")
    parser.add_argument("--workers", help="with --on: how many share the work")
    options = parser.parse_args()
    if options.workers and not options.on:
        parser.error("--workers says nothing without --on")
    shared = [word for name in ("on", "workers") if (given := getattr(options, name)) for word in (f"--{name}", given)]
    began = time.monotonic()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    prepared, answered, store, run = (folder / name for name in ("prepared", "answered", "store", "run"))
    sources = ["stdlib"] if options.chats is None else ["stdlib,weight=1", f"{options.chats},weight=1"]

    stage(
        "prepare", prepared / "report.json",
        "data", "prepare", *sources, "--output", prepared, "--model", DEMO, "--samples", str(options.samples),
        "--held-out-share", "0.1", "--max-length", "400", "--drop-unanswered",
    )  # fmt: skip
    stage(
        "regenerate", answered / "report.json",
        "data", "regenerate", "--model", DEMO, "--draft-model", DEMO, "--chats", prepared,
        "--output", answered, "--dtype", "bfloat16", "--batch-size", "16", "--max-new-tokens", "96", *shared,
    )  # fmt: skip
    stage(
        "capture", store / "manifest.json",
        "data", "capture", "--model", DEMO, "--chats", answered, "--output", store, "--max-length", "512",
        "--batch-tokens", "2048", *shared,
    )  # fmt: skip
    stage(
        "train", run / "drafter" / "config.json",
        "train", RECIPE, f"drafter.store={store}", f"drafter.output={run}",
    )  # fmt: skip
    files = [
        word
        for file in held_out_prompts(answered, folder / "prompts", options.prompts)
        for word in ("--prompt-file", file)
    ]
    # --force: what learnt for minutes may be slower than plain decoding; the report says whether it is
    measuring = [*files, "--max-new-tokens", "64", "--dtype", "float32", *shared]
    stage(
        "bench checkpoints", run / "pick" / "config.json",
        "bench", "checkpoints", run, *measuring, "--repeats", "1", "--write", "--force",
    )  # fmt: skip
    stage(
        "bench trees", run / "bench" / "trees.json",
        "bench", "trees", "--model", DEMO, "--draft-model", run / "pick", *measuring, "--repeats", "2",
        "--coarse", "2", "--tree-depth", "2,3,5", "--tree-top-k", "2,4", "--tree-nodes", "4,8,15", "--write", "--force",
        "--output", run / "bench" / "trees.json",
    )  # fmt: skip
    report = folder / "report.html"
    eyas("bench", "report", run, "--output", report, "--chats", prepared, "--chats", answered)
    print(f"{report} is ready, after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
