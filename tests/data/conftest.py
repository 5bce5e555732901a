"""A tokenizer trained on a few lines, shared by the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.train.lm.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    text = "def add(a, b):\n    return a + b\n\nNatalia sold 48/2 = <<48/2=24>>24 clips in May.\n" * 3
    return train_tokenizer([text, "What does `json.dumps` do?"], vocab_size=512, context=256)
