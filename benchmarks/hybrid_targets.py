"""Trees and speculation on a hybrid target, against an attention-only target of the same size; both are random.

    python -m benchmarks.hybrid_targets [random-delta] [--dtype bfloat16] [--nodes 16] [--tokens 96] [--repeats 9]

A tree pass verifies a root with chains of four draft tokens below it and commits a path; a plain pass has the root
alone. The oracle's two draft tokens are always right, so every round emits three tokens. Plain decoding is measured by
`plain_decoding.py`.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import eyas
from benchmarks.gpu.oracle import OracleDrafter
from benchmarks.harness import Output, interleave, paired, report, script
from benchmarks.plain_decoding import RANDOM, eyas_rate, random_model
from eyas.engine import Engine, Speculation
from eyas.targets import SlotCache, Target, load_target
from eyas.targets.native.linears import lone_torch
from eyas.tree import DraftTree, parse_tree

RANDOM["random-attention"] = Qwen3Config(
    vocab_size=8192, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, intermediate_size=3584, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


def chains(nodes: int, vocabulary: int) -> DraftTree:
    """A tree of `nodes` nodes in chains of four; the last chain may be shorter."""
    parents = torch.tensor([[-1 if node % 4 == 0 else node - 1 for node in range(nodes)]], dtype=torch.int64)
    tokens = torch.arange(5, 5 + nodes).unsqueeze(0) % vocabulary
    valid = torch.ones(1, nodes, dtype=torch.bool)
    return DraftTree(tokens, parents, valid.float(), valid, 4, counted=nodes)


def pass_seconds(target: Target, cache: SlotCache, tree: DraftTree, path: list[int]) -> float:
    """The median time of ten passes that verify a root with a tree and commit a path."""
    found = []
    with lone_torch(), torch.inference_mode():
        for _ in range(10):
            began = time.perf_counter()
            target.verify(cache, range(1), torch.tensor([4]), tree, ())
            cache.commit(range(1), [path])
            found.append(time.perf_counter() - began)
    return median(found)


def passes(target: Target, nodes: int, prompt: list[int]) -> dict[str, Any]:
    """A pass over a root alone, and one over a tree that commits three tokens, each with its own cache."""
    sides = {}
    for name, tree, path in (
        ("plain", DraftTree.empty(1, torch.device("cpu")), [0]),
        ("tree", chains(nodes, target.vocab_size), [0, 1, 2]),
    ):
        cache = target.allocate(1, 2048)
        for _ in target.prefill(cache, range(1), [prompt], ()):
            pass
        sides[name] = partial(pass_seconds, target, cache, tree, path)
    return sides


def oracle_sides(target: Target, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Plain decoding, and speculation that emits three tokens per round."""
    asked, prompts = eyas.SamplingParams(max_tokens=tokens, ignore_eos=True), torch.tensor([prompt])
    (plain,) = Engine(target).generate([eyas.Request(tuple(prompt), asked)])
    drafter = OracleDrafter([prompt + plain.token_ids], (1.0, 1.0), target.vocab_size, target.device)
    speculation = Speculation(drafter, parse_tree("chain:2"))
    (done,) = Engine(target, None, speculation).generate([eyas.Request(tuple(prompt), asked)])
    if done.token_ids != plain.token_ids or done.stats.accept_length < 2.9:
        raise SystemExit(f"the oracle's answer differs, or only {done.stats.accept_length} tokens a round are accepted")
    return {
        "plain": partial(eyas_rate, Engine(target), prompts, tokens),
        "oracle": partial(eyas_rate, Engine(target, None, speculation), prompts, tokens),
    }


@script
def main(
    model: str = "random-delta",
    *,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    nodes: int = 16,
    tokens: int = 96,
    repeats: int = 9,
    output: Output = None,
) -> None:
    prompt = torch.randint(5, 8000, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    sides: dict[str, Any] = {}
    about: dict[str, Any] = {"dtype": dtype, "quantize": quantize}
    for name in (model, "random-attention"):
        with TemporaryDirectory() as folder:
            target = load_target(random_model(name, folder), device="cpu", dtype=dtype, quantize=quantize)
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(RANDOM[name]).parameters())
        about[name] = {"parameters": parameters, "native": target.native is not None}
        sides |= {f"{name} {each}": run for each, run in passes(target, nodes, prompt).items()}
        if name == model:
            oracle = interleave(oracle_sides(target, prompt, tokens), repeats)
    seconds = interleave(sides, repeats)
    costs = {
        name: [a / b for a, b in zip(seconds[f"{name} tree"], seconds[f"{name} plain"], strict=True)]
        for name in (model, "random-attention")
    }
    report(
        about
        | {
            "milliseconds": {side: round(1000 * median(found), 2) for side, found in seconds.items()},
            "tree_over_plain": {name: round(median(found), 3) for name, found in costs.items()},
            "tree_over_plain_against_attention": paired(costs[model], costs["random-attention"]),
            "oracle_speedup": paired(oracle["oracle"], oracle["plain"]),
        },
        output,
    )


if __name__ == "__main__":
    raise SystemExit(main())
