"""The embedded pair: it is what its card says, and speculation with it changes no token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import eyas
from eyas.assets import DEMO_DRAFTER, DEMO_TARGET
from eyas.engine import Engine, Speculation
from eyas.tree import parse_tree

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


@cache
def base() -> Engine:
    return eyas.load(DEMO_TARGET, DEMO_DRAFTER, dtype="float32")


def requests(temperature: float, variant: str) -> list[eyas.Request]:
    tokenizer = base().tokenizer
    made = []
    for seed, prompt in enumerate(PROMPTS):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        params = eyas.SamplingParams(max_tokens=20, temperature=temperature, seed=seed, **VARIANTS[variant])
        made.append(eyas.Request(tuple(tokenizer(text, add_special_tokens=False).input_ids), params))
    return made


@cache
def plain(temperature: float, variant: str) -> list[list[int]]:
    done = Engine(base().target, base().tokenizer).generate(requests(temperature, variant))
    return [completion.token_ids for completion in done]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 1.5])
def test_every_token_is_plain_decodings(temperature: float, variant: str, tree: str, batch_size: int) -> None:
    speculation = base().speculation
    assert speculation is not None
    engine = Engine(
        base().target,
        base().tokenizer,
        Speculation(speculation.drafter, parse_tree(tree)),
        batch_size=batch_size,
    )
    done = engine.generate(requests(temperature, variant))
    assert [completion.token_ids for completion in done] == plain(temperature, variant)
    assert sum(completion.stats.walked for completion in done) > 0  # drafts were really accepted


def test_seeds_and_temperatures_matter() -> None:
    assert plain(1.0, "plain") != plain(1.5, "plain")
    assert plain(0.0, "plain") != plain(1.0, "plain")


def test_the_pair_is_small() -> None:
    size = sum(file.stat().st_size for folder in (DEMO_TARGET, DEMO_DRAFTER) for file in Path(folder).rglob("*"))
    assert size < 60e6


def test_the_drafter_is_worth_having() -> None:
    """On the two kinds of text it was trained for, several tokens a pass."""
    done = base().generate(requests(0.0, "plain")[:2])
    pooled = eyas.Stats()
    for completion in done:
        pooled.merge(completion.stats)
    assert pooled.accept_length > 2.0
