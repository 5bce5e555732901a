"""Replay of reference answers to drafters that need no states: accept length as if a target had written just that.

This is not decoding: no model runs, and a real target's answers differ from the references. It says how much of such
an answer a method could copy, by the drafter's own code and trees. Rows are those of `benchmarks.workloads`. `alone`
drafts from the request only; `with earlier answers` all rows have one owner, in the order of the file.

    python -m benchmarks.replay editing.jsonl agents.jsonl [--model demo] [--tree T ...] --output FILE.json
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from eyas.drafters.history import HistoryDrafter
from eyas.drafters.weightless.ngram import NgramDrafter
from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.files import write_json
from eyas.targets import load_tokenizer
from eyas.text.chats import Message
from eyas.text.template import encode_chat
from eyas.tree import DraftTree, TreeSpec, parse_tree
from eyas.types import Stats
from eyas.verify import Coupling

CPU = torch.device("cpu")
METHODS: dict[str, Callable[[torch.device], HistoryDrafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
NO_COUPLING = cast(Coupling, None)  # drafters of copies don't ask what will be sampled


def answers(row: dict[str, Any], tokenizer: Any) -> list[tuple[tuple[int, ...], list[int]]]:
    """Prompt and reference answer of each turn, as tokens."""
    chat: list[Message] = []
    found = []
    turns, references = row.get("turns", [row.get("prompt")]), row.get("references", [row.get("reference")])
    for said, reference in zip(turns, references, strict=True):
        chat.append(Message(role="user", content=said))
        found.append((encode_chat(tokenizer, chat), tokenizer(reference, add_special_tokens=False)["input_ids"]))
        chat.append(Message(role="assistant", content=reference))
    return found


def replay(
    drafter: HistoryDrafter, spec: TreeSpec, prompt: Sequence[int], answer: Sequence[int], owner: str
) -> tuple[Stats, int]:
    """Draft along an answer, whose first token comes with the prompt: what was accepted, and the nodes drafted."""
    stats, nodes = Stats(), 0
    drafter.begin(0, prompt, owner)
    observe(drafter, [*prompt[1:], answer[0]])
    done = 1
    while done < len(answer):
        tree = drafter.draft(range(1), spec, NO_COUPLING)
        accepted = walk(tree, answer[done:])
        stats.record(accepted, int(tree.depth.max()), len(prompt) + done)
        nodes += int(tree.valid.sum())
        taken = answer[done : done + accepted + 1]
        observe(drafter, taken)
        done += len(taken)
    drafter.finish(0)
    drafter.truncate(0, 0)
    return stats, nodes


def observe(drafter: HistoryDrafter, tokens: Sequence[int]) -> None:
    """Let the drafter's first slot know some more tokens."""
    drafter.observe(range(1), torch.tensor([list(tokens)]), torch.empty(1, len(tokens), 0, 1), [len(tokens)])


def walk(tree: DraftTree, following: Sequence[int]) -> int:
    """How many draft tokens are those that follow."""
    nodes = list(zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.valid[0].tolist(), strict=True))
    at, accepted = -1, 0
    for token in following:
        found = next(
            (node for node, (t, parent, valid) in enumerate(nodes) if valid and (t, parent) == (token, at)), None
        )
        if found is None:
            break
        at, accepted = found, accepted + 1
    return accepted


def measure(
    dialogues: Sequence[Sequence[tuple[tuple[int, ...], list[int]]]], method: str, tree: str | None, owner: str
) -> dict[str, Any]:
    """The figures of a method on a file."""
    drafter = METHODS[method](CPU)
    drafter.resize(1)
    name = tree or str(drafter.default_tree)
    pooled, nodes = Stats(), 0
    for dialogue in dialogues:
        for prompt, answer in dialogue:
            stats, drafted = replay(drafter, parse_tree(name), prompt, answer, owner)
            pooled.merge(stats)
            nodes += drafted
    return {
        "method": method,
        "tree": name,
        "answers": "with earlier answers" if owner else "alone",
        "replayed_accept_length": round(pooled.accept_length, 3),
        "drafted_nodes_per_round": round(nodes / pooled.target_passes, 2),
        "rounds": pooled.target_passes,
        "rounds_without_draft": pooled.target_passes - (pooled.offered_by_depth or [0])[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model", default="demo", help="whose tokenizer and chat template are used")
    parser.add_argument("--tree", nargs="*", help="in place of each method's own tree")
    parser.add_argument("--limit", type=int, help="rows of each file")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    tokenizer = load_tokenizer(options.model)
    report: dict[str, Any] = {"what": "replay of reference answers, not decoding", "python": platform.python_version()}
    for path in options.files:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[: options.limit]]
        dialogues = [answers(row, tokenizer) for row in rows]
        tokens = [len(answer) for dialogue in dialogues for _, answer in dialogue]
        results = [
            measure(dialogues, method, tree, owner)
            for method in METHODS
            for tree in options.tree or (None,)
            if method != "ngram" or tree is None or parse_tree(tree).max_fanout == 1
            for owner in ("", "all")[: 2 if method == "suffix" else 1]
        ]
        report[path.stem] = {
            "rows": len(rows),
            "answers": len(tokens),
            "answer_tokens": sum(tokens),
            "results": results,
        }
        for result in results:
            print(path.stem, *result.values())
    if options.output is not None:
        write_json(options.output, report)


if __name__ == "__main__":
    main()
