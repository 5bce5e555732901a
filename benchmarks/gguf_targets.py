"""Whether eyas computes what llama.cpp computes from the same GGUF file, for every architecture that eyas takes.

    python -m benchmarks.gguf_targets [--sources LLAMA_CPP] [--only llama] [--output FILE.json]

Writes tiny random files (`tests/gguf_architectures.py`) with each key and tensor that llama.cpp reads, runs both in
float32, and compares log-probabilities at all positions. llama.cpp takes GELU from a table in half precision, which
alone makes differences of 2e-3; so the modules are compared with GELU rounded like that, too. An engine's passes are
compared with the modules as they are. Needs llama-cpp-python. `--sources` also compares eyas's table of keys with those
that llama.cpp's code reads. Exits with 1 if a difference, with rounded GELU, is 1e-3 or more, or a key is in no table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from torch import Tensor

import eyas
from benchmarks.harness import Output, report, script
from eyas.errors import ModelError
from eyas.gguf_keys import ARCHITECTURES
from tests import gguf_architectures as tiny

TOKENS, MOST = 100, 1e-3


@dataclass(frozen=True)
class Result:
    """A file, run by both."""

    case: str
    rounded: float | None
    """Largest difference of a log-probability between modules, with rounded GELU, and llama.cpp; None if refused."""
    plain: float | None
    """The same with the modules' own GELU."""
    engine: float | None
    """Largest difference between the modules and an engine's passes, at the last position."""
    refused: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the two differ."""
        return self.rounded is not None and max(self.rounded, self.engine or 0.0) >= MOST


def rounded_gelu(inputs: Tensor) -> Tensor:
    """GELU as `ggml_vec_gelu_f32` takes it from its table."""
    inside = torch.nn.functional.gelu(inputs.half().float(), approximate="tanh").half().float()
    return torch.where(inputs.abs() < 10, inside, inputs.clamp(min=0))


def by_llama(path: Path, ids: list[int]) -> Tensor:
    """llama.cpp's log-probabilities [N, V] after each token, with keys and values in float32."""
    from llama_cpp import Llama

    llm = Llama(
        str(path),
        n_ctx=128,
        n_batch=128,
        n_threads=1,
        logits_all=True,
        flash_attn=False,
        type_k=0,
        type_v=0,
        verbose=False,
    )
    llm.eval(ids)
    logits = torch.from_numpy(llm.scores[: len(ids)].copy())
    llm.close()
    return logits.double().log_softmax(-1)


def run(path: Path, case: tiny.Case) -> Result:
    ids = [(7 * index + 3) % (tiny.VOCAB - 2) for index in range(TOKENS)]
    tiny.write(path, case, tiny.build(case))
    try:
        engine = eyas.load(path, dtype="float32")
    except ModelError as error:
        return Result(str(case), None, None, None, str(error))
    expected = by_llama(path, ids)
    tokens = torch.tensor([ids])
    model = engine.target.model
    params = eyas.SamplingParams(max_tokens=1, logprobs=20, ignore_eos=True)
    (completion,) = engine.generate([eyas.Request(tuple(ids), params)])
    with torch.inference_mode():
        plain = model(tokens).logits[0].double().log_softmax(-1)
        for module in model.modules():
            if "gelu" in type(module).__name__.lower():
                module.forward = rounded_gelu
        rounded = model(tokens).logits[0].double().log_softmax(-1)
    best = completion.logprobs[0].top if completion.logprobs else ()
    return Result(
        str(case),
        (rounded - expected).abs().max().item(),
        (plain - expected).abs().max().item(),
        max(abs(value - plain[-1, token].item()) for token, value in best),
    )


def unknown_keys(sources: Path) -> Iterator[str]:
    """Yield the keys that llama.cpp's code reads for an architecture and that are in no table of eyas's."""
    code = sources / "src"
    named = dict(re.findall(r"\{ (LLM_KV_\w+),\s*\"%s\.([^\"]+)\"", (code / "llama-arch.cpp").read_text("utf-8")))
    whole = (code / "llama-model.cpp").read_text("utf-8")
    common = whole[whole.index("llama_model_base::load_hparams") :]
    common = re.sub(r"if \(arch == LLM_ARCH_WAV.*?\n    \}\n", "", common[: common.index("\n}\n")], flags=re.DOTALL)
    for name, architecture in ARCHITECTURES.items():
        own = (code / "models" / f"{_FILES.get(name, name)}.cpp").read_text("utf-8")
        for kind in sorted(set(re.findall(r"LLM_KV_\w+", common + own))):
            key = named.get(kind)
            if key is not None and key not in architecture.keys and key not in _OF_ALL:
                yield f"{name}.{key}"


_FILES = {"glm4moe": "glm4-moe", "nemotron_h_moe": "nemotron-h"}
"""Architectures whose code is in a file of another name."""
_OF_ALL = frozenset({"classifier.output_labels", "classifier.pooling_type"})
"""Of classifiers, which eyas refuses as unknown keys."""


@script
def main(
    *,
    sources: Annotated[Path | None, "llama.cpp's sources"] = None,
    only: Annotated[str, "cases whose name holds this"] = "",
    output: Output = None,
) -> int:
    missing = [] if sources is None else list(unknown_keys(sources))
    results: list[Result] = []
    with TemporaryDirectory() as folder:
        for case in tiny.CASES:
            if only in str(case):
                results.append(run(Path(folder) / f"{case}.gguf", case))
    rows: list[dict[str, Any]] = [asdict(result) for result in results]
    report({"keys in no table": missing}, output, rows)
    return bool(missing) or any(result.wrong for result in results)


if __name__ == "__main__":
    raise SystemExit(main())
