"""The shipped pair `smollm2`: sizes, and answers in bfloat16 that speculation doesn't change."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from safetensors import safe_open

import eyas
from eyas.assets import PROMPTS, SMOLLM2, SMOLLM2_DRAFTER
from eyas.engine import Engine, Speculation
from eyas.engine.controller.experience import Experience
from eyas.engine.controller.trees import DEPTH, WIDTHS
from eyas.targets import load_tokenizer
from eyas.targets.fingerprint import fingerprint
from eyas.text.chats import Message
from eyas.text.template import encode_chat
from eyas.tree import parse_tree


@cache
def engine() -> Engine:
    return eyas.load(SMOLLM2, SMOLLM2, tree="dynamic:5,4,15")


def requests(temperature: float) -> list[eyas.Request]:
    chats = [[Message(role="user", content=text)] for _, text in PROMPTS]
    return [
        eyas.Request(
            tuple(encode_chat(engine().tokenizer, chat)),
            eyas.SamplingParams(max_tokens=24, temperature=temperature, seed=number),
        )
        for number, chat in enumerate(chats)
    ]


def test_the_drafter_is_small_and_in_bfloat16() -> None:
    weights = SMOLLM2_DRAFTER / "model.safetensors"
    assert weights.stat().st_size < 20e6
    with safe_open(weights, "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  # no dictionary
    assert {kind for name, kind in kinds.items() if name not in ("d2t", "t2d")} == {"BF16"}


def test_text_is_split_as_the_file_says() -> None:
    """`smollm`: digits one by one, before spaces are split from what follows them."""
    assert load_tokenizer(SMOLLM2).tokenize("x =\n    30") == ["x", "Ġ=", "ĊĠĠĠĠ", "3", "0"]


@pytest.mark.every(2)
@pytest.mark.parametrize("looks_up", [False, True])
def test_what_controllers_learned_of_it_is_found(
    looks_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EYAS_KEEP", "1")
    made = engine()
    assert made.speculation is not None
    drafter = made.speculation.drafter
    assert drafter.module is not None
    form = ([width for width in WIDTHS if width <= drafter.max_fanout], DEPTH, looks_up)
    found = Experience.of(fingerprint(made.target.model), drafter.module, form)
    assert found is not None
    assert found.read()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_plain_decoding(temperature: float) -> None:
    made = engine()
    plain = Engine(made.target, made.tokenizer, batch_size=3).generate(requests(temperature))
    assert len({tuple(done.token_ids) for done in plain}) == len(PROMPTS)
    assert made.speculation is not None
    # each tree alone and in a batch, each at both temperatures
    for tree, size in (("chain:3", 1 if temperature else 3), ("dynamic:5,4,15", 3 if temperature else 1)):
        speculation = Speculation(made.speculation.drafter, parse_tree(tree))
        fast = Engine(made.target, made.tokenizer, speculation, batch_size=size).generate(requests(temperature))
        assert [done.token_ids for done in fast] == [done.token_ids for done in plain], (tree, size)
        counted = eyas.Stats()
        for done in fast:
            counted.merge(done.stats)
        assert counted.accept_length > 1.3, (tree, size)
