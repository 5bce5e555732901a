"""The whole way from files to a chat folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.data.chats.config import PrepareConfig
from eyas.data.chats.duplicates import question_key
from eyas.data.chats.folder import read_report, splits, write_report
from eyas.data.chats.prepare import prepare
from eyas.data.chats.sources import parse_source
from eyas.data.tokens.tokenize import tokenize_chat
from eyas.errors import DataError, LockedError, ModelError, UsageError
from eyas.files import TEMPORARY
from eyas.text.chats import Chat, exchange

from ...pairs import tokenizer, write_rows
from ..templates import templated


def talk(*words: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(words)
    return {"messages": [{"role": r, "content": w} for r, w in zip(roles, words, strict=False)], **more}


def run(tmp_path: Path, *sources: str, **options: Any) -> dict[str, Any]:
    parsed = [parse_source(source) for source in sources]
    return prepare(PrepareConfig(sources=tuple(parsed), output=tmp_path / "out", **options))


def written(tmp_path: Path) -> dict[str, list[Chat]]:
    return {name: list(chats) for name, chats in splits(tmp_path / "out").items()}


def everything(tmp_path: Path) -> list[Chat]:
    return [chat for chats in written(tmp_path).values() for chat in chats]


@pytest.fixture
def model(tmp_path: Path) -> str:
    tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    a = write_rows(tmp_path / "a.jsonl", [talk(f"question {n}", f"answer {n}", id=n) for n in range(200)])
    b = write_rows(tmp_path / "b.jsonl", [talk(f"query {n}", f"reply {n}", id=n) for n in range(100)])
    return str(a), str(b)


def test_shares_samples_and_seeds(tmp_path: Path, two: tuple[str, str]) -> None:
    a, b = two
    report = run(tmp_path, f"{a},weight=1", f"{b},weight=3", samples=80, held_out_share=0.2)
    assert [source["chats"] for source in report["sources"]] == [20, 60]
    first = everything(tmp_path)
    again = run(tmp_path / "2", f"{a},weight=1", f"{b},weight=3", samples=80, held_out_share=0.2)
    assert again["splits"] == report["splits"]
    assert everything(tmp_path / "2") == first
    run(tmp_path / "3", f"{a},weight=1", f"{b},weight=3", samples=80, held_out_share=0.2, seed=1)
    assert {chat.id for chat in everything(tmp_path / "3")} != {chat.id for chat in first}
    all_of_it = run(tmp_path / "4", a, b)
    assert [source["chats"] for source in all_of_it["sources"]] == [200, 100]
    shares = run(tmp_path / "5", f"{a},weight=1", f"{b},weight=1")
    assert [source["chats"] for source in shares["sources"]] == [101, 100]  # the last turn is a's, to within one
    short = run(tmp_path / "6", f"{a},weight=1", f"{b},weight=3", samples=400)
    assert [source["chats"] for source in short["sources"]] == [100, 100]
    assert short["notes"][:2] == [
        "only 200 of the 400 requested chats could be drawn",
        f"{Path(b).stem} gave 100 chats; its share of 400 is 300",
    ]


def test_of_few_chats_enough_are_held_out_to_choose_by(tmp_path: Path, two: tuple[str, str]) -> None:
    """2 % of 300 would be 6."""
    run(tmp_path, *two)
    assert 20 < len(written(tmp_path)["validation"]) < 45
    shares = [PrepareConfig(sources=(parse_source(two[0]),), output=tmp_path).held_out_share_of(n) for n in (9, 10**5)]
    assert shares == [0.1, 0.02]


def test_weights_that_leave_chats_out_say_so(tmp_path: Path, two: tuple[str, str]) -> None:
    a, b = two
    capped = run(tmp_path / "1", f"{a},weight=1", f"{b},weight=1")
    assert "the weights end the blend where b runs out, which leaves out chats (99 of 200 of a)" in capped["notes"][0]
    assert not run(tmp_path / "2", a, b)["notes"]
    assert not run(tmp_path / "3", f"{a},weight=1", f"{b},weight=1", samples=40)["notes"]


def test_chats_that_begin_with_the_assistant_are_counted_first(tmp_path: Path) -> None:
    greeting = [{"role": "assistant", "content": "Hello!"}]
    rows = [talk(f"question {n}", f"answer {n}") for n in range(40)]
    for row in rows[:3]:
        row["messages"] = greeting + row["messages"]
    rows[3]["messages"] = [{"role": "system", "content": "Be kind."}, *greeting, *rows[3]["messages"]]
    report = run(tmp_path, str(write_rows(tmp_path / "a.jsonl", rows)), held_out_share=0.2)
    assert report["notes"][0].startswith("4 of 40 chats begin with the assistant")


def test_the_order_of_rows_does_not_matter_to_the_sample(tmp_path: Path) -> None:
    rows = [talk(f"question {n}", "yes", id=n) for n in range(50)]
    run(tmp_path / "1", str(write_rows(tmp_path / "a.jsonl", rows)), samples=10)
    run(tmp_path / "2", str(write_rows(tmp_path / "a.jsonl", rows[::-1])), samples=10)
    assert everything(tmp_path / "1") == everything(tmp_path / "2")


def test_the_same_question_stays_on_one_side_whatever_the_source(tmp_path: Path) -> None:
    a = write_rows(tmp_path / "a.jsonl", [talk(f"Question {n}?", "x") for n in range(60)])
    b = write_rows(tmp_path / "b.jsonl", [talk(f" QUESTION  {n}?", "y", "more", "z") for n in range(60)])
    run(tmp_path, str(a), str(b), held_out_share=0.3)
    sides = written(tmp_path)
    keys = {name: {question_key(chat) for chat in chats} for name, chats in sides.items()}
    assert len(everything(tmp_path)) == 120
    assert not keys["train"] & keys["validation"]
    assert 20 <= len(sides["validation"]) <= 60
    before = {chat.id for chat in sides["validation"]}
    write_rows(tmp_path / "a.jsonl", [talk(f"Question {n}?", "x") for n in range(90)])
    run(tmp_path / "grown", str(a), str(b), held_out_share=0.3)
    assert before <= {chat.id for chat in written(tmp_path / "grown")["validation"]}


def test_what_is_dropped_is_counted_with_lines(tmp_path: Path) -> None:
    rows: list[Any] = [
        talk("q1", "a1"), "{", talk("q1", "a1"), talk("Q1 ", "other"), talk("q2", " "), talk(" ", "a"),
        {"messages": [{"role": "robot", "content": "x"}]}, {"messages": [{"role": "assistant", "content": "x"}]},
        talk("q3"), talk("q4", "a4", "q5"), talk("asked", "a"), {"text": "x"},
    ]  # fmt: skip
    file = write_rows(tmp_path / "a.jsonl", rows)
    excluded = write_rows(tmp_path / "eval.jsonl", [{"turns": ["Asked"]}])
    report = run(tmp_path, str(file), exclude=(excluded,))
    dropped = report["sources"][0]["dropped"]
    assert {reason: entry["count"] for reason, entry in dropped.items()} == {
        "not JSON": 1, "exact duplicate": 1, "same prompt as another chat": 1, "empty answer": 1, "empty question": 1,
        "unknown role": 1, "no question": 1, "question of an evaluation file": 1, "unknown layout": 1,
    }  # fmt: skip
    assert dropped["not JSON"]["first"][0].startswith(f"{file}:2: ")
    assert (report["sources"][0]["rows"], report["sources"][0]["chats"]) == (12, 3)
    assert sum(split["unanswered"] for split in report["splits"].values()) == 2
    dropping = run(tmp_path / "2", str(file), exclude=(excluded,), drop_unanswered=True)
    assert dropping["sources"][0]["dropped"]["the last turn is not the assistant's"]["count"] == 2
    assert dropping["sources"][0]["chats"] == 1


def test_rows_that_share_an_id_get_ids_of_their_own(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [talk("q", "a", id="x"), talk("r", "b", id="x")])
    run(tmp_path, str(file))
    ids = sorted(chat.id for chat in everything(tmp_path))
    assert ids[0] == "a:x"
    assert len(ids[1]) == len("a:x:") + 8


def test_a_target_s_rendering(tmp_path: Path, model: str, two: tuple[str, str]) -> None:
    file = write_rows(
        tmp_path / "c.jsonl", [talk("only a question"), talk("hi", "a " * 60), talk("q", "a", "r", "b " * 60)]
    )
    report = run(tmp_path, two[0], str(file), model=model, held_out_share=0.1, max_length=60, too_long="cut")
    chats = everything(tmp_path)
    for chat in chats:
        if chat.messages[-1].role != "assistant":
            assert chat.tokens is None
            continue
        row = tokenize_chat(tokenizer(), chat.model_copy(update={"tokens": None, "answers": None}))
        assert tuple(row.tokens.tolist()) == chat.tokens
        assert tokenize_chat(None, chat).loss_mask.tolist() == row.loss_mask.tolist()
        assert len(chat.tokens or ()) <= 60
    assert report["sources"][1]["cut"] == 1
    assert report["sources"][1]["dropped"]["too long"]["count"] == 1
    total = sum(stop - start for chat in chats for start, stop in chat.answers or ())
    assert sum(split["answer_tokens"] for split in report["splits"].values()) == total
    train = report["splits"]["train"]
    assert train["answer_share"] == round(train["answer_tokens"] / train["length"]["total"], 4)
    used = {t for chat in written(tmp_path)["train"] for s, e in chat.answers or () for t in (chat.tokens or ())[s:e]}
    assert train["distinct_answer_tokens"] == len(used)
    counts = [sum(e - s for s, e in chat.answers or ()) for chat in chats if chat.id.startswith("a:")]
    few = run(tmp_path / "2", two[0], model=model, min_answer_tokens=min(counts) + 1)
    assert few["sources"][0]["dropped"]["too few answer tokens"]["count"] == counts.count(min(counts))


def test_a_model_s_generation_config_counts(model: str) -> None:
    from eyas.data.chats.prepare import ChatFitter

    before = ChatFitter(model, None, False, 0).identity
    (Path(model) / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    assert ChatFitter(model, None, False, 0).identity != before


def test_the_generation_config_is_read_once_from_where_the_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is not asked for a target that is a folder."""
    from transformers import GenerationConfig

    from eyas.data.chats.prepare import ChatFitter

    from ...toy.pair import TOY_TARGET

    names: list[str] = []
    read = GenerationConfig.from_pretrained
    monkeypatch.setattr(GenerationConfig, "from_pretrained", lambda name: names.append(name) or read(name))
    ChatFitter(TOY_TARGET, None, False, 0)
    assert names == [str(TOY_TARGET)]


def test_tokens_that_a_chat_carries_are_kept_if_they_are_this_target_s(tmp_path: Path, model: str) -> None:
    chat = exchange("a", "What is 48/2?", "24 clips")
    row = tokenize_chat(tokenizer(), chat)
    first = int(row.loss_mask.argmax())
    own = chat.model_copy(update={"tokens": (9, *row.tokens.tolist()), "answers": ((first + 1, len(row.tokens) + 1),)})
    other = exchange("b", "What?", "a hawk").model_copy(update={"tokens": own.tokens, "answers": own.answers})
    high = exchange("c", "Who?", "24 clips").model_copy(update={"tokens": (10**6,), "answers": ((0, 1),)})
    file = write_rows(tmp_path / "a.jsonl", [chat.model_dump(mode="json") for chat in (own, other, high)])
    report = run(tmp_path, str(file), model=model)
    assert [chat.tokens for chat in everything(tmp_path)] == [own.tokens]
    assert report["sources"][0]["dropped"]["tokens of another target"]["count"] == 2


def test_a_finished_folder_is_left_as_it_is_and_another_refused(tmp_path: Path, two: tuple[str, str]) -> None:
    report = run(tmp_path, two[0])
    stamp = (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns
    assert run(tmp_path, two[0]) == report
    assert (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns == stamp
    with pytest.raises(UsageError, match=r"other settings or data \(seed\)"):
        run(tmp_path, two[0], seed=1)
    write_rows(Path(two[0]), [talk("new", "data")])
    with pytest.raises(UsageError, match=r"other settings or data \(data\)"):
        run(tmp_path, two[0])
    (tmp_path / "2" / "out").mkdir(parents=True)
    (tmp_path / "2" / "out" / "precious").touch()
    with pytest.raises(UsageError, match="is not a chat folder"):
        run(tmp_path / "2", two[0])
    (tmp_path / "2" / "out" / "precious").unlink()
    run(tmp_path / "2", two[0])  # an empty folder is no obstacle


def test_nothing_usable_is_an_error(tmp_path: Path, model: str) -> None:
    file = write_rows(tmp_path / "a.jsonl", ["{", talk("q", " ")])
    with pytest.raises(DataError, match=r"no chat can be used: a: 1 x not JSON \(.*a\.jsonl:1"):
        run(tmp_path, str(file))
    write_rows(file, [talk("q", "a")])
    with pytest.raises(DataError, match="1 x too long"):
        run(tmp_path, str(file), model=model, max_length=2)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(TEMPORARY)] == []


def test_a_template_that_cannot_be_marked_stops_the_run(tmp_path: Path, model: str, two: tuple[str, str]) -> None:
    (Path(model) / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content | urlencode }}{% endfor %}")
    with pytest.raises(ModelError, match=r"put \{% generation %\}"):
        run(tmp_path, two[0], model=model)


def test_options_that_make_no_sense(tmp_path: Path, two: tuple[str, str]) -> None:
    for options, words in (
        ({"max_length": 5}, "give `model=`"),
        ({"too_long": "cut"}, "needs a maximum length"),
        ({"samples": 0}, "greater than or equal to 1"),
    ):
        with pytest.raises(ValueError, match=words):
            run(tmp_path, two[0], **options)
    with pytest.raises(ValueError, match="two sources are named a"):
        run(tmp_path, two[0], two[0])


def test_a_full_disk_leaves_nothing(tmp_path: Path, two: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"can't write .*out: No space left on device"):
        run(tmp_path, two[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_two_runs_never_share_an_output(tmp_path: Path, two: tuple[str, str]) -> None:
    begun: list[str] = []

    def meanwhile(stage: str, *_: object) -> None:
        if not begun:
            begun.append(stage)
            with pytest.raises(LockedError, match=r"another process is writing .*out: wait for it, or choose another"):
                run(tmp_path, two[1])

    prepare(PrepareConfig(sources=(parse_source(two[0]),), output=tmp_path / "out"), meanwhile)
    assert begun
    assert len(everything(tmp_path)) == 200


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eyas", "data", "prepare", "stdlib", "--output", str(tmp_path / "out")]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    spool = tmp_path / ".out.tmp" / "out" / "spool.jsonl"
    deadline = time.monotonic() + 60
    while not (spool.exists() and spool.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert spool.exists()
    assert not (tmp_path / "out").exists()
    file = write_rows(tmp_path / "a.jsonl", [talk("q", "a")])
    run(tmp_path, str(file))
    assert [chat.id[:2] for chat in everything(tmp_path)] == ["a:"]
    assert not spool.parent.parent.exists()


def test_a_folder_without_its_report_is_not_read(tmp_path: Path, two: tuple[str, str]) -> None:
    run(tmp_path, two[0])
    report = read_report(tmp_path / "out")
    (tmp_path / "out" / "report.json").unlink()
    with pytest.raises(DataError, match="interrupted"):
        splits(tmp_path / "out")
    write_report(tmp_path / "out", report)
    assert len(list(splits(tmp_path / "out")["train"])) > 100
    (tmp_path / "out" / "validation.jsonl").unlink()
    with pytest.raises(DataError, match=r"no validation\.jsonl"):
        splits(tmp_path / "out")
    with pytest.raises(DataError, match=r"there is no .*: give a chat folder"):
        splits(tmp_path / "gone")


def test_a_single_file_is_split_by_id(tmp_path: Path) -> None:
    from eyas.text.chats import write_chats

    write_chats(tmp_path / "c.jsonl", [exchange(str(n), f"q{n}", "a") for n in range(200)])
    found = {name: [chat.id for chat in chats] for name, chats in splits(tmp_path / "c.jsonl", 0.2).items()}
    assert len(found["train"]) + len(found["validation"]) == 200
    assert not set(found["train"]) & set(found["validation"])
    assert 20 < len(found["validation"]) < 60


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (None, "4 of 4 chats begin with the assistant: because nothing was asked before"),
        ("gemma", "4 of 4 chats began with the assistant, which the target's chat template refuses"),
    ],
)
def test_chats_that_begin_with_the_assistant_are_kept(
    tmp_path: Path, model: str, template: str | None, note: str
) -> None:
    if template is not None:
        templated(template).save_pretrained(model)
    turns = [("gpt", "Welcome!"), ("human", "What is a kestrel?"), ("gpt", "A small falcon.")]
    rows = [{"conversations": [{"from": who, "value": f"{n} {what}"} for who, what in turns]} for n in range(4)]
    report = run(tmp_path, str(write_rows(tmp_path / "a.jsonl", rows)), model=model, max_length=300, too_long="cut")
    assert report["notes"][0].startswith(note)
    assert sum(split["answers"] for split in report["splits"].values()) == 4
    for chat in everything(tmp_path):
        assert len(chat.answers or ()) == 1
        assert len(chat.messages) == (3 if template is None else 2)


def test_a_folder_of_splits_says_which_was_read(tmp_path: Path) -> None:
    for name in ("train-0", "test-0"):
        (tmp_path / "set" / "data").mkdir(parents=True, exist_ok=True)
        write_rows(tmp_path / "set" / "data" / f"{name}.jsonl", [talk(f"{name} {n}", "yes") for n in range(5)])
    report = run(tmp_path / "1", str(tmp_path / "set"))
    (note,) = (note for note in report["notes"] if "left out" in note)
    assert "only the split train was read; left out: 1 files of the split test, such as" in note
    assert all("train-0" in chat.messages[0].content for chat in everything(tmp_path / "1"))
