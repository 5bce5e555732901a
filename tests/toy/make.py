"""Reproduce the toy pair: shallow target, deep target, regenerated answers, their states, drafter.

    python -m tests.toy.make path/to/gsm8k_train.jsonl [--runs runs]

About an hour and a half on two CPU cores, minutes on a GPU (add `--device cuda`). Every step resumes where it was
interrupted. The results are runs/toy_target/model and runs/toy_drafter/drafter.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import eyas
from eyas.data.regenerate import regenerate
from eyas.data.regenerate.workers import EngineAnswerer
from eyas.text.chats import Chat, write_chats
from eyas.train.lm.lm import split_chats
from eyas.train.recipe import load_recipe, run_recipe

RECIPES = Path(__file__).parent / "recipes"


def spread(chats: list[Chat], count: int) -> list[Chat]:
    """`count` evenly spaced chats."""
    return [chats[i * len(chats) // count] for i in range(count)]


def prompts(math: Path) -> list[Chat]:
    """5,800 questions that the target was trained on: math, functions to complete and prose; always the same."""
    splits = split_chats(math)
    code = [chat for chat in splits["library"].train if chat.id.startswith("stdlib-code")]
    prose = [chat for chat in splits["library"].train if chat.id.startswith("stdlib-ask")]
    return [*spread(splits["chats"].train, 2730), *spread(code, 2030), *spread(prose, 1040)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("math", type=Path, help="grade-school math chats, one JSON object per line")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    shallow, target, drafter = (options.runs / name for name in ("toy_shallow", "toy_target", "toy_drafter"))

    for name, folder, extra in (
        ("shallow", shallow, []),
        ("target", target, [f"lm.start_from={shallow / 'model'}"]),
    ):
        settings = [
            f"lm.output={folder}",
            f"lm.corpus.chats={options.math}",
            f"lm.device={options.device}",
            *extra,
        ]
        run_recipe(load_recipe(RECIPES / f"{name}.yaml", settings))

    engine = eyas.load(target / "model", batch_size=64, dtype="bfloat16", device=options.device)
    asked, answers = target / "asked.jsonl", target / "regenerated.jsonl"
    write_chats(asked, prompts(options.math))
    regenerate(asked, answers, EngineAnswerer(engine, eyas.SamplingParams(max_tokens=256)))

    store = target / "store"
    capture = ["--model", target / "model", "--chats", answers, "--output", store, "--states", "bf16"]
    subprocess.run([sys.executable, "-m", "eyas", "data", "capture", *map(str, capture)], check=True)

    recipe = load_recipe(
        RECIPES / "drafter.yaml",
        [
            f"drafter.target={target / 'model'}",
            f"drafter.store={store}",
            f"drafter.output={drafter}",
            f"drafter.device={options.device}",
        ],
    )
    run_recipe(recipe)


if __name__ == "__main__":
    main()
