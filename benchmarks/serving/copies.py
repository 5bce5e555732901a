"""Answers that copy, such as edits of a file: suffix decoding against plain decoding and llama.cpp's n-gram kinds.

    python -m benchmarks.serving.copies FILE.gguf --prompts EVAL/edits.jsonl EVAL/humaneval.jsonl
        [--llama LLAMA_SERVER] [--kinds none ngram-simple] [--shapes chain:8 chain:16] [--count 4] [--tokens 256]
        [--output FILE.json]

All sides read the same file and greedily answer the same chats, in turns, prompt by prompt; each server sees a prompt
once. eyas's plain side is its own server without a drafter. Figures are each server's own count of decoded tokens per
second: prompts aren't part of them. eyas's answers must be equal.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx

from benchmarks.harness import Output, paired, report, script
from eyas.bench.offline.runner import rotated
from eyas.bench.serving.servers import ServerProcess, eyas_server

LLAMA_KINDS = ("none", "ngram-simple", "ngram-map-k", "ngram-mod")


class Turn(NamedTuple):
    """An answer of one side."""

    text: str
    tokens: int
    tokens_per_second: float
    accept_length: float | None


def prompts_of(path: Path, count: int) -> Iterator[str]:
    """The first messages of `count` rows, spread over the file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for at in range(min(count, len(rows))):
        row = rows[at * len(rows) // count]
        yield row["messages"][0]["content"] if "messages" in row else row.get("prompt") or row["turns"][0]


def llama_server(binary: Path, file: Path, kind: str) -> ServerProcess:
    """llama.cpp's server with one slot and this kind of speculation."""
    own = ["-t", "2", "-c", "8192", "-np", "1", "-fa", "on", "--no-webui", "--host", "127.0.0.1"]
    drafts = [] if kind == "none" else ["--spec-type", kind]
    return ServerProcess(
        f"llama.cpp {kind}", lambda port: [str(binary), "-m", str(file), "--port", str(port), *own, *drafts]
    )


def ask(server: ServerProcess, prompt: str, tokens: int) -> Turn:
    """One greedy answer, and how fast the server says that it was written."""
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(f"{server.url}/chat/completions", json=body, timeout=900)
    answer.raise_for_status()
    fields: Any = answer.json()
    text, usage = fields["choices"][0]["message"]["content"], fields["usage"]
    if "eyas" in usage:
        speculation = usage["eyas"]
        return Turn(text, usage["completion_tokens"], speculation["tokens_per_second"], speculation["accept_length"])
    return Turn(text, usage["completion_tokens"], fields["timings"]["predicted_per_second"], None)


@script
def main(
    file: Path,
    *,
    prompts: Annotated[Sequence[Path], "files of prompts; each is a set"],
    llama: Annotated[Path | None, "llama.cpp's server"] = None,
    kinds: Annotated[Sequence[str], "llama.cpp's kinds of speculation"] = LLAMA_KINDS,
    shapes: Annotated[Sequence[str], "fixed trees beside auto"] = ("chain:8", "chain:16"),
    count: Annotated[int, "prompts of each set"] = 4,
    tokens: int = 256,
    output: Output = None,
) -> None:
    """Time every side on every prompt."""
    common = [str(file), "--served-model-name", "m", "--max-running", "1", "--max-model-len", "8192"]
    servers = {"plain": eyas_server("plain", common, ready_seconds=900)}
    for tree in ("auto", *shapes):
        servers[tree] = eyas_server(tree, [*common, "--method", "suffix", "--tree", tree], ready_seconds=900)
    for kind in () if llama is None else kinds:
        servers[f"llama.cpp {kind}"] = llama_server(llama, file, kind)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server)
        for each in servers.values():
            ask(each, "Say hello.", 8)
        for path in prompts:
            taken: dict[str, list[Turn]] = {name: [] for name in servers}
            for number, prompt in enumerate(prompts_of(path, count)):
                for name in rotated(list(servers), number):
                    taken[name].append(ask(servers[name], prompt, tokens))
                    print(path.stem, number, name, taken[name][-1][1:], flush=True)
            rows += _compared(path.stem, taken)
    report({"file": file.name, "tokens": tokens, "unit": "decoded tokens/s"}, output, rows)


def _compared(name: str, taken: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    ours = [side for side in taken if not side.startswith("llama.cpp")]
    equal = all(len({taken[side][at].text for side in ours}) == 1 for at in range(len(taken["plain"])))
    rows = []
    for side, turns in taken.items():
        speeds, plain = [turn.tokens_per_second for turn in turns], [turn.tokens_per_second for turn in taken["plain"]]
        lengths = [turn.accept_length for turn in turns if turn.accept_length is not None]
        rows.append(
            {
                "set": name,
                "side": side,
                "tokens/s": round(statistics.median(speeds), 1),
                "over plain": paired(speeds, plain),
                "accept length": round(statistics.fmean(lengths), 2) if lengths else None,
                "equal": equal if side in ours else None,
            }
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
