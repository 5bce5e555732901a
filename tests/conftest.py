"""Settings for the whole suite: no network, one thread, no deadlines on a busy machine."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging

logging.set_verbosity_error()
settings.register_profile("eyas", deadline=None)
settings.load_profile("eyas")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """These tensors are too small to share between threads."""
    torch.set_num_threads(1)
