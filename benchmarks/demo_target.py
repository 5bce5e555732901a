"""The demo target on chats it was not trained on: loss, answers that loop, answers that end by themselves.

    python -m benchmarks.demo_target MATHS.jsonl [--model demo] [--prompts 100] [--output FILE.json]

MATHS.jsonl is the file of maths chats of its training (the GSM8K training set). Chats are held out as in its training:
the embedded target left out single chats, by their ids; what `recipes/demo.py` trains leaves out whole modules of the
standard library (`--held-out modules`). Loss is in nats per token, over whole chats and over answers alone. A looping
answer repeats one 6-gram four times or more; answers have at most 256 tokens.

The texts of `eyas demo` are the first two maths questions, the first two functions that are public and have a
docstring, and the first question on something public, with at most 300 characters, in the order of the SHA-256 of their
ids (`--texts` prints them).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch.nn import functional as F

import eyas
from benchmarks.harness import Output, report, script
from eyas.data.tokens.tokenize import tokenize_chat
from eyas.text.chats import Chat
from eyas.text.chats import held_out as is_held_out
from eyas.text.template import encode_chat
from eyas.train.lm.corpus import HELD_OUT_SHARE, split_chats

SHARES = {"maths": 0.4, "code": 0.4, "prose": 0.2}
"""Of the prompts to answer."""
SHOWN = {"maths": 2, "code": 2, "prose": 1}
LONGEST_TEXT = 300
LONGEST = 1024  # tokens of a chat that count


def held_out_chats(maths: Path, by_module: bool) -> dict[str, list[Chat]]:
    """The held-out chats of each kind, in the order of their ids' hashes."""
    splits = split_chats(maths)
    library = splits["library"].held_out
    if not by_module:
        library = [chat for split in splits["library"] for chat in split if is_held_out(chat.id, HELD_OUT_SHARE)]
    kinds = {
        "maths": splits["chats"].held_out,
        "code": [chat for chat in library if chat.id.startswith("stdlib-code")],
        "prose": [chat for chat in library if chat.id.startswith("stdlib-ask")],
    }
    return {kind: sorted(chats, key=lambda c: hashlib.sha256(c.id.encode()).digest()) for kind, chats in kinds.items()}


def shown(kind: str, chat: Chat) -> bool:
    """Whether `eyas demo` may show a chat: a short one, of the library only public things with a docstring."""
    text = chat.messages[0].content or ""
    name = chat.id.removeprefix("stdlib-code-").removeprefix("stdlib-ask-").split(":")[0]
    public = kind == "maths" or not any(part.startswith("_") for part in name.split("."))
    return len(text) <= LONGEST_TEXT and public and (kind != "code" or '"""' in text)


@torch.inference_mode()
def losses(engine: eyas.Engine, chats: Sequence[Chat]) -> tuple[float, float]:
    """Nats per token over whole chats, and over their answers."""
    total = answers = 0.0
    tokens = answer_tokens = 0
    for chat in chats:
        row = tokenize_chat(engine.tokenizer, chat)
        ids = torch.from_numpy(row.tokens)[None, :LONGEST].long()
        mask = torch.from_numpy(row.loss_mask)[1:LONGEST]
        loss = F.cross_entropy(engine.target.model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")
        total, tokens = total + float(loss.sum()), tokens + len(loss)
        answers, answer_tokens = answers + float(loss[mask].sum()), answer_tokens + int(mask.sum())
    return total / tokens, answers / answer_tokens


def loops(token_ids: Sequence[int]) -> bool:
    """Whether some 6-gram stands there four times or more."""
    grams = Counter(tuple(token_ids[i : i + 6]) for i in range(len(token_ids) - 5))
    return max(grams.values(), default=0) >= 4


def answer(engine: eyas.Engine, chats: Sequence[Chat], penalty: float) -> list[eyas.Completion]:
    """Greedy answers of at most 256 tokens."""
    params = eyas.SamplingParams(max_tokens=256, frequency_penalty=penalty)
    return engine.generate([eyas.Request(tuple(encode_chat(engine.tokenizer, c.messages[:-1])), params) for c in chats])


@script
def main(
    maths: Path,
    *,
    model: str = "demo",
    prompts: int = 100,
    held_out: Literal["chats", "modules"] = "chats",
    frequency_penalty: float = 0.0,
    texts: Annotated[bool, "print the texts of `eyas demo` and nothing else"] = False,
    output: Output = None,
) -> None:
    chats = held_out_chats(maths, held_out == "modules")
    if texts:
        for kind, count in SHOWN.items():
            for chat in [chat for chat in chats[kind] if shown(kind, chat)][:count]:
                print(f"[{kind}] {chat.id}\n{chat.messages[0].content}\n")
        return
    engine = eyas.load(model, dtype="float32", batch_size=25)
    kinds = {}
    for kind, group in chats.items():
        whole, answers = losses(engine, group)
        began = time.perf_counter()
        done = answer(engine, group[: round(SHARES[kind] * prompts)], frequency_penalty)
        kinds[kind] = {
            "held_out": len(group),
            "loss": round(whole, 3),
            "answer_loss": round(answers, 3),
            "answered": len(done),
            "looping": sum(loops(one.token_ids) for one in done),
            "ended": sum(one.finish_reason == "stop" for one in done),
            "seconds": round(time.perf_counter() - began, 1),
        }
    sums = {name: sum(kind[name] for kind in kinds.values()) for name in ("loss", "answered", "looping", "ended")}
    mean = round(sums.pop("loss") / len(kinds), 3)
    settings = {"model": model, "held_out": held_out, "frequency_penalty": frequency_penalty}
    report({**settings, "kinds": kinds, "mean_loss": mean, **sums}, output)


if __name__ == "__main__":
    raise SystemExit(main())
