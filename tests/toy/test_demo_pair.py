"""The embedded pair: it is what its card says, and speculation with it changes no token."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import eyas
from eyas.engine import Engine, Speculation
from eyas.tree import parse_tree

from .pair import TOY_DRAFTER, TOY_TARGET

PROMPTS = (
    "Tom has 3 boxes with 12 pencils each. He gives 7 pencils away. How many pencils does he have left?",
    'Complete the code I provided.\n\ndef mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n',
    "What does `json.dumps` do?",
    "Write a short poem about the sea.",
)
VARIANTS = {
    "plain": {},
    "top_p": {"top_p": 0.9, "min_p": 0.02},
    "top_k": {"top_k": 20},
    "penalties": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_tokens": 8,
    },
}
TREES = ("chain:3", "static:slim", "dynamic:5,4,15")
TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
SLOW = [
    pytest.param(tree, batch_size, marks=pytest.mark.slow)
    for tree in TREES for batch_size in (1, 4) if (tree, batch_size) != (TREES[2], 4)
]  # fmt: skip
SETTINGS = [*itertools.product(TEMPERATURES, VARIANTS)]


@cache
def base() -> Engine:
    return eyas.load(TOY_TARGET, TOY_DRAFTER, dtype="float32")


@cache
def prompts() -> list[tuple[int, ...]]:
    tokenizer = base().tokenizer
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        for prompt in PROMPTS
    ]
    return [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]


def requests(temperature: float, variant: str) -> list[eyas.Request]:
    return [
        eyas.Request(ids, eyas.SamplingParams(max_tokens=14, temperature=temperature, seed=seed, **VARIANTS[variant]))
        for seed, ids in enumerate(prompts())
    ]


def tokens(completions: Iterable[eyas.Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@cache
def plain() -> dict[tuple[float, str], list[list[int]]]:
    """Plain decoding, once for all trees and batches."""
    engine = Engine(base().target, base().tokenizer, batch_size=20)
    done = iter(tokens(engine.generate([request for each in SETTINGS for request in requests(*each)])))
    return {each: list(itertools.islice(done, len(PROMPTS))) for each in SETTINGS}


def prompt_numbers(tree: str, batch_size: int, setting: tuple[float, str]) -> tuple[int, ...]:
    """All of them; with one row, where nothing stands beside a request, two in turn."""
    if batch_size > 1:
        return (0, 1, 2, 3)
    return ((0, 3), (1, 2))[(TREES.index(tree) + sum(divmod(SETTINGS.index(setting), len(VARIANTS)))) % 2]


@cache
def speculated(tree: str, batch_size: int) -> dict[tuple[float, str], list[eyas.Completion]]:
    """All temperatures and variants in one queue, so that rows of several are decoded side by side."""
    speculation = base().speculation
    assert speculation is not None
    fast = Speculation(speculation.drafter, parse_tree(tree))
    asked = {
        (each, number): requests(*each)[number]
        for number in range(len(PROMPTS))
        for each in SETTINGS
        if number in prompt_numbers(tree, batch_size, each)
    }
    done = Engine(base().target, base().tokenizer, fast, batch_size=batch_size).generate([*asked.values()])
    found = dict(zip(asked, done, strict=True))
    return {each: [found[each, n] for n in prompt_numbers(tree, batch_size, each)] for each in SETTINGS}


@pytest.mark.every(6)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("tree", "batch_size"), [(TREES[2], 4), *SLOW])
def test_every_token_is_plain_decodings(temperature: float, variant: str, tree: str, batch_size: int) -> None:
    setting = (temperature, variant)
    done = speculated(tree, batch_size)[setting]
    assert tokens(done) == [plain()[setting][number] for number in prompt_numbers(tree, batch_size, setting)]
    assert sum(completion.stats.walked for completion in done) > 0  # drafts were really accepted


def test_one_row_meets_every_prompt_with_any_two_settings() -> None:
    met = [(number, *each, tree) for tree in TREES for each in SETTINGS for number in prompt_numbers(tree, 1, each)]
    counts = {1: len(TEMPERATURES), 2: len(VARIANTS), 3: len(TREES)}
    for a, b in itertools.combinations(counts, 2):
        assert len({(row[0], row[a], row[b]) for row in met}) == len(PROMPTS) * counts[a] * counts[b]


@pytest.mark.parametrize(("number", "variant"), [*enumerate(VARIANTS)])
def test_plain_decoding_is_the_same_alone(number: int, variant: str) -> None:
    """The reference doesn't depend on what it was decoded beside."""
    temperature = TEMPERATURES[number + 1]
    alone = Engine(base().target, base().tokenizer).generate([requests(temperature, variant)[number]])
    assert alone[0].token_ids == plain()[temperature, variant][number]


def test_seeds_and_temperatures_matter() -> None:
    assert plain()[1.0, "plain"] != plain()[1.5, "plain"]
    assert plain()[0.0, "plain"] != plain()[1.0, "plain"]


def test_the_pair_is_small() -> None:
    size = sum(file.stat().st_size for folder in (TOY_TARGET, TOY_DRAFTER) for file in Path(folder).rglob("*"))
    assert size < 60e6


def test_the_drafter_is_worth_having() -> None:
    """On the two kinds of text it was trained for, several tokens per pass."""
    done = base().generate(requests(0.0, "plain")[:2])
    pooled = eyas.Stats()
    for completion in done:
        pooled.merge(completion.stats)
    assert pooled.accept_length > 2.0
