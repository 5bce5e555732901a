"""Settings for the whole suite: no network, one thread per process, no deadlines on a busy machine."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["EYAS_KEEP"] = "0"  # every model is laid out and tried as at its first load
os.environ["OMP_NUM_THREADS"] = "1"  # also in processes that tests start; pytest-xdist runs several workers

import pytest
from hypothesis import settings

# torch and transformers are imported where they are used: pytest-xdist's own process needs neither
settings.register_profile("eyas", deadline=None, max_examples=60)
settings.load_profile("eyas")

LONG = (
    "assets/test_smollm2.py", "labs/learn/test_cycle.py", "recipes/test_real_models.py", "toy/test_demo_pair.py",
    "train/loop/test_processes.py", "verify/test_distribution.py",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the objects that imports create from garbage collection: they live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with long tests first, so that no process is left with one when the others are done.

    A test with `@pytest.mark.every(n)` runs for every n-th of its cases; the others are slow.
    """
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))
    cases = Counter[str]()
    for item in items:
        every = item.get_closest_marker("every")
        if every is None or item.get_closest_marker("slow") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        if cases[test] % every.args[0]:
            item.add_marker(pytest.mark.slow)
        cases[test] += 1


@pytest.fixture(autouse=True, scope="session")
def _quiet_on_one_thread() -> None:
    """Silence transformers and use one thread: these tensors are too small to share between threads."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _native_layouts() -> Generator[None, None, None]:
    """Lay weights out for native passes wherever there are kernels, even if oneDNN is faster on this machine."""
    from eyas.targets.native import layouts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "measured_once", lambda *_: ([1.0] * 4, [1.0] * 4))
        yield


@pytest.fixture(autouse=True, scope="session")
def _commands_are_made_once() -> Generator[None, None, None]:
    """Cache the commands that typer's runner builds at every call, which takes longer than many verbs."""
    from typer import testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", cache(testing._get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def _tables_fit_every_terminal() -> Generator[None, None, None]:
    """Print every table that any test prints on narrow and wide terminals, too: see `tests/test_tables.py`."""
    from eyas import tables

    from .test_tables import check_every_width

    fits = tables._fits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_fits", lambda console, table: check_every_width(table, fits) or fits(console, table))
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A tokenizer trained on a few lines."""
    from eyas.train.lm.lm import train_tokenizer

    text = "def add(a, b):\n    return a + b\n\nNatalia sold 48/2 = <<48/2=24>>24 clips in May.\n" * 3
    return train_tokenizer([text, "What does `json.dumps` do?"], vocab_size=512, context=256)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """A private cache directory, in which GGUF files are converted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target as a GGUF file."""
    from tests.gguf_models import write_llama

    path = tmp_path_factory.mktemp("models") / "tiny.Q8_0.gguf"
    write_llama(path, "Q8_0")
    return path
