"""Compare llama.cpp's chat template and tokenizer of a GGUF file with ours: token ids of chats with one question each.

    python -m benchmarks.engines.token_ids LLAMA_SERVER PROMPTS.jsonl [--model FILE.gguf]

Prints how many are equal; exits with 1 if one isn't.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import httpx

from benchmarks.engines import llama as llama_engine
from benchmarks.engines.vllm import Job
from benchmarks.harness import script
from eyas.assets import SMOLLM2
from eyas.errors import UsageError
from eyas.gguf_target import weights_file
from eyas.hub import find_target
from eyas.targets import load_tokenizer
from eyas.text.chats import Message
from eyas.text.prompts import PromptRow, read_prompts
from eyas.text.template import encode_chat


def ids_of(client: httpx.Client, text: str) -> list[int]:
    """llama.cpp's token ids of a user's question."""
    asked = {"messages": [{"role": "user", "content": text}]}
    chat = client.post("/apply-template", json=asked).raise_for_status().json()["prompt"]
    cut = {"content": chat, "add_special": True, "parse_special": True}
    return list(client.post("/tokenize", json=cut).raise_for_status().json()["tokens"])


@script
def main(
    llama: Annotated[Path, "llama-server"],
    prompts: Annotated[Path, "JSON Lines"],
    *,
    model: Annotated[str, "the target: a GGUF file or the name of one"] = SMOLLM2,
) -> int:
    """Compare all prompts; returns the exit code."""
    found = find_target(model)
    file = weights_file(found)
    if file is None:
        raise UsageError(f"{model} isn't in a GGUF file")
    tokenizer, equal = load_tokenizer(found), 0
    texts = [row.said for row in read_prompts(prompts) if isinstance(row, PromptRow) and row.said is not None]
    with (
        llama_engine.server(llama.absolute(), Job(file, file, 0, 1, [])) as running,
        httpx.Client(base_url=running.root, timeout=60, trust_env=False) as client,
    ):
        for text in texts:
            ours = list(encode_chat(tokenizer, [Message(role="user", content=text)]))
            equal += ours == ids_of(client, text)
    print(f"{equal} of {len(texts)} prompts have the same token ids")
    return int(equal < len(texts))


if __name__ == "__main__":
    raise SystemExit(main())
