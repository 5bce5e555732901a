"""One thread: these tensors are too small to share, and a busy machine stalls the threads that wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# a busy machine is no failure
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
