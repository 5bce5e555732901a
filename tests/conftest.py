"""Settings for the whole suite: no network, one thread a process, no deadlines on a busy machine."""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # also of the processes that tests start; pytest-xdist runs several of us

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging

from eyas.train.lm.tokenizer import train_tokenizer

logging.set_verbosity_error()
settings.register_profile("eyas", deadline=None)
settings.load_profile("eyas")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """These tensors are too small to share between threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A tokenizer trained on a few lines."""
    text = "def add(a, b):\n    return a + b\n\nNatalia sold 48/2 = <<48/2=24>>24 clips in May.\n" * 3
    return train_tokenizer([text, "What does `json.dumps` do?"], vocab_size=512, context=256)
