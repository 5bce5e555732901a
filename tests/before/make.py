"""Rewrites `files/` with the code of the commit in README.md: `python make.py FOLDER`, with that commit's `eyas`.

Only the command line is used, in FOLDER and with relative paths, so that the files mean the same in any folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from typer.testing import CliRunner

from eyas.cli.app import app

TRAINING = {
    "target": "target", "device": "cpu", "target_dtype": "float32", "batch_tokens": 128, "max_length": 96,
    "validation": {"batches": 2, "prompts": 2, "max_tokens": 8, "tree": "chain:2"},
}  # fmt: skip
CAPTURE = ("--taps", "1,2,4", "--final", "all", "--shard-mib", "0.02", "--max-length", "96")
LOOP = {"log_every": 1, "bf16": False, "optimizer": {"lr": 0.01}, "schedule": {"kind": "constant", "warmup": 0}}
SHAPE = {"draft_vocab_size": 48, "intermediate_size": 16, "default_tree": "chain:3"}
SHAPES = {
    "eagle1": {"kind": "eagle1", "intermediate_size": 16},
    "eagle3": {"kind": "eagle3", **SHAPE},
    "eagle3.1": {"kind": "eagle3.1", **SHAPE},
    "mla": {"kind": "mla", **SHAPE, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "mlp": {"kind": "mlp", "depth": 3},
}
TREE = "dynamic:4,8,40"
"""Wide enough for small drafters to be right often."""
DECODING = ("--prompt-file", "prompts.jsonl", "--max-new-tokens", "24", "--json")
ANSWERING = ("--chats", "chats", "--dtype", "float32", "--max-new-tokens", "12", "--temperature", "0.7", "--seed", "3")


def eyas(*arguments: object) -> str:
    """Run a verb; returns its standard output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exit_code:
        raise SystemExit(f"eyas {' '.join(map(str, arguments))}\n{result.stderr}")
    return result.stdout


def recipe(path: str, **values: Any) -> str:
    """Write a drafter's recipe."""
    Path(path).write_text(yaml.safe_dump({"drafter": {**TRAINING, **values}}))
    return path


def make_target() -> None:
    """Save a random Llama with a few likely tokens at each position, so that there is something to learn."""
    lm = import_module("eyas.train.lm")  # under that commit's names, which may have changed since
    tokenizer = import_module("eyas.data.tokenizer").train_tokenizer(["What is 1+1? 2+2 = <<2+2=4>>4"], 512, 128)
    torch.manual_seed(0)
    shape = lm.LmModelConfig(hidden_size=16, layers=4, heads=2, kv_heads=1, intermediate_size=24, context=128)
    model = lm.build_lm(shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(20 if "embed" in name else 4)
    model.to(torch.bfloat16).save_pretrained("target")
    tokenizer.save_pretrained("target")


def make_chats() -> None:
    """Make a chat folder, its chats answered by the target, and the same interrupted halfway."""
    questions = [(f"c{i}", f"What is {i}+{i}?", f"{i}+{i} = <<{i}+{i}={2 * i}>>{2 * i}") for i in range(30)]
    rows = [
        {"id": id_, "messages": [{"role": "user", "content": asks}, {"role": "assistant", "content": says}]}
        for id_, asks, says in questions
    ]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": asks}) + "\n" for _, asks, _ in questions[:6]))
    eyas("data", "prepare", "chats.jsonl", "--model", "target", "--held-out-share", 0.2, "--output", "chats")
    eyas("data", "regenerate", "--model", "target", *ANSWERING, "--output", "answered")
    lines = (Path("answered") / "journal.jsonl").read_bytes().splitlines(keepends=True)
    Path("interrupted").mkdir()
    # as a kill leaves it: no output yet, and a partial line
    (Path("interrupted") / "journal.jsonl").write_bytes(b"".join(lines[:12]) + lines[12][:20])


def make_store() -> None:
    """Capture the target's states for the answered chats, in fp8, the default."""
    eyas("data", "capture", "--model", "target", "--dtype", "float32", "--chats", "answered", *CAPTURE,
         "--output", "store")  # fmt: skip


def make_drafters() -> dict[str, Any]:
    """Train a drafter of every kind from the store; returns each one's answers to the prompts."""
    found: dict[str, Any] = {"plain": decoded("--method", "none")}
    for name, shape in SHAPES.items():
        loop = {**LOOP, "steps": 100, "log_every": 100, "validate_every": 100}
        eyas("train", recipe(f"{name}.yaml", source="offline", store="store", output=name, shape=shape, loop=loop))
        shutil.copytree(Path(name) / "drafter", Path("drafters") / name)
        shutil.rmtree(name)
        Path(f"{name}.yaml").unlink()
        found[name] = decoded("--draft-model", f"drafters/{name}", "--tree", TREE)
    return found


def decoded(*arguments: str) -> list[dict[str, Any]]:
    """The tokens and the histogram of accepted draft tokens for every prompt."""
    lines = eyas("generate", "--model", "target", "--dtype", "float32", *DECODING, *arguments).splitlines()
    return [
        {"tokens": row["token_ids"], "accepted": row["stats"]["accepted_histogram"]} for row in map(json.loads, lines)
    ]


def make_run() -> dict[str, Any]:
    """Make a run stopped after 6 steps; returns records of the same run continued to 12, and of one from the store."""
    settings = {**LOOP, "accumulate": 2, "validate_every": 3}
    values: dict[str, Any] = {"output": "run", "shape": SHAPES["eagle3"], "loss": {"unroll": 3}}
    eyas("train", recipe("run.yaml", **values, chats="answered", loop={**settings, "steps": 6}))
    shutil.copytree("run", "stopped")
    eyas("train", "run.yaml", "drafter.loop.steps=12")
    continued = records("run")
    shutil.rmtree("run")
    eyas("train", recipe("stored.yaml", **values, source="offline", store="store", loop={**settings, "steps": 3}))
    stored = records("run")
    shutil.rmtree("run")
    Path("stopped").rename("run")
    return {"continued": continued, "stored": stored}


def records(folder: str) -> list[dict[str, float]]:
    """A run's metrics without times."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "per_second")} for line in lines]


def make_sweep() -> dict[str, float]:
    """Make a sweep of two scored trials; returns their accept lengths."""
    loop = {**LOOP, "steps": 4, "validate_every": 4}
    recipe("trial.yaml", source="offline", store="store", output="unused", shape={"kind": "mlp", "depth": 2}, loop=loop,
           keep_checkpoints=1)  # fmt: skip
    config = {
        "recipe": "trial.yaml",
        "output": "sweep",
        "knobs": {"drafter.loop.optimizer.lr": [0.01, 0.001]},
        "score": {"prompt_files": ["prompts.jsonl"], "max_tokens": 12, "tree": TREE, "dtype": "float32"},
        "timing": {"repeats": 1, "warmup": 0},
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(config))
    eyas("sweep", "sweep.yaml")
    report = json.loads((Path("sweep") / "results.json").read_text())
    shutil.rmtree(Path("sweep") / "bench")  # seconds of another machine
    for path in [*Path("sweep").glob("*.svg"), Path("sweep") / "results.json"]:
        path.unlink()
    return {row["trial"]: row["accept_length"] for row in report["trials"]}


def make_costs() -> None:
    """Make the costs that `--tree auto` measured, as if on a machine that nobody has."""
    eyas("generate", "--model", "target", "--draft-model", "drafters/eagle3", "--tree", "auto", "--dtype", "float32",
         "--costs", "costs.json", "--prompt", "What is 1+1?")  # fmt: skip
    table = json.loads(Path("costs.json").read_text())
    Path("costs.json").write_text(json.dumps({**table, "measured_on": "a machine of before"}, indent=2) + "\n")


def main(folder: Path) -> None:
    """Make everything in `folder`, which must not exist."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    make_target()
    make_chats()
    make_store()
    expected = {"decoded": make_drafters(), "runs": make_run(), "trials": make_sweep()}
    make_costs()
    Path("expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
