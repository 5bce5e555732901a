"""Drafters in GGUF files that lie next to their target's: which files these are, and which of them come first.

llama.cpp and its users name them after the target, with a prefix that says what they are: `mtp-Qwen3.5-4B-Q8_0.gguf`.
"""

from __future__ import annotations

import re
from pathlib import Path

PREFIXES = ("mtp-", "eagle3-", "dflash-", "dspark-")
"""How the names of drafters' files begin."""
_OTHER_PARTS = ("mmproj",)
"""How the names of further parts of a model begin that aren't models: projectors of images."""
_QUANTIZATION = re.compile(r"[-._]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4\w*|BF16|F16|F32))$", re.IGNORECASE)


def is_model(file: Path) -> bool:
    """Whether the name of a GGUF file is that of a model, not of a drafter or of another part."""
    return not file.name.lower().startswith((*PREFIXES, *_OTHER_PARTS))


def companions(file: Path) -> list[Path]:
    """The drafters' files in the folder of a target's GGUF `file` and in the one above, the best match first.

    Those named like the target come first, then those quantized like it or with bits close to it, then by name.
    """
    name, quantization = _parts(file.stem)

    def order(found: Path) -> tuple[bool, bool, int, bool, str]:
        own, theirs = _parts(_PREFIX.sub("", found.stem))
        distance = abs(_bits(theirs) - _bits(quantization))
        return own != name, theirs != quantization, distance, found.parent != file.parent, found.name

    folders = (file.parent, file.parent.parent) if file.parent != file.parent.parent else (file.parent,)
    found = [
        each
        for folder in folders
        for each in folder.glob("*.gguf")
        if each.name.lower().startswith(PREFIXES) and each.is_file() and each != file
    ]
    return sorted(found, key=order)


_PREFIX = re.compile(rf"^(?:{'|'.join(PREFIXES)})", re.IGNORECASE)


def without_quantization(stem: str) -> str:
    """A file's name, without its ending, without the quantization at its end."""
    return _QUANTIZATION.sub("", stem)


def _parts(stem: str) -> tuple[str, str]:
    """A file's name without its quantization, and this, both in lower case."""
    found = _QUANTIZATION.search(stem)
    return (stem.lower(), "") if found is None else (stem[: found.start()].lower(), found[1].lower())


def _bits(quantization: str) -> int:
    """About how many bits a weight takes in a quantization; 16 if it isn't named."""
    digits = re.search(r"\d+", quantization)
    return 16 if digits is None else int(digits[0])
