"""Files, folders, data sets and the library, read as chats; what can't be read is a row with a reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from eyas.data.chats.sources import ChatSource, chats_of_source, parse_source
from eyas.errors import ConfigError, DataError, RowError
from eyas.text.chats import Chat, chat_line, exchange

from ...pairs import write_rows

ROW = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}


def read(location: Any, **options: Any) -> list[Chat | RowError]:
    text = ",".join([str(location), *(f"{key}={value}" for key, value in options.items())])
    return [found.chat for found in chats_of_source(parse_source(text))]


def ids(chats: list[Chat | RowError]) -> list[str]:
    return [chat.reason if isinstance(chat, RowError) else chat.id for chat in chats]


def test_ids_are_the_rows_own_or_of_what_they_say(tmp_path: Path) -> None:
    rows = [ROW | {"id": 7}, ROW | {"question_id": "x"}, ROW, {"instruction": "Q", "output": "A"}, ROW | {"id": ""}]
    found = ids(read(write_rows(tmp_path / "my data.jsonl", rows)))
    assert found[:2] == ["my-data:7", "my-data:x"]
    assert len(found[2].removeprefix("my-data:")) == 16
    assert found[2] == found[3] == found[4]  # whatever the layout
    assert ids(read(tmp_path / "my data.jsonl", name="other"))[0] == "other:7"


def test_broken_rows_are_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    good = json.dumps(ROW).encode()
    lone = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode()
    file.write_bytes(b"\xef\xbb\xbf" + good + b"\n\n{\n" + good.replace(b"Q", b"\xff") + b"\n" + lone + b"\n" + good)
    found = list(chats_of_source(parse_source(str(file))))
    reasons = [f.chat.reason for f in found if isinstance(f.chat, RowError)]
    assert reasons == ["not JSON", "broken UTF-8", "broken UTF-8"]
    assert [f.where for f in found] == [f"{file}:{n}" for n in (1, 3, 4, 5, 6)]


def test_json_arrays_parquet_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([ROW | {"id": n} for n in range(3)]))
    (tmp_path / "deep").mkdir()
    table = pa.Table.from_pylist([ROW | {"id": n, "tools": None} for n in range(300)])
    parquet.write_table(table, tmp_path / "deep" / "b.parquet")
    (tmp_path / "deep" / "c.parquet").write_bytes(b"PAR1 and then nothing")
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("not data")
    found = ids(read(tmp_path, name="all"))
    assert found == [*(f"all:{n}" for n in range(3)), *(f"all:{n}" for n in range(300)), "unreadable file"]
    (tmp_path / "a.json").write_text("[{")
    assert ids(read(tmp_path / "a.json")) == ["unreadable file"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no files with a known suffix"):
        read(tmp_path / "empty")


def test_a_chat_file_keeps_its_tokens(tmp_path: Path) -> None:
    chat = exchange("a", "Q", "A").model_copy(update={"tokens": (1, 2, 3), "answers": ((1, 3),)})
    file = write_rows(tmp_path / "c.jsonl", [chat_line(chat).strip(), ROW | {"tokens": [1], "answers": [[0, 4]]}])
    kept, bad = read(file)
    assert isinstance(kept, Chat)
    assert (kept.id, kept.tokens, kept.answers) == ("c:a", (1, 2, 3), ((1, 3),))
    assert isinstance(bad, RowError)
    assert bad.reason == "bad tokens or answers"


def test_the_library_is_a_source() -> None:
    stdlib = chats_of_source(parse_source("stdlib,weight=0.5"))
    first = next(iter(stdlib)).chat
    assert isinstance(first, Chat)
    assert first.id.startswith("stdlib:stdlib-")


def test_data_sets_are_read_through_datasets(tmp_path: Path) -> None:
    import datasets

    rows = [ROW | {"id": n} for n in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert ids(read(tmp_path / "saved")) == [f"saved:{n}" for n in range(3)]
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows[:2]), "rest": datasets.Dataset.from_list(rows[2:])}
    )
    both.save_to_disk(tmp_path / "both")
    assert ids(read(tmp_path / "both", split="rest")) == ["both:2"]
    with pytest.raises(DataError, match=r"can't read the data set .*both \(split dev\)"):
        read(tmp_path / "both", split="dev")
    (tmp_path / "named").mkdir()
    write_rows(tmp_path / "named" / "train.jsonl", rows)
    assert ids(read(f"hf:{tmp_path / 'named'}", split="train")) == [f"named:{n}" for n in range(3)]
    with pytest.raises(DataError, match="can't read the data set nobody/nothing"):
        read("nobody/nothing")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'eyas\[data\]'"):
        read("some/name")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'eyas\[data\]'"):
        read(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stdlib,heavy", "'heavy' is not key=value"),
        ("stdlib,weight=0", "weight: Input should be greater than 0"),
        ("stdlib,weight=inf", "weight"),
        ("stdlib,color=red", "color: there is no such key"),
        ("stdlib,layout=letters", "use one of openai, sharegpt, alpaca"),
        ("stdlib,split=test", "split is for folders and data sets given by name"),
        ("./gone", "no file or folder ./gone"),
        ("gone.jsonl", "no file or folder gone.jsonl"),
        ("stdlib,name=a:b", "name"),
    ],
)
def test_sources_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^source") as caught:
        parse_source(text)
    assert words in str(caught.value)


def test_a_source_is_strict() -> None:
    assert parse_source("some/name,weight=2,split=test,subset=main") == ChatSource(
        place="some/name", weight=2, split="test", subset="main", name="name"
    )


@pytest.mark.parametrize(
    ("files", "split", "read_files"),
    [
        ("data/train-0-of-2 data/train-1-of-2 data/test-0-of-2", None, "data/train-0-of-2 data/train-1-of-2"),
        ("data/train-0 data/test-0", "test", "data/test-0"),
        ("train_sft test_sft train_gen", None, "train_gen train_sft"),
        ("train validation", "train+validation", "train validation"),
        ("train/part_0 Test/part_0 dev/part_0", None, "train/part_0"),
        ("chats eval", None, "chats"),
        ("chats train", None, "train"),
        ("a contest/b latest/training_test", None, "latest/training_test"),  # the first word of the name decides
        ("a b/contest", None, "a b/contest"),  # no words of splits
        ("chats", "test", "has no files of the split test, but of none"),
        ("test", None, "has no files of the split train, but of test: add ,split=..."),
    ],
)
def test_one_split_of_a_folder_is_read(tmp_path: Path, files: str, split: str | None, read_files: str) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / f"{name}.jsonl", [ROW | {"id": name}])
    options = {} if split is None else {"split": split}
    if "has no files" in read_files:
        with pytest.raises(DataError, match=read_files):
            read(tmp_path, name="set", **options)
        return
    assert ids(read(tmp_path, name="set", **options)) == [f"set:{name}" for name in read_files.split()]


def test_text_in_another_encoding_is_a_file_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW), encoding="utf-16")
    (error,) = read(tmp_path / "a.jsonl")
    assert "is UTF-16 text: save it as UTF-8" in str(error)
