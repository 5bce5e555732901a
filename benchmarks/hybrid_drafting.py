"""A chain against trees with the same number of nodes, on a hybrid target and its drafter, both trained here.

    python -m benchmarks.hybrid_drafting CHATS.jsonl [--runs runs/hybrid] [--steps 300] [--answers 900]
        [--drafter-steps 300] [--prompts 40] [--output FILE.json]

The target has four layers of Qwen3.5's kind, three of them gated delta rules. It starts from the embeddings, norms and
MLPs of the toy target (tests/toy) and is trained on the chats, such as GSM8K's. Then it answers their questions, its
states are captured, and an EAGLE-3 drafter is trained on them. Each step can be resumed. Accept lengths are measured on
chats that neither has seen, and every answer is compared with plain decoding. Both trees have the same number of nodes
per row: `dynamic` chooses them by the drafter's probabilities, `shared` by the measured worth of similar nodes. No
speed is measured.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import eyas
from benchmarks.harness import Output, report, script
from eyas.data.regenerate import regenerate
from eyas.data.regenerate.workers import EngineAnswerer
from eyas.targets import load_tokenizer
from eyas.text.chats import Chat, write_chats
from eyas.text.template import encode_chat
from eyas.train.lm.lm import CorpusConfig, LmConfig, build_corpus, cut_depth, split_chats, train_model
from eyas.train.loop.loop import LoopConfig
from eyas.train.recipe import run_recipe

TOY = Path(__file__).parent.parent / "tests" / "toy"
LAYERS = 4
ROWS = 4
TREES = {8: ("dynamic:8,4,8", f"shared:8,4,{8 * ROWS},8"), 16: ("dynamic:16,5,16", f"shared:16,5,{16 * ROWS},16")}
"""Number of nodes -> trees with that many nodes per row, as deep as a chain of them."""
WARM = 8
"""Number of chats answered first and not counted, during which the engine learns what nodes are worth."""


def hybrid_of(teacher: Any) -> Qwen3_5ForCausalLM:
    """A hybrid with fresh attention and delta rules, and all other weights from evenly spaced layers of a Llama."""
    small, own = cut_depth(teacher, LAYERS), teacher.config
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=own.vocab_size, hidden_size=own.hidden_size, intermediate_size=own.intermediate_size,
            num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=64,
            max_position_embeddings=own.max_position_embeddings, tie_word_embeddings=True,
            eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id,
        )
    )  # fmt: skip
    given: dict[str, Tensor] = small.state_dict()
    taken = {name: value for name, value in given.items() if "self_attn" not in name}
    for name in taken:
        if name.endswith("norm.weight"):  # Qwen3.5's norms multiply by 1 + weight
            taken[name] = taken[name] - 1
    model.load_state_dict({**model.state_dict(), **taken})
    return model


def trained_target(chats: Path, folder: Path, steps: int) -> Path:
    """Train the target unless it exists; returns its folder."""
    made = folder / "model"
    if made.exists():
        return made
    config = LmConfig(
        output=folder, batch=2, short_length=256, short_share=1.0, validation_blocks=4,
        corpus=CorpusConfig(chats=chats, weights={"chats": 1.0}),
        loop=LoopConfig.model_validate({
            "steps": steps, "validate_every": 100, "save_seconds": 120,
            "optimizer": {"kind": "muon", "lr": 0.002, "matrix_lr": 0.02, "weight_decay": 0.01},
            "schedule": {"kind": "wsd", "warmup": 0.05, "decay": 0.5},
        }),
    )  # fmt: skip
    corpus = build_corpus(config.corpus, folder, TOY / "target")
    torch.manual_seed(0)
    train_model(hybrid_of(AutoModelForCausalLM.from_pretrained(TOY / "target", dtype=torch.float32)), corpus, config)
    return made


def trained_drafter(target: Path, questions: Sequence[Chat], runs: Path, steps: int) -> Path:
    """Train a drafter on the target's own answers; returns its folder."""
    asked, answers, store = runs / "asked.jsonl", runs / "answers.jsonl", runs / "store"
    write_chats(asked, questions)
    engine = eyas.load(target, batch_size=32)
    regenerate(asked, answers, EngineAnswerer(engine, eyas.SamplingParams(max_tokens=160)))
    capture = ["--model", target, "--chats", answers, "--output", store, "--states", "bf16"]
    subprocess.run([sys.executable, "-m", "eyas", "data", "capture", *map(str, capture)], check=True)
    output = runs / "drafter"
    settings = {"target": target, "store": store, "output": output, "loop.steps": steps, "loop.validate_every": 100}
    run_recipe(TOY / "recipes" / "drafter.yaml", [f"drafter.{name}={value}" for name, value in settings.items()])
    return output / "drafter"


def accept_lengths(
    target: Path, drafter: Path, tree: str, requests: Sequence[eyas.Request], plain: Sequence[Sequence[int]]
) -> list[float]:
    """Accept lengths of the answers after the first `WARM`; SystemExit if an answer differs from plain decoding's."""
    done = eyas.load(target, drafter, tree=tree, batch_size=ROWS).generate(list(requests))
    if [one.token_ids for one in done] != list(plain):
        raise SystemExit(f"answers with {tree} differ from plain decoding's")
    return [one.stats.accept_length for one in done[WARM:]]


@script
def main(
    chats: Path,
    *,
    runs: Path = Path("runs/hybrid"),
    steps: Annotated[int, "steps of the target's training"] = 300,
    answers: Annotated[int, "answers on which the drafter is trained"] = 900,
    drafter_steps: int = 300,
    prompts: int = 40,
    tokens: int = 128,
    output: Output = None,
) -> None:
    split = split_chats(chats)["chats"]
    target = trained_target(chats, runs / "target", steps)
    validated = split.held_out[prompts : prompts + 30]  # capture holds them out too: both split by a chat's id
    drafter = trained_drafter(target, [*split.train[:answers], *validated], runs, drafter_steps)
    tokenizer = load_tokenizer(target)
    questions = [*split.train[:WARM], *split.held_out[:prompts]]
    asked = [encode_chat(tokenizer, chat.messages[:1]) for chat in questions]
    rows = []
    for temperature in (0.0, 1.0):
        requests = [
            eyas.Request(prompt, eyas.SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed))
            for seed, prompt in enumerate(asked)
        ]
        plain = [one.token_ids for one in eyas.load(target, batch_size=ROWS).generate(requests)]
        for nodes, trees in TREES.items():
            chain = accept_lengths(target, drafter, f"chain:{nodes}", requests, plain)
            for tree in trees:
                grown = accept_lengths(target, drafter, tree, requests, plain)
                rows.append({
                    "temperature": temperature, "nodes": nodes, "tree": tree,
                    "chain_accept_length": round(mean(chain), 3), "tree_accept_length": round(mean(grown), 3),
                    "answers_in_which_the_tree_is_no_shorter": sum(a >= b for a, b in zip(grown, chain, strict=True)),
                })  # fmt: skip
    about = {"target_steps": steps, "answers": answers, "drafter_steps": drafter_steps, "warm": WARM}
    report({**about, "prompts": len(asked) - WARM, "tokens": tokens, "rows": rows}, output, rows)


if __name__ == "__main__":
    raise SystemExit(main())
