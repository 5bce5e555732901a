"""Token ids of eyas and llama.cpp on GGUF files, text by text.

    python -m benchmarks.gguf_tokenizers FILE.gguf ... [--texts 200]

Needs the package llama-cpp-python; its sdist holds llama.cpp's vocabulary files (`vendor/llama.cpp/models/*.gguf`).
`LLAMA_CPP_LIB_PATH` names a folder with another build of the library. Special tokens in a text are parsed, and those
that the tokenizer adds are added. Tokens that end an answer are compared, too. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.gguf import Gguf
from eyas.gguf_tokenizer import build_tokenizer
from eyas.gguf_vocabulary import Vocabulary, read_scheme, read_vocabulary

_PIECES = (
    "Hello", "world", "don't", "IT'S", "we'Ve", "x=12345", "3.14159", "1,000,000", "def f(x):\n\treturn x**2\n",
    '{"a": [1, 2]}', "<div class='x'>", "for(int i=0;i<n;++i)", "C++", "#include <a.h>", "http://x.org/?q=1&r=%20",
    "_under_score", "CamelCase", "ALLCAPS", "!!!", "'''", "“quoted”", "—", "…", "l'été", "naïve", "Straße",
    "我们在这里", "日本語のテキスト", "한국어 문장", "Ελληνικά", "Привет, мир!", "مرحبا", "हिन्दी", "ไทย", "\u0e33",
    "١٢٣",
    "🚀", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\ufe0f", "\u00e9", "e\u0301",
    "n\u0303o\u0308", "\ufb01", "\u212b", "½", "²", "Ⅷ", "\u00a0", "\u200b", "\u3000", "\x07", "▁", "Ġ",
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\n \n", "a" * 40, "0" * 20, "=" * 30, " " * 33, "\n" * 9,
)  # fmt: skip


def texts_for(vocabulary: Vocabulary, count: int) -> list[str]:
    """Texts of random pieces, one with every piece alone, and some that spell out special tokens."""
    draw = random.Random(0)
    special = [vocabulary.tokens[token] for token in vocabulary.special] or [""]
    texts = [*_PIECES, *(f" {piece}" for piece in _PIECES[:30]), ""]
    while len(texts) < count:
        parts = [draw.choice(_PIECES) for _ in range(draw.randint(2, 12))]
        if len(texts) % 3 == 0:
            parts.insert(draw.randrange(len(parts)), draw.choice(special))
        texts.append(draw.choice(("", " ")).join(parts))
    return texts[:count]


class Oracle:
    """The vocabulary of a GGUF file in llama.cpp."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise EyasError(f"llama.cpp can't load {path}")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        raw = text.encode()
        found = (self._library.llama_token * (len(raw) + 16))()
        count = self._library.llama_tokenize(self._vocabulary, raw, len(raw), found, len(found), True, True)
        return list(found[:count])

    def ends(self, size: int) -> set[int]:
        """The tokens that end an answer."""
        return {token for token in range(size) if self._library.llama_vocab_is_eog(self._vocabulary, token)}


def compare(path: Path, count: int, show: Callable[[str], Any] = print) -> bool:
    """Compare one file and show the outcome; whether both are the same."""
    file = Gguf(path)
    scheme = read_scheme(file)
    if scheme is None:
        show(f"{path.stem:36} no tokenizer")
        return True
    vocabulary = read_vocabulary(file, scheme)
    tokenizer, oracle = build_tokenizer(scheme, vocabulary), Oracle(path)
    texts = texts_for(vocabulary, count)
    wrong = [(text, oracle.encode(text), tokenizer(text)["input_ids"]) for text in texts]
    wrong = [case for case in wrong if case[1] != case[2]]
    ends = oracle.ends(scheme.size) == vocabulary.ends
    rule = scheme.rule or scheme.model
    show(
        f"{path.stem:36} {rule:16} {len(texts) - len(wrong)} of {len(texts)} texts, ends {'same' if ends else 'DIFFER'}"
    )
    for text, theirs, ours in wrong[:5]:
        show(f"    {text!r}\n        llama.cpp {theirs}\n        eyas      {ours}")
    return ends and not wrong


def main() -> int:
    """Compare the files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    chosen = parser.parse_args()
    same = True
    for path in chosen.files:
        try:
            same &= compare(path, chosen.texts)
        except EyasError as error:
            print(f"{path.stem:36} refused: {error}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
