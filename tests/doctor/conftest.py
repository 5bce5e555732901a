"""The demo target's answers to the doctor's prompts, generated once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.doctor.diagnosis import decode
from eyas.doctor.measure import Reading, Transcript, encode_prompts
from eyas.drafters.checkpoint import open_checkpoint
from eyas.targets import Target, load_target, load_tokenizer

from ..toy.pair import TOY_DRAFTER, TOY_TARGET

LENGTH, TOKENS = 3, 80


@pytest.fixture(scope="session")
def demo_target() -> Target:
    return load_target(TOY_TARGET)


@pytest.fixture(scope="session")
def demo_transcript(demo_target: Target) -> Transcript:
    """The transcript, with the states of every boundary that any drafter here may read."""
    tokenizer: Any = load_tokenizer(TOY_TARGET)
    prompts = encode_prompts(tokenizer, demo_target.max_length)
    drafter = Reading.of(open_checkpoint(Path(TOY_DRAFTER)), demo_target).on(demo_target)
    answers = decode(drafter, demo_target, tokenizer, prompts, 5, TOKENS).answers
    boundaries = {k + shift for k in (2, 16, 29) for shift in range(-2, 3)}
    return Transcript.of(demo_target, prompts, answers, boundaries)
