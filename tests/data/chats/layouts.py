# ruff: noqa: RUF001
"""Expected token masks: every layout written out by hand as pieces of text of the prompt or the assistant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Turn = dict[str, Any]
Piece = tuple[str, bool]
"""Text, and whether the assistant writes it."""


def qwen2(turns: list[Turn]) -> Iterator[Piece]:
    if turns[0]["role"] != "system":
        yield "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", False
    yield from chatml(turns, lambda _i, turn: turn["content"])


def qwen3(turns: list[Turn]) -> Iterator[Piece]:
    last_question = max(i for i, turn in enumerate(turns) if turn["role"] == "user")

    def shown(i: int, turn: Turn) -> str:
        thought = turn.get("reasoning_content", "")
        said = str(turn["content"])
        if "reasoning_content" not in turn and "</think>" in said:
            thought = said.split("</think>")[0].split("<think>")[-1].strip("\n")
            said = said.split("</think>")[-1]
            said = said.lstrip("\n")
        if i > last_question and (i == len(turns) - 1 or thought):
            return "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + said.lstrip("\n")
        return said

    yield from chatml(turns, shown)


def chatml(turns: list[Turn], shown: Callable[[int, Turn], str]) -> Iterator[Piece]:
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            calls = [
                f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": '
                f"{json.dumps(call['function']['arguments'], ensure_ascii=False)}}}\n</tool_call>"
                for call in turn.get("tool_calls", [])
            ]
            between = "\n" if calls and turn["content"] else ""
            yield "<|im_start|>assistant\n", False
            yield shown(i, turn) + between + "\n".join(calls) + "<|im_end|>", True
            yield "\n", False
        elif turn["role"] == "tool":
            first = turns[i - 1]["role"] != "tool"
            last = i + 1 == len(turns) or turns[i + 1]["role"] != "tool"
            said = f"\n<tool_response>\n{turn['content']}\n</tool_response>"
            yield ("<|im_start|>user" if first else "") + said + ("<|im_end|>\n" if last else ""), False
        else:
            yield f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n", False


def llama3(turns: list[Turn]) -> Iterator[Piece]:
    yield "<|begin_of_text|>", False
    for turn in turns:
        role = "ipython" if turn["role"] == "tool" else turn["role"]
        said = turn["content"].strip()
        if turn.get("tool_calls"):
            call = turn["tool_calls"][0]["function"]
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            said = f'{{"name": "{call["name"]}", "parameters": {arguments}}}'
        yield f"<|start_header_id|>{role}<|end_header_id|>\n\n", False
        yield said + "<|eot_id|>", role == "assistant"


def gemma(turns: list[Turn]) -> Iterator[Piece]:
    yield "<bos>", False
    before = ""
    for turn in turns:
        if turn["role"] == "system":
            before = turn["content"] + "\n\n"
        elif turn["role"] == "user":
            yield f"<start_of_turn>user\n{before}{turn['content'].strip()}<end_of_turn>\n", False
            before = ""
        else:
            yield "<start_of_turn>model\n", False
            yield turn["content"].strip() + "<end_of_turn>", True
            yield "\n", False


def mistral(turns: list[Turn]) -> Iterator[Piece]:
    system = turns[0]["content"] + "\n\n" if turns[0]["role"] == "system" else ""
    yield "<s>", False
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            yield f"[INST] {system if i == len(turns) - 1 else ''}{turn['content']}[/INST]", False
        elif turn["role"] == "tool":
            said = f'{{"content": {turn["content"]}, "call_id": "{turn["tool_call_id"]}"}}'
            yield f"[TOOL_RESULTS] {said}[/TOOL_RESULTS]", False
        elif turn.get("tool_calls"):
            calls = [
                f'{json.dumps(call["function"], ensure_ascii=False)}, "id": "{call["id"]}"}}'
                for call in turn["tool_calls"]
            ]
            yield "[TOOL_CALLS] [" + ", ".join(calls) + "]</s>", True
        elif turn["role"] == "assistant":
            yield f" {turn['content'].strip()}</s>", True


def olmo(turns: list[Turn]) -> Iterator[Piece]:
    yield "<|endoftext|>", False
    for i, turn in enumerate(turns):
        yield f"<|{turn['role']}|>\n", False
        if turn["role"] == "assistant":
            yield turn["content"] + "<|endoftext|>", True
            yield "\n" if i + 1 < len(turns) else "", False
        else:
            yield turn["content"] + "\n", False


def deepseek(turns: list[Turn]) -> Iterator[Piece]:
    system = "".join(turn["content"] for turn in turns if turn["role"] == "system")
    yield "<｜begin▁of▁sentence｜>" + system, False
    for i, turn in enumerate(turns):
        after_tool = i > 0 and turns[i - 1]["role"] == "tool"
        if turn["role"] == "user":
            yield "<｜User｜>" + turn["content"], False
        elif turn["role"] == "tool":
            yield "" if after_tool else "<｜tool▁outputs▁begin｜>", False
            yield f"<｜tool▁output▁begin｜>{turn['content']}<｜tool▁output▁end｜>", False
        elif turn.get("tool_calls"):
            yield "<｜Assistant｜>", False
            calls = "".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['function']['name']}\n```json\n"
                f"{json.dumps(call['function']['arguments'], ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
                for call in turn["tool_calls"]
            )
            yield f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>", True
        elif turn["role"] == "assistant":
            yield "<｜tool▁outputs▁end｜>" if after_tool else "<｜Assistant｜>", False
            yield turn["content"].split("</think>")[-1] + "<｜end▁of▁sentence｜>", True


LAYOUTS: dict[str, Callable[[list[Turn]], Iterator[Piece]]] = {
    "qwen2": qwen2, "qwen3": qwen3, "llama3": llama3, "gemma": gemma, "mistral": mistral, "olmo": olmo,
    "deepseek": deepseek,
}  # fmt: skip

# GPT-2's table of the 256 bytes as visible characters
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_SHOWN)))
}


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token of a byte-level tokenizer."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece in tokenizer.get_added_vocab():
        return str(piece).encode()
    return bytes(_BYTE_OF[char] for char in piece)


def oracle(tokenizer: Any, tokens: np.ndarray, pieces: list[Piece]) -> list[bool]:
    """For each token, whether all of its bytes are the assistant's."""
    theirs = [assistant for text, assistant in pieces for _ in text.encode()]
    mask = []
    at = 0
    for token in tokens.tolist():
        size = len(bytes_of(tokenizer, token))
        mask.append(all(theirs[at : at + size]))
        at += size
    assert at == len(theirs)
    return mask
