"""Run llama.cpp's converter, also for byte-level tokenizers it doesn't know; needs torch, transformers and gguf.

    python -m benchmarks.to_gguf LLAMA_CPP_SOURCES MODEL [options of convert_hf_to_gguf.py]

The splitting rule of an unknown tokenizer is written as Qwen2's, which is the rule of tokenizers that
`eyas.train.lm.lm` trains.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any


def _no_sentencepiece(*_: object) -> None:
    """Make the converter skip SentencePiece, which it tries first and whose package it would import."""
    raise FileNotFoundError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="llama.cpp's sources, with the converter")
    options, rest = parser.parse_known_args()
    sources = options.sources.resolve()
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    from conversion import base

    known = base.TextModel.get_vocab_base_pre

    def splitting_rule(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "qwen2"

    base.TextModel.get_vocab_base_pre = splitting_rule
    base.TextModel._set_vocab_sentencepiece = _no_sentencepiece
    sys.argv = [str(sources / "convert_hf_to_gguf.py"), *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
