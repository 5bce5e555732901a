"""The embedded demo pair, the name `demo` for it, and the prompts of `eyas demo`."""

from __future__ import annotations

from pathlib import Path

_DEMO = Path(__file__).parent / "demo"
DEMO_TARGET = _DEMO / "target"
DEMO_DRAFTER = _DEMO / "drafter"

DEMO = "demo"
"""The embedded pair's name wherever a model or drafter is named; a folder called so is `./demo`."""


def named_target(name: str | Path) -> str:
    """A directory or Hub id as it is, and the embedded target for `demo`."""
    return str(DEMO_TARGET) if name == DEMO else str(name)


def named_drafter(name: str | Path) -> str:
    """The embedded drafter's folder for the name `demo`; any other name is returned as it is."""
    return str(DEMO_DRAFTER) if name == DEMO else str(name)


PROMPTS: tuple[tuple[str, str], ...] = (
    (
        "maths",
        "Lena sells 14 jars of honey on Saturday and twice as many on Sunday. Each jar costs $6. "
        "How much money does she earn on both days?",
    ),
    (
        "code",
        "Complete the code I provided.\n\ndef count_words(text, minimum=1):\n"
        '    """Return a dictionary that maps each word of text to the number of times it occurs,\n'
        '    leaving out words that occur fewer than minimum times.\n    """\n',
    ),
    (
        "maths",
        "A bus has 48 seats. A third of them are taken at the first stop and 9 more at the second. "
        "How many seats are still free?",
    ),
    (
        "code",
        "Complete the code I provided.\n\ndef read_lines(path, encoding='utf-8'):\n"
        '    """Read a text file and return the list of its lines without the line ends."""\n',
    ),
    ("prose", "What does `shutil.copytree` do?"),
)
