"""The demo target's corpus: what is trained on, and what is held out."""

from __future__ import annotations

from pathlib import Path

from eyas.data.chats.stdlib import chats_of, library_modules
from eyas.text.chats import exchange, held_out, write_chats
from eyas.train.lm.lm import split_chats

FUNCTION = '''def double_{0}(number):
    """Return twice the number that is given, as a number of the same type as it."""
    total = number + number
    return total
'''


def test_chats_are_split_by_id_and_the_library_by_module(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    write_chats(file, [exchange(f"m{i}", f"What is {i} + 1?", str(i + 1)) for i in range(200)])
    for i in range(40):
        functions = "".join(FUNCTION.format(f"{i}_{j}") for j in range(3))
        (tmp_path / f"module_{i}.py").write_text(functions, encoding="utf-8")
    modules = list(library_modules(tmp_path))
    splits = split_chats(file, 0.2, modules)

    train, unseen = (splits["chats"].train, splits["chats"].held_out)
    assert len(train) + len(unseen) == 200
    assert 15 < len(unseen) < 70
    assert all(held_out(chat.id, 0.2) for chat in unseen)
    assert not any(held_out(chat.id, 0.2) for chat in train)

    homes = {chat.id: module.name for module in modules for chat in chats_of(module)}
    assert len(homes) > 100
    kept = {homes[chat.id] for chat in splits["library"].train}
    left_out = {homes[chat.id] for chat in splits["library"].held_out}
    assert left_out  # whole modules, each on one side only
    assert not kept & left_out
    assert len(kept | left_out) == 40
