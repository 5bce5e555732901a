"""llama.cpp's converter for a tokenizer it doesn't know, to be run in an environment that has what it needs.

    python benchmarks/to_gguf.py LLAMA_CPP_SOURCES MODEL [options of convert_hf_to_gguf.py]

The splitting rule is written down as GPT-2's: wrong for text, without effect on token ids.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    sources = Path(sys.argv.pop(1)).resolve()
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # noqa: ARG005  # its signature
    sys.argv[0] = str(sources / "convert_hf_to_gguf.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
