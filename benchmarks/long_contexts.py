"""Accept length by context: texts that a target is made to continue, up to 16k tokens, drafted for by the engine.

Small targets don't write sense for so long, so every answer is a real text: source files of the standard library, read
up to some point and continued, and chats about its functions that grow turn by turn. The engine drafts, verifies,
commits and counts as ever; only its rule is another: a draft token is accepted if the text goes on with it, and the
text's next token is the bonus token. So figures say how well drafts continue such a text from the target's states, not
how often they are what the target would say.

A target whose context is shorter is given a longer one by YaRN, which needs no training; its config is changed in a
copy. Texts grow piece by piece, each a request of its own; the prefix cache keeps what was read.

    python -m benchmarks.long_contexts [MODEL] [DRAFTER] [--methods eagle3 suffix eagle3+suffix]
        [--engine NAME=VALUE ...] --output FILE.json

`--engine` passes options to `eyas.load`, such as `tree=chain:5`.
"""

from __future__ import annotations

import ast
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import yaml

from benchmarks.harness import described, script
from eyas.assets import named_target
from eyas.drafters.options import read_method
from eyas.engine import Engine
from eyas.files import write_json
from eyas.hub import find_model
from eyas.session import load
from eyas.targets import load_tokenizer
from eyas.text.chats import Message
from eyas.text.template import encode_chat
from eyas.tree import DraftTree, NodeLogits
from eyas.types import CONTEXT_BUCKETS, Limits, Request, SamplingParams, Stats
from eyas.verify import Sampler, Walk
from tests.toy.pair import TOY_DRAFTER, TOY_TARGET

FILES = ("argparse.py", "typing.py", "inspect.py", "subprocess.py")
PIECES = (200, 600, 1100, 1600, 2300, 3300, 4500, 6500, 8600, 12_000, 15_500)
"""Tokens of a file before each piece that is continued."""
PIECE = 96
"""Tokens of a piece."""
TURN = 600
"""Most tokens of a chat's answer."""
BEGINNING = 48
"""Tokens of each answer of a chat that are decoded; the rest is read with the next turn."""


class Piece(NamedTuple):
    """A prompt and the text that is to follow it, as tokens."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]


class ForcedWalk:
    """Walks along a text, given as tokens: a draft token is accepted if it is the text's next one. For one sequence."""

    lossless = False
    seeded = True

    def __init__(self) -> None:
        self._text: tuple[int, ...] = ()
        self._done = 0

    def follow(self, text: Sequence[int]) -> None:
        """From now on walk along `text`."""
        self._text, self._done = tuple(text), 0

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:  # noqa: ARG002
        """The longest path from the root that spells the text."""
        steps, node, path = tree.max_depth + 1, 0, [0]
        ahead = [*self._text[self._done : self._done + steps], *[0] * steps][:steps]  # what is beyond is cut off
        children = zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.acceptable[0].tolist(), strict=True)
        for index, (token, parent, valid) in enumerate(children, 1):  # a node's parent comes before it
            if valid and parent + 1 == node and token == ahead[len(path) - 1]:
                node = index
                path.append(node)
        self._done += len(path)
        missing = [tree.size + 1] * (steps - len(path))
        return Walk.of(torch.tensor([path + missing]), torch.tensor([ahead]), tree)


def file_pieces(tokens: Sequence[int], longest: int) -> Iterator[Piece]:
    """Pieces of one text, ever further into it."""
    for start in PIECES:
        if start + PIECE <= min(longest, len(tokens)):
            yield Piece(tuple(tokens[:start]), tuple(tokens[start : start + PIECE]))


def chat_pieces(tokenizer: Any, sources: Sequence[str], longest: int) -> Iterator[Piece]:
    """The turns of one chat in which functions are completed, until it would be longer than `longest`."""
    chat: list[Message] = []
    for source in sources:
        lines = source.splitlines(keepends=True)
        head, body = "".join(lines[: len(lines) // 2]), "".join(lines[len(lines) // 2 :])
        chat.append(Message(role="user", content=f"Complete the code I provided.\n\n{head}"))
        prompt = encode_chat(tokenizer, chat)
        answer = tuple(tokenizer(body, add_special_tokens=False)["input_ids"])[:TURN]
        if len(prompt) + len(answer) > longest:
            return
        yield Piece(prompt, answer[:BEGINNING])
        chat.append(Message(role="assistant", content=tokenizer.decode(answer)))


def functions(path: Path) -> list[str]:
    """The sources of a module's functions and methods of at least eight lines, in order."""
    text = path.read_text(encoding="utf-8")
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    sources = (ast.get_source_segment(text, node) for node in sorted(found, key=lambda node: node.lineno))
    return [source for source in sources if source is not None and len(source.splitlines()) >= 8]


def texts(tokenizer: Any, longest: int, files: int) -> dict[str, list[list[Piece]]]:
    """The pieces of both sets, a list for each file and each chat."""
    library = [Path(sysconfig.get_paths()["stdlib"]) / name for name in FILES[:files]]
    tokens = [tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"] for path in library]
    return {
        "files": [list(file_pieces(each, longest)) for each in tokens],
        "chats": [list(chat_pieces(tokenizer, functions(path), longest)) for path in library],
    }


def run(engine: Engine, rule: ForcedWalk, pieces: Sequence[Piece]) -> Stats:
    """Let the engine continue the pieces of one text; what it counted."""
    stats = Stats()
    for piece in pieces:
        rule.follow(piece.text)
        params = SamplingParams(max_tokens=len(piece.text), ignore_eos=True)
        done = engine.generate([Request(piece.prompt, params)])[0]
        assert done.error is None, done.error
        assert tuple(done.token_ids) == piece.text
        stats.merge(done.stats)
    return stats


def with_context(model: str, tokens: int, folder: Path) -> tuple[str, dict[str, Any] | None]:
    """The model, or a copy of it in `folder` whose context has room for `tokens`; and the RoPE that the copy has."""
    path = Path(find_model(named_target(model)))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    most = config["max_position_embeddings"]
    if most >= tokens:
        return str(path), None
    shutil.copytree(path, folder, dirs_exist_ok=True)
    rope = {
        "rope_type": "yarn", "factor": float(-(-tokens // most)), "original_max_position_embeddings": most,
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }  # fmt: skip
    config |= {"max_position_embeddings": most * -(-tokens // most), "rope_parameters": rope}
    write_json(folder / "config.json", config)
    return str(folder), rope


def figures(stats: Stats) -> dict[str, Any]:
    """The figures of a method on a set."""
    rounds, walked = stats.rounds_by_context, stats.walked_by_context
    near, far = (sum(rounds[part]) for part in (slice(0, 2), slice(4, 5)))
    ratio = None
    if near and far:
        ratio = round((1 + sum(walked[4:5]) / far) / (1 + sum(walked[:2]) / near), 3)
    return {
        "accept_length": round(stats.accept_length, 3),
        "accept_length_by_context": {name: round(each, 3) for name, each in stats.accept_length_by_context.items()},
        "rounds_by_context": dict(zip(CONTEXT_BUCKETS, rounds, strict=False)),
        "8-16k over 0-2k": ratio,
    }


def before(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The figures that an earlier run with the same settings wrote, by set and method: a run that was cut goes on."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return dict(content["accept_length"]) if content["settings"] == settings else {}


@script
def main(
    model: str = str(TOY_TARGET),
    drafter: str = str(TOY_DRAFTER),
    *,
    output: Path,
    methods: Sequence[str] = ("eagle3", "suffix", "eagle3+suffix"),
    sets: Sequence[Literal["files", "chats"]] = ("files", "chats"),
    files: Annotated[int, "how many files, and chats about files"] = 1,
    longest: Annotated[int, "tokens"] = 16_500,
    engine: Annotated[Sequence[str], "options of eyas.load, NAME=VALUE"] = (),
) -> None:
    options = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in engine)}
    name = "demo" if Path(drafter) == TOY_DRAFTER else Path(drafter).name
    with tempfile.TemporaryDirectory() as folder:
        longer, rope = with_context(model, longest + 64, Path(folder))
        settings = {
            "model": model, "drafter": name, "rope": rope, "longest": longest, "files": list(FILES[:files]),
            "engine": options, "piece": PIECE, "turn": TURN, "beginning": BEGINNING,
        }  # fmt: skip
        found = before(output, settings)
        tokenizer = load_tokenizer(longer)
        read = {name: pieces for name, pieces in texts(tokenizer, longest, files).items() if name in sets}
        for method, name in product(methods, read):
            if method in found.get(name, {}):
                continue
            rule, stats = ForcedWalk(), Stats()
            limits = Limits(prefix_tokens=2 * longest)
            source = None if read_method(method).alone else drafter
            made = load(longer, source, method=method, rule=rule, limits=limits, **options)
            for pieces in read[name]:
                stats.merge(run(made, rule, pieces))
                print(name, method, json.dumps(figures(stats)), flush=True)
            found.setdefault(name, {})[method] = figures(stats)
            write_json(output, described({"settings": settings, "accept_length": found}))


if __name__ == "__main__":
    raise SystemExit(main())
