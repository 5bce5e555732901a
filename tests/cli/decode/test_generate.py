"""`eyas generate`: every kind of row, every way to draft, one output."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from transformers import AutoModelForCausalLM

from eyas.text.chats import Message
from eyas.text.fill import encode_fill, fill_format
from eyas.text.template import encode_chat, encode_text

from ... import tiny
from ...pairs import Pair, save_target, tokenizer, write_rows
from ...text.test_fill import knowing
from ...tiny import continuation

Run = Callable[..., Result]

STATS = [
    "tokens",
    "target_passes",
    "accept_length",
    "acceptance_rate",
    "accepted_by_position",
    "accepted_histogram",
    "accept_length_by_context",
    "rounds_by_context",
    "prefill_seconds",
    "decode_seconds",
    "draft_seconds",
    "tokens_per_second",
]
ROWS: list[dict[str, Any]] = [
    {"id": "raw", "prompt": "def add(a, b):", "raw": True},
    {"id": "chat", "messages": [{"role": "system", "content": "Sell clips."}, {"role": "user", "content": "In May?"}]},
    {"question_id": 7, "turns": ["Natalia", "and then?"], "category": "two turns"},
    {"token_ids": [40, 41, 42, 43]},
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


def objects(result: Result) -> list[Any]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def tokens(result: Result) -> list[Any]:
    """The ids of every row, turn by turn."""
    return [[turn["token_ids"] for turn in row.get("turns", [row])] for row in objects(result)]


def expected(pair: Pair, prompt: tuple[int, ...], chat: bool = False) -> list[int]:
    """What transformers itself writes; in a chat it ends where the template ends turns."""
    model = AutoModelForCausalLM.from_pretrained(pair.model).eval()
    return continuation(model, prompt, 8, eos_token_id=tokenizer().eos_token_id if chat else None)


def user(text: str) -> tuple[int, ...]:
    return encode_chat(tokenizer(), [Message(role="user", content=text)])


def test_one_prompt_is_one_object_with_exactly_these_keys(decode: Run, pair: Pair) -> None:
    (row,) = objects(decode("--prompt", "How many?", "--json"))
    assert list(row) == ["id", "token_ids", "text", "finish_reason", "stats"]
    assert list(row["stats"]) == STATS
    assert row["token_ids"] == expected(pair, user("How many?"), chat=True)
    assert row["text"] == tokenizer().decode(row["token_ids"], skip_special_tokens=True)
    assert row["finish_reason"] in ("length", "stop")
    assert row["stats"]["tokens"] == len(row["token_ids"]) == 8
    assert sum(row["stats"]["accepted_histogram"]) == row["stats"]["target_passes"] <= 8


def test_raw_skips_the_chat_template(decode: Run, pair: Pair) -> None:
    (raw,) = objects(decode("--prompt", "How many?", "--raw", "--json"))
    assert raw["token_ids"] == expected(pair, encode_text(tokenizer(), "How many?"))
    (chat,) = objects(decode("--prompt", "How many?", "--json"))
    assert raw["token_ids"] != chat["token_ids"]


def test_a_gap_is_filled_by_a_model_that_has_marks_for_it(run: Run, decode: Run, tmp_path: Path) -> None:
    refused = decode("--prompt", "def add", "--suffix", "return a")
    assert refused.exit_code == 2
    assert "no tokens that mark" in refused.stderr
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    made = knowing(*marks)
    model = tmp_path / "filler"
    tiny.build_model("llama", vocab_size=len(made)).save_pretrained(model)
    made.save_pretrained(model)
    (filled,) = objects(
        run("generate", str(model), "--prompt", "P", "--suffix", "S", "--json", "--max-new-tokens", "4")
    )
    prompt = encode_fill(made, fill_format(made), "P", "S")
    assert filled["token_ids"] == continuation(AutoModelForCausalLM.from_pretrained(model).eval(), prompt, 4)
    assert run("generate", str(model), "--prompt-file", "x.jsonl", "--suffix", "S").exit_code == 2


def test_a_prediction_is_copied_and_changes_nothing(run: Run, pair: Pair, tmp_path: Path) -> None:
    arguments = ("generate", pair.model, "--json", "--max-new-tokens", 24, "--ignore-eos")
    (plain,) = objects(run(*arguments, "--prompt", "How many?"))
    old = tmp_path / "old.txt"
    old.write_text("Natalia sold clips to 48 of her friends in April.", encoding="utf-8")
    (option,) = objects(run(*arguments, "--prompt", "How many?", "--prediction", old))
    (row,) = objects(
        run(
            *arguments,
            "--prompt-file",
            write_rows(tmp_path / "rows.jsonl", [{"prompt": "How many?", "prediction": "a"}]),
        )
    )
    assert plain["token_ids"] == option["token_ids"] == row["token_ids"]
    for wrong, why in (
        (("--prediction", old, "--prompt-file", tmp_path / "rows.jsonl"), "rows of a --prompt-file have `prediction`"),
        (("--method", "prediction", "--prompt", "How many?"), "give --prediction FILE"),
    ):
        refused = run(*arguments, *wrong)
        assert refused.exit_code == 2
        assert why in refused.stderr


def test_a_prompt_is_the_same_in_a_file_and_on_the_command_line(decode: Run, pair: Pair, tmp_path: Path) -> None:
    """As a chat, and raw, by the row or for the whole file."""
    chats = write_rows(tmp_path / "chats.jsonl", [{"prompt": "How many?"}, {"prompt": "How many?", "raw": True}])
    chat, raw = objects(decode("--prompt-file", chats, "--json"))
    assert chat["token_ids"] == expected(pair, user("How many?"), chat=True)
    assert raw["token_ids"] == expected(pair, encode_text(tokenizer(), "How many?"))
    both = objects(decode("--prompt-file", chats, "--raw", "--json"))
    assert [row["token_ids"] for row in both] == [raw["token_ids"]] * 2


def test_raw_text_that_is_answered_with_nothing_is_warned_of(run: Run, tmp_path: Path) -> None:
    """A head of zeros emits token 0, which is a special one and has no text."""
    save_target(tmp_path / "mute")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mute")
    model.lm_head.weight.data.zero_()
    model.save_pretrained(tmp_path / "mute")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "How many?", "raw": True}, {"prompt": "How many?"}])
    few = ("--method", "none", "--max-new-tokens", 2)
    mixed = run("generate", tmp_path / "mute", "--prompt-file", rows, *few)
    assert "warning: 1 of 2 answers are empty: their prompts are raw text" in mixed.stderr
    assert "answers are empty" not in run("generate", tmp_path / "mute", "--prompt", "How many?", *few).stderr


def test_a_model_without_tokenizer_answers_ids_and_says_what_text_needs(run: Run, tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path / "model")
    ids = write_rows(tmp_path / "ids.jsonl", [{"token_ids": [40, 41, 42, 43]}])
    model = ("generate", tmp_path / "model", "--method", "none", "--max-new-tokens", 8)
    (row,) = objects(run(*model, "--prompt-file", ids, "--json"))
    assert (row["token_ids"], row["text"]) == (continuation(tiny.build_model("llama"), (40, 41, 42, 43), 8), "")
    for arguments in (("--prompt-file", ids), ("--prompt", "x", "--json"), ("--prompt", "x", "--raw", "--json")):
        result = run(*model, *arguments)
        assert result.exit_code == 2
        assert "has no tokenizer files (tokenizer.json, tokenizer_config.json)" in result.stderr
    assert "has no tokenizer files" in run("chat", tmp_path / "model", "--method", "none").stderr


def test_another_chat_template(decode: Run, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "shout.jinja"
    file.write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    (row,) = objects(decode("--prompt", "How many?", "--json", "--chat-template", file))
    assert row["token_ids"] == expected(pair, encode_text(tokenizer(), "HOW MANY?"))
    file.write_text("{% for m in messages %}\n{{ m.content }")
    refused = decode("--prompt", "How many?", "--chat-template", file)
    assert refused.exit_code == 2
    assert f"the chat template {file} isn't valid Jinja: line 2" in refused.stderr
    file.write_bytes(b"\xff")
    assert "can't read the chat template" in decode("--prompt", "Hm?", "--chat-template", file).stderr
    file.unlink()
    assert "does not exist" in decode("--prompt", "Hm?", "--chat-template", file).stderr


def test_text_goes_to_standard_output_and_figures_to_standard_error(decode: Run) -> None:
    result = decode("--prompt", "How many?", "--tree", "chain:2")
    (row,) = objects(decode("--prompt", "How many?", "--json"))
    assert result.stdout == row["text"] + "\n"
    assert "8 tokens in" in result.stderr
    assert "accept length" in result.stderr
    assert "LOSSY" not in result.stderr


def test_decoding_is_plain_where_nothing_is_said_about_drafting(run: Run, pair: Pair) -> None:
    arguments = ("--model", pair.model, "--max-new-tokens", 8, "--prompt", "How many?")
    bare = run("generate", *arguments)
    none = run("generate", "--method", "none", *arguments)
    assert (bare.exit_code, none.exit_code) == (0, 0)
    assert bare.stdout == none.stdout
    assert "plain decoding, because no drafter is given (--draft-model, or --method ngram" in bare.stderr
    assert "no drafter is given" not in none.stderr
    drafting = run("generate", *arguments, "--tree", "chain:2")
    assert drafting.exit_code == 2
    assert "--tree needs a drafter: give --draft-model" in drafting.stderr


def test_a_bare_prompt_is_told_from_a_model(run: Run, pair: Pair) -> None:
    result = run("generate", pair.model, "How many?")
    assert result.exit_code == 2
    assert "extra argument" in result.stderr
    assert "give the text to answer with --prompt, in quotes" in result.stderr


@pytest.fixture(scope="module")
def plain(rows: Path, run: Run, pair: Pair) -> list[Any]:
    arguments = ("generate", "--model", pair.model, "--method", "none", "--max-new-tokens", 8)
    return objects(run(*arguments, "--prompt-file", rows, "--json"))


def test_the_four_kinds_of_rows(plain: list[Any], pair: Pair) -> None:
    assert [row.get("id") for row in plain] == ["raw", "chat", "7", "4"]
    raw, chat, turns, ids = plain
    assert raw["token_ids"] == expected(pair, encode_text(tokenizer(), "def add(a, b):"))
    messages = [Message(**m) for m in ROWS[1]["messages"]]
    assert chat["token_ids"] == expected(pair, encode_chat(tokenizer(), messages), chat=True)
    assert ids["token_ids"] == expected(pair, (40, 41, 42, 43))
    assert list(turns) == ["id", "turns", "stats"]
    said = [Message(role="user", content="Natalia"), Message(role="assistant", content=turns["turns"][0]["text"])]
    second = encode_chat(tokenizer(), [*said, Message(role="user", content="and then?")])
    assert turns["turns"][1]["token_ids"] == expected(pair, second, chat=True)
    assert turns["stats"]["tokens"] == 16
    assert [row["stats"]["accept_length"] for row in plain] == [1.0] * 4


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--num-speculative-tokens", 3),
        ("--tree", "static:slim", "--batch-size", 3),
        ("--tree", "dynamic:3,4,10", "--batch-size", 4),
        ("--method", "none", "--batch-size", 2),
    ],
    ids=str,
)
def test_drafting_and_batches_change_no_token(
    options: tuple[Any, ...], rows: Path, decode: Run, plain: list[Any]
) -> None:
    same = [[turn["token_ids"] for turn in row.get("turns", [row])] for row in plain]
    assert tokens(decode("--prompt-file", rows, "--json", *options)) == same


def test_a_number_of_tokens_is_a_chain(decode: Run) -> None:
    named, number = (
        objects(decode("--prompt", "How many?", "--json", *options))[0]["stats"]
        for options in (("--tree", "chain:3"), ("-n", 3))
    )
    assert len(named["accepted_by_position"]) == len(number["accepted_by_position"]) == 3


def test_seeds_decide_and_drafting_does_not(decode: Run, rows: Path) -> None:
    heat = ("--prompt-file", rows, "--json", "--temperature", 1, "--top-p", 0.95)
    one = tokens(decode(*heat, "--seed", 1))
    assert one == tokens(decode(*heat, "--seed", 1, "--method", "none", "--batch-size", 4))
    assert one == tokens(decode(*heat, "--seed", 1, "--no-coupled"))
    assert one != tokens(decode(*heat, "--seed", 2))


def test_typical_acceptance_is_labeled(decode: Run) -> None:
    (row,) = objects(decode("--prompt", "How many?", "--json", "--acceptance", "typical:0.3,0.5"))
    assert row["lossy"] is True
    assert "LOSSY" in decode("--prompt", "How many?", "--acceptance", "typical").stderr


def test_a_made_up_accept_length_is_labeled(decode: Run) -> None:
    asked = ("--prompt", "How many?", "--tree", "chain:4", "--max-new-tokens", 40, "--ignore-eos")
    result = decode(*asked, "--synthetic-accept-length", 3, "--json")
    (row,) = objects(result)
    assert row["lossy"] is True
    assert row["stats"]["accept_length"] == pytest.approx(3.0, abs=0.2)
    assert "answers aren't the model's" in result.stderr
    for wrong in ("synthetic", "synthetic:0.5", "synthetic:x"):
        refused = decode(*asked, "--acceptance", wrong)
        assert refused.exit_code == 2
        assert "write synthetic:LENGTH" in refused.stderr


def test_rows_of_a_file_are_shown_in_its_order(decode: Run, rows: Path, plain: list[Any]) -> None:
    result = decode("--prompt-file", rows, "--batch-size", 4)
    assert result.exit_code == 0
    headers = [line for line in result.stdout.splitlines() if line.startswith("--- ")]
    assert headers == ["--- raw", "--- chat", "--- 7", "--- 4"]
    assert plain[0]["text"] in result.stdout


def test_bad_rows_are_named_and_the_others_run(decode: Run, tmp_path: Path) -> None:
    bad = [
        {"prompt": "one", "token_ids": [1]},
        "{not json",
        {"prompt": "def add"},
        "",
        {"id": "late", "token_ids": [9999]},
        {"turns": []},
        {"id": "long", "token_ids": [50] * 256},
        {"messages": [{"role": "user", "content": "In May?"}]},
    ]
    result = decode("--prompt-file", write_rows(tmp_path / "bad.jsonl", bad), "--json", "--batch-size", 2)
    assert result.exit_code == 1
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["id"] for row in lines] == ["1", "2", "3", "late", "6", "long", "8"]
    assert [len(row.get("token_ids", [])) for row in lines] == [0, 0, 8, 0, 0, 0, 8]
    assert "exactly one of" in lines[0]["error"]
    assert "outside the target's vocabulary" in lines[3]["error"]
    assert "shorten the prompt" in lines[5]["error"]
    for number, row in zip((1, 2, 5, 6, 7), [lines[i] for i in (0, 1, 3, 4, 5)], strict=True):
        assert row["error"].startswith(f"bad.jsonl:{number}: ")
        assert f"error: {row['error']}" in result.stderr
    assert "Traceback" not in result.output


def test_a_file_of_bad_rows_only_fails(decode: Run, tmp_path: Path) -> None:
    result = decode("--prompt-file", write_rows(tmp_path / "bad.jsonl", ["[]", "3"]))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "bad.jsonl:1" in result.stderr
    assert "bad.jsonl:2" in result.stderr


def test_a_conversation_that_outgrows_the_context_keeps_its_first_answers(decode: Run, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "turns.jsonl", [{"turns": ["Natalia", "May " * 300]}])
    result = decode("--prompt-file", file, "--json")
    assert result.exit_code == 1
    row = json.loads(result.stdout)
    assert len(row["turns"]) == 1
    assert "turns.jsonl:1" in row["error"]


def test_loading_is_announced_and_timed(decode: Run, run: Run, pair: Pair, tmp_path: Path) -> None:
    shown = decode("--prompt", "In May?", "--json")
    first, second = shown.stderr.splitlines()[:2]
    assert first == f"loading {pair.model} ..."
    assert re.fullmatch(r"loaded in \d+\.\d s", second)
    json.loads(shown.stdout)  # and nothing of it is output
    (tmp_path / "config.json").write_text("{}")
    failed = run("generate", "--model", tmp_path, "--prompt", "In May?").stderr
    assert failed.startswith(f"loading {tmp_path} ...\nerror: ")
    assert "loaded in" not in failed
    refused = run("generate", "--model", pair.model, "--prompt", "In May?", "--tree", "chain:3").stderr
    assert "loading" not in refused  # a wrong line is refused before
