"""Let the target answer the chats itself: a drafter has to guess this target, not whoever wrote the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from eyas.data.chats import Chat, Message, chat_line
from eyas.data.prompts import encode_chat
from eyas.engine import Engine
from eyas.types import Completion, Request, SamplingParams


def regenerate(engine: Engine, chats: Iterable[Chat], output: Path, params: SamplingParams) -> int:
    """Drop each chat's last assistant turn and append the engine's answer in its place, one JSON line a chat.

    Chats whose id `output` already holds are skipped, so an interrupted run goes on. Prompts that don't
    fit the target's context with `params.max_tokens` to spare are skipped too. Returns how many it wrote.
    """
    done = answered_ids(output)
    asked: dict[str, tuple[Message, ...]] = {}
    requests: list[Request] = []
    for chat in chats:
        prompt = question(chat)
        if not prompt or chat.id in done or chat.id in asked:
            continue
        ids = encode_chat(engine.tokenizer, prompt)
        if engine.target.max_length is None or len(ids) + params.max_tokens <= engine.target.max_length:
            asked[chat.id] = prompt
            requests.append(Request(ids, params, chat.id))
    output.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with output.open("a", encoding="utf-8") as out:
        for completion in _completions(engine, requests):
            answer = Message(role="assistant", content=completion.text)
            chat = Chat(id=completion.id, messages=(*asked[completion.id], answer))
            out.write(chat_line(chat))
            out.flush()
            written += 1
    return written


def question(chat: Chat) -> tuple[Message, ...]:
    """The messages before the last assistant turn; all of them if the chat ends with a question."""
    turns = chat.messages
    last = max((i for i, m in enumerate(turns) if m.role == "assistant"), default=len(turns))
    return turns if turns[-1].role == "user" else turns[:last]


def answered_ids(output: Path) -> set[str]:
    """Ids in a file being written; a half-written last line is cut off, so that appending is safe."""
    if not output.exists():
        return set()
    whole: list[str] = []
    ids: set[str] = set()
    for line in output.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            ids.add(Chat.model_validate_json(line).id)
        except ValidationError:
            break
        whole.append(line if line.endswith("\n") else line + "\n")
    output.write_text("".join(whole), encoding="utf-8")
    return ids


def _completions(engine: Engine, requests: list[Request]) -> Iterator[Completion]:
    for chunk in engine.stream(requests):
        if chunk.completion is not None:
            yield chunk.completion
