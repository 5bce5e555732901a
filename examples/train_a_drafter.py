"""Train a small EAGLE-3 drafter from prompts: the model answers them, and the drafter learns from the answers.

    python examples/train_a_drafter.py --output RUN [--model MODEL] [--prompts PROMPTS.jsonl] [--steps N]

This is the shortest way, in one process. For a drafter that is worth serving take `eyas pipeline`, which asks thousands
of questions, stores the model's states, and measures what it made.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import eyas
from eyas.train.recipe import load_recipe, run_recipe

PROMPTS = [f"What is {a} plus {b}? Explain it in one sentence." for a in range(2, 10) for b in range(2, 8)]


def answered(engine: eyas.Engine, prompts: list[str], tokens: int) -> list[dict[str, object]]:
    """Chats of a prompt and the model's own answer, as `eyas train` reads them."""
    questions = [[{"role": "user", "content": prompt}] for prompt in prompts]
    requests = []
    for question in questions:
        text = engine.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        ids = tuple(engine.tokenizer(text, add_special_tokens=False).input_ids)
        requests.append(eyas.Request(ids, eyas.SamplingParams(max_tokens=tokens)))
    answers = [{"role": "assistant", "content": done.text} for done in engine.generate(requests)]
    return [
        {"id": str(number), "messages": [*question, answer]}
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True))
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--output", type=Path, required=True, help="a folder for the chats and the run")
    options.add_argument("--model", default="smollm2", help="a folder, a GGUF file or a Hub id")
    options.add_argument("--prompts", type=Path, help='JSON Lines with {"prompt": TEXT} (default: some sums)')
    options.add_argument("--tokens", type=int, default=48, help="longest answer")
    options.add_argument("--steps", type=int, default=60, help="steps of training")
    given = options.parse_args()

    prompts = PROMPTS
    if given.prompts is not None:
        prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text(encoding="utf-8").splitlines()]
    given.output.mkdir(parents=True, exist_ok=True)
    chats = given.output / "chats.jsonl"
    rows = answered(eyas.load(given.model, batch_size=8), prompts, given.tokens)
    chats.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    # "online": the target runs along and gives its hidden states; a store of them needs a capture first
    recipe = load_recipe(
        "eagle3",
        [
            f"drafter.target={given.model}",
            "drafter.source=online",
            f"drafter.chats={chats}",
            "drafter.held_out_share=0.1",
            f"drafter.output={given.output / 'run'}",
            "drafter.batch_tokens=512",
            "drafter.loop.epochs=null",
            f"drafter.loop.steps={given.steps}",
            "drafter.loop.accumulate=1",
            "drafter.validation={batches: 1, prompts: 2, max_tokens: 16, tree: 'chain:3'}",
        ],
    )
    run_recipe(recipe)

    engine = eyas.load(given.model, str(given.output / "run" / "drafter"), tree="chain:3")
    prompt = tuple(engine.tokenizer(prompts[0]).input_ids)
    (answer,) = engine.generate([eyas.Request(prompt, eyas.SamplingParams(max_tokens=given.tokens))])
    print(f"{answer.text}\naccept length {answer.stats.accept_length:.2f}; 1 is plain decoding")


if __name__ == "__main__":
    main()
