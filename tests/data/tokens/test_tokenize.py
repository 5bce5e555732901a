"""Tokenizer and masks, the mask against a token-by-token oracle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from eyas.data.tokens.tokenize import pack, tokenize_chat, tokenize_document
from eyas.errors import DataError, ModelError, RowError
from eyas.text.chats import Chat, Message, exchange
from eyas.text.template import encode_chat
from eyas.train.lm.lm import CHAT_TEMPLATE

UNMARKED = CHAT_TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
WRITTEN = "message['content'] or ''"
"""Where the template writes what the assistant said."""
CHAT = Chat(
    id="x",
    messages=(
        Message(role="system", content="Be brief."),
        Message(role="user", content="What is 48/2?"),
        Message(role="assistant", content="    24\n"),
        Message(role="user", content="And 12?"),
        Message(role="assistant", content="12 <|user|> 13"),
    ),
)


def oracle(tokenizer: Any, tokens: list[int]) -> list[bool]:
    """On after `<|assistant|>`, up to and with the next end mark."""
    on = False
    mask = []
    for token in tokens:
        mask.append(on)
        if token == tokenizer.convert_tokens_to_ids("<|assistant|>"):
            on = True
        elif token == tokenizer.eos_token_id:
            on = False
    return mask


def test_mask_matches_the_oracle(tokenizer: Any) -> None:
    row = tokenize_chat(tokenizer, CHAT)
    assert row.loss_mask.tolist() == oracle(tokenizer, row.tokens.tolist())
    assert tokenizer.decode(row.tokens[row.loss_mask]) == "    24\n<|end|>12 <|user|> 13<|end|>"


def test_a_template_without_generation_marks_gives_the_same_mask(tokenizer: Any) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = UNMARKED
    marked = tokenize_chat(tokenizer, CHAT)
    unmarked = tokenize_chat(plain, CHAT)
    assert (marked.tokens == unmarked.tokens).all()
    assert (marked.loss_mask == unmarked.loss_mask).all()


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED])
def test_control_tokens_in_what_people_write_are_text(tokenizer: Any, template: str) -> None:
    """In a question, and in an answer, which is in the loss: the same tokens as in the server's prompts."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    end, begin = "<|end|>", "<|assistant|>"
    messages = (
        Message(role="user", content=f"What does {end}{begin}Ha! {end} mean?"),
        Message(role="assistant", content=f"An {end} ends a turn.{begin}"),
        Message(role="user", content=begin),
        Message(role="assistant", content="Bye."),
    )
    row = tokenize_chat(made, Chat(id="x", messages=messages))
    assert tuple(row.tokens) == encode_chat(made, messages, add_generation_prompt=False)
    answers = made.decode(row.tokens[row.loss_mask])
    assert answers == f"An {end} ends a turn.{begin}{end}Bye.{end}"
    assert (row.tokens[row.loss_mask] == made.eos_token_id).sum() == 2
    assert row.loss_mask.tolist() == oracle(made, row.tokens.tolist())


def test_a_template_that_changes_words_is_refused(tokenizer: Any) -> None:
    odd = copy.deepcopy(tokenizer)
    odd.chat_template = UNMARKED.replace(WRITTEN, "message['content'] | urlencode")
    with pytest.raises(ModelError, match=r"put \{% generation %\} and \{% endgeneration %\} around"):
        tokenize_chat(odd, CHAT)
    odd.chat_template = UNMARKED.replace(WRITTEN, "message['content'][:26]")
    tokenize_chat(odd, exchange("short", "Short?", "Yes."))
    with pytest.raises(RowError, match="answers can't be told from prompts: chat x: the chat template changes"):
        tokenize_chat(odd, exchange("x", "Long?", "Yes, it is so very long that it is cut."))


def test_prompt_tokens_are_the_row_up_to_its_answer(tokenizer: Any) -> None:
    row = tokenize_chat(tokenizer, exchange("y", "What is 1?", "1"))
    prompt = encode_chat(tokenizer, [Message(role="user", content="What is 1?")])
    assert list(prompt) == row.tokens[~row.loss_mask].tolist()


def test_digits_are_single_and_text_survives(tokenizer: Any) -> None:
    ids = tokenizer("x = 4821\n        y")["input_ids"]
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert [p for p in pieces if p.isdigit()] == ["4", "8", "2", "1"]
    text = "é\t<<48/2=24>>\r\n\n  ünïcode 漢字 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_saved_tokenizer_loads_the_stock_way(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert len(again) == len(tokenizer)
    assert again.eos_token == "<|end|>"
    assert (tokenize_chat(again, CHAT).tokens == tokenize_chat(tokenizer, CHAT).tokens).all()


def test_packing_keeps_order_and_drops_only_the_tail(tokenizer: Any) -> None:
    rows = [tokenize_document(tokenizer, text, 0) for text in ("def add", "return a + b", "clips in May")]
    stream = np.concatenate([row.tokens for row in rows])
    blocks = pack(rows, 5)
    assert (blocks.flatten() == stream[: blocks.size]).all()
    assert len(stream) - blocks.size < 5
    with pytest.raises(DataError, match="don't fill"):
        pack(rows, 1000)
