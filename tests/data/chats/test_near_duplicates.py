"""Questions that are nearly the same: which pairs are found, and that the order of rows doesn't matter."""

from __future__ import annotations

import builtins
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.chats.config import PrepareConfig
from eyas.data.chats.duplicates import NearDuplicates, shingles, similarity
from eyas.data.chats.folder import splits
from eyas.data.chats.prepare import prepare
from eyas.data.chats.sources import parse_source
from eyas.errors import RowError, UsageError
from eyas.text.chats import Chat, Message, exchange

from ...pairs import write_rows

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=6)) for _ in range(count)]


def changed(text: Sequence[str], *where: int) -> str:
    return " ".join("changed" + str(i) if i in where else word for i, word in enumerate(text))


def family(seed: int) -> list[str]:
    """Five questions of 150 words, any two of them at least 0.86 similar."""
    text = words(150, seed)
    return [" ".join(text), *(changed(text, 20 * i + 10) for i in range(4))]


class Seen:
    """Chats in the order in which they are checked; their offsets are their numbers."""

    def __init__(self, threshold: float = 0.8, evaluated: Sequence[str] = ()) -> None:
        self.chats: list[Chat] = []
        self._near = NearDuplicates(threshold, self.chats.__getitem__, evaluated)

    def reason(self, chat: Chat | str) -> str | None:
        """Why a chat is dropped, or None."""
        self.chats.append(chat if isinstance(chat, Chat) else exchange(f"c{len(self.chats)}", chat, "answer"))
        try:
            self._near.check(self.chats[-1], len(self.chats) - 1)
        except RowError as error:
            return str(error)
        return None


def test_shingles_are_five_words_in_a_row() -> None:
    assert shingles("One two THREE\nfour, five") == {"one two three four ,", "two three four , five"}
    assert shingles("short") == {"short"}
    assert shingles("What is 3 + 4 ?") != shingles("What is 3 - 4 ?")
    assert len(shingles("今日はいい天気")) == 3  # a character is a word where there are no spaces
    assert similarity({"a", "b", "c"}, {"b", "c", "d"}) == 0.5


def test_the_threshold_is_exact() -> None:
    """What is dropped is as similar as it must be: candidates are compared shingle by shingle."""
    text = words(150, seed=1)
    # 131 of 161 shingles in common
    base = " ".join(text)
    other = changed(text, 20, 60, 100)
    exact = similarity(shingles(base), shingles(other))
    assert 0.81 < exact < 0.82
    for threshold, dropped in ((exact, True), (exact + 1e-9, False)):
        seen = Seen(threshold)
        assert seen.reason(base) is None
        assert (seen.reason(other) is not None) == dropped
    assert Seen(1.0).reason(base) is None


def test_case_space_and_form_make_no_difference() -> None:
    seen = Seen(1.0)
    assert seen.reason("The quick Brown fox jumps over the ﬁne fence") is None
    message = "near-duplicate of another chat: c1 is similar to c0"
    assert seen.reason("the  quick brown FOX jumps over\nthe fine fence") == message


def test_only_chats_with_the_same_system_prompt_and_tools_are_compared() -> None:
    seen = Seen()
    text = family(2)[0]
    two = exchange("x", text, "answer")
    assert seen.reason(two) is None
    for role in ("system", "developer"):
        system = Message(role=role, content="Be brief.")
        assert seen.reason(two.model_copy(update={"messages": (system, *two.messages)})) is None
    tools = two.model_copy(update={"tools": ({"type": "function", "function": {"name": "f"}},)})
    assert seen.reason(tools) is None
    assert seen.reason(tools) is not None


def test_all_that_the_user_says_before_the_last_answer_counts() -> None:
    seen, (first, near, *_), other = Seen(), family(3), family(4)[0]
    greeting = exchange("x", "Hello, can you help me with something?", "Yes.").messages
    assert seen.reason(Chat(id="a", messages=greeting + exchange("x", first, "a").messages)) is None
    assert seen.reason(Chat(id="b", messages=greeting + exchange("x", other, "a").messages)) is None
    assert seen.reason(Chat(id="c", messages=greeting + exchange("x", near, "b").messages)) is not None


def test_nearly_the_question_of_an_evaluation() -> None:
    evaluated = family(5)
    seen = Seen(evaluated=evaluated[:1])
    message = "nearly a question of an evaluation file"
    assert (seen.reason(evaluated[1]) or "").startswith(message)
    later = exchange("x", "Hi", "Hello").messages + exchange("x", evaluated[2], "a").messages
    assert (seen.reason(Chat(id="later", messages=later)) or "").startswith(message)
    assert seen.reason(family(6)[0]) is None


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.9])
def test_most_pairs_at_the_threshold_are_found(threshold: float) -> None:
    """120 pairs just above the threshold; the promise is nine in ten."""
    found = pairs = 0
    draw = random.Random(int(threshold * 10))
    for seed in range(120):
        text = words(120, seed)
        order = draw.sample(range(120), 120)
        near = text
        for count in range(120):
            worse = changed(text, *order[:count])
            if similarity(shingles(" ".join(text)), shingles(worse)) < threshold:
                break
            near = worse.split()
        seen = Seen(threshold)
        seen.reason(" ".join(text))
        pairs += 1
        found += seen.reason(" ".join(near)) is not None
    assert found >= 0.9 * pairs - 6  # two standard deviations of that many draws


@given(st.lists(st.sampled_from(range(8)), min_size=1, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_one_of_each_group_stays_whatever_the_order(seeds: list[int], draw: random.Random) -> None:
    """Groups whose members are all alike and unlike those of other groups; closer than that the order may matter."""
    members = {text: seed for seed in seeds for text in family(seed)}
    order = list(members)
    draw.shuffle(order)
    seen = Seen()
    kept = [text for text in order if seen.reason(text) is None]
    assert sorted(members[text] for text in kept) == sorted(seeds)


def test_boilerplate_costs_no_quadratic_work() -> None:
    """Hundreds of questions that share most of their words are compared with a few others each."""
    common = words(100, 7)
    reads = []

    class Counted(list[Chat]):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    chats = Counted()
    near = NearDuplicates(0.8, chats.__getitem__)
    for number in range(300):
        chats.append(exchange(str(number), " ".join([*common, *words(40, 1000 + number)]), "a"))
        near.check(chats[-1], number)
    assert len(reads) < 300 * 40


def talk(question: str, number: int) -> dict[str, Any]:
    return {"id": number, "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]}


def run(tmp_path: Path, file: Path, **options: Any) -> dict[str, Any]:
    source = parse_source(str(file))
    return prepare(PrepareConfig(sources=(source,), output=tmp_path / "out", held_out_share=0.2, **options))


def kept(folder: Path) -> set[str]:
    return {chat.id for chats in splits(folder / "out").values() for chat in chats}


def test_prepare_drops_and_counts_them(tmp_path: Path) -> None:
    texts = [text for seed in range(12) for text in family(seed)]
    rows = [talk(text, i) for i, text in enumerate(texts)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    evaluation = write_rows(tmp_path / "eval.jsonl", [{"prompt": changed(words(150, 3), 5)}])
    report = run(tmp_path / "1", file, exclude=(evaluation,))
    source = report["sources"][0]
    assert source["chats"] == 11
    assert source["dropped"]["near-duplicate of another chat"]["count"] == 44
    first = source["dropped"]["near-duplicate of another chat"]["first"][0]
    assert first.startswith(f"{file}:")
    assert " is similar to a:" in first
    assert source["dropped"]["nearly a question of an evaluation file"]["count"] == 5
    assert report["settings"]["near_duplicates"] == 0.8
    assert source["not_needed"] == 0
    write_rows(tmp_path / "a.jsonl", random.Random(1).sample(rows, len(rows)))
    run(tmp_path / "2", file, exclude=(evaluation,))
    assert kept(tmp_path / "1") == kept(tmp_path / "2")
    everything = run(tmp_path / "3", file, near_duplicates=None)
    assert everything["sources"][0]["chats"] == 60
    assert everything["settings"]["near_duplicates"] is None
    few = run(tmp_path / "4", file, samples=7)
    assert few["sources"][0]["chats"] == 7


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_rows(tmp_path / "a.jsonl", [talk(text, i) for i, text in enumerate(family(1))])
    imported = builtins.__import__

    def missing(name: str, *more: Any, **options: Any) -> Any:
        if name.split(".")[0] == "datasketch":
            raise ImportError(name)
        return imported(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setattr("eyas.data.chats.config.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'eyas\[data\]', or use `near_duplicates=off`"):
        run(tmp_path / "1", file, near_duplicates=0.8)
    assert not (tmp_path / "1" / "out").exists()
    report = run(tmp_path / "2", file)
    assert report["sources"][0]["chats"] == 5
    assert report["settings"]["near_duplicates"] is None
    note = "near-duplicates were not searched for: that needs datasketch (pip install 'eyas[data]')"
    assert note in report["notes"]
    assert note not in run(tmp_path / "3", file, near_duplicates=None)["notes"]


def test_thresholds_are_checked(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [talk("q", 1)])
    for threshold in (0.0, 0.05, 1.5, "often"):
        with pytest.raises(ValueError, match="near_duplicates"):
            run(tmp_path, file, near_duplicates=threshold)
