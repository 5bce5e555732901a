"""Token ids of eyas and llama.cpp on GGUF files, text by text.

    python -m benchmarks.gguf_tokenizers FILE.gguf ... [--rules FILE.gguf ...] [--texts 200] [--output FILE.json]

Needs the package llama-cpp-python; its sdist holds llama.cpp's vocabulary files (`vendor/llama.cpp/models/*.gguf`).
`LLAMA_CPP_LIB_PATH` names a folder with another build of the library. Special tokens in a text are parsed, and those
that the tokenizer adds are added. Tokens that end an answer are compared, too, and llama.cpp's own vectors of token ids
(`FILE.gguf.inp` and `.out`). `--rules` compares every rule that eyas knows on the first of these vocabulary files that
fits it, with its first tokens only. The exit code is 1 if anything differs, but for the rules in
`_OWN`.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from benchmarks.harness import Output, report, script
from eyas.errors import EyasError
from eyas.gguf import Gguf
from eyas.gguf_splits import RULES
from eyas.gguf_tokenizer import build_tokenizer
from eyas.gguf_vocabulary import BYTE_LEVEL_BPE, Scheme, TokenKind, Vocabulary, read_scheme, read_vocabulary
from tests.gguf_models import write_vocabulary

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
        found = (self._library.llama_token * (3 * len(raw) + 16))()  # a space may be the three bytes of ▁
        count = self._library.llama_tokenize(self._vocabulary, raw, len(raw), found, len(found), True, True)
        return list(found[:count])

    def ends(self, size: int) -> set[int]:
        """The tokens that end an answer."""
        return {token for token in range(size) if self._library.llama_vocab_is_eog(self._vocabulary, token)}


@dataclass(frozen=True)
class Result:
    """A file's tokenizer in both."""

    file: str
    rule: str
    same: int = 0
    """Texts with the same ids in both."""
    texts: int = 0
    vectors: str = ""
    """Of llama.cpp's own vectors, how many eyas gives."""
    ends: bool = True
    """Whether the same tokens end an answer."""
    first: str = ""
    """A text whose ids differ, or why the file is refused."""

    @property
    def wrong(self) -> bool:
        """Whether the two differ where they shouldn't."""
        texts = self.same < self.texts and self.rule not in _OWN
        return texts or not self.ends or len({*self.vectors.split(" of ")}) > 1


_OWN = frozenset("cohere2moe deepseek-llm gpt-4o kanana2 llama4 minimax-m2 talkie tekken tiny_aya youtu".split())
"""Rules that llama.cpp approximates; eyas follows the models' own, so some texts differ."""


def compare(path: Path, count: int) -> Result:
    """Compare one file."""
    try:
        file = Gguf(path)
        scheme = read_scheme(file)
        if scheme is None:
            return Result(path.stem, "no tokenizer")
        vocabulary = read_vocabulary(file, scheme)
        tokenizer = build_tokenizer(scheme, vocabulary)
        oracle = Oracle(path)
    except EyasError as error:
        return Result(path.stem, "refused", first=str(error).replace(str(path), path.name))
    texts = texts_for(vocabulary, count)
    wrong = [text for text in texts if oracle.encode(text) != tokenizer(text)["input_ids"]]
    own = list(vectors(path))
    given = sum(tokenizer(text, add_special_tokens=False)["input_ids"] == ids for text, ids in own)
    return Result(
        path.stem,
        scheme.rule or scheme.model,
        len(texts) - len(wrong),
        len(texts),
        f"{given} of {len(own)}" if own else "",
        oracle.ends(scheme.size) == vocabulary.ends,
        wrong[0] if wrong else "",
    )


def vectors(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield llama.cpp's own texts for a vocabulary, and their token ids."""
    texts, ids = (path.with_name(path.name + end) for end in (".inp", ".out"))
    if texts.is_file():
        for text, line in zip(
            texts.read_bytes().decode().split("\n__ggml_vocab_test__\n"),
            ids.read_text("utf-8").splitlines(),
            strict=False,
        ):
            yield text, [int(token) for token in line.split()]


def every_rule(sources: Sequence[Path], count: int) -> Iterator[Result]:
    """Yield the comparison of each rule, but for `gemma4`, which is a kind of tokenizer of its own."""
    fitting = dict[bool, tuple[Scheme, Vocabulary]]()
    for source in sources:
        file = Gguf(source)
        scheme = read_scheme(file)
        if scheme is not None and scheme.rule is not None:
            fitting.setdefault(RULES[scheme.rule].byte_level, (scheme, read_vocabulary(file, scheme)))
    with TemporaryDirectory() as folder:
        for name, rule in RULES.items():
            if name != "gemma4" and rule.byte_level in fitting:
                yield compare(_with_rule(name, *fitting[rule.byte_level], Path(folder) / f"{name}.gguf"), count)


def _with_rule(rule: str, scheme: Scheme, vocabulary: Vocabulary, path: Path) -> Path:
    """Write the first tokens of a vocabulary, which are quicker to read than all, to a file that names a rule."""
    kept = [
        token
        for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if token < _KEPT or kind != TokenKind.NORMAL or len(text) == 1
    ]
    texts = {vocabulary.tokens[token]: place for place, token in enumerate(kept)}
    merges = [f"{a} {b}" for a, b in vocabulary.merges if a in texts and b in texts and a + b in texts]
    ids = {
        f"{role}_token_id": texts[vocabulary.tokens[token]]
        for role, token in scheme.ids.items()
        if role in ("bos", "eos")
    }
    kinds = [int(vocabulary.kinds[token]) for token in kept]
    return write_vocabulary(path, list(texts), kinds, model=BYTE_LEVEL_BPE, pre=rule, merges=merges, **ids)


_KEPT = 20_000


@script
def main(
    files: Sequence[Path],
    *,
    rules: Annotated[Sequence[Path], "vocabulary files, byte-level or not, on which every rule is compared"] = (),
    texts: Annotated[int, "texts for each file"] = 200,
    output: Output = None,
) -> int:
    """Compare files, and rules."""
    results = [compare(path, texts) for path in files] + list(every_rule(rules, texts))
    report({}, output, [asdict(result) for result in results])
    return any(result.wrong for result in results)


if __name__ == "__main__":
    raise SystemExit(main())
