"""The embedded demo pair, the name `demo` for it, and the prompts of `eyas demo`."""

from __future__ import annotations

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


def named_target(name: str | Path) -> str:
    """The embedded target for `demo`, the folder that is made of a GGUF file, and any other name as it is."""
    return str(DEMO_TARGET) if name == DEMO else target_folder(str(name))


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
