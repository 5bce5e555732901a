"""What 4-bit and 8-bit weights gain in passes over many tokens, prompts and plain decoding, and what quality they cost.

FORMS are ways of loading the same MODEL, measured in turns: a dtype (`auto` keeps a GGUF file's weights packed,
`bfloat16` and `float32` dequantize them), or what bfloat16 weights are quantized to (`int8`, `int4`).

    python -m benchmarks.integer_rounds passes MODEL auto bfloat16 [--tokens 1 8 16 32] [--context 256] [--repeats 20]
    python -m benchmarks.integer_rounds plain MODEL auto bfloat16 [--new 128] [--repeats 5] [--draft-model DRAFTER]
        [--prompt-file EVAL/gsm8k.jsonl]
    python -m benchmarks.integer_rounds perplexity MODEL auto bfloat16 --text TEXT [--windows 40]
        [--llama http://127.0.0.1:8080]
    EYAS_NATIVE=0 python -m benchmarks.integer_rounds rounding MODEL --text TEXT [--windows 40]

`passes` reports the milliseconds that verifying a chain of each length takes, their ratios to a single token's, and the
milliseconds per prompt token. `perplexity` is defined as in llama.cpp: only the second half of each window of 512
tokens counts. `--llama` is a llama.cpp server with the same file (`llama-server -m FILE.gguf -c 1024`); it is asked for
one token at a time.

`rounding` compares int4 with GGML's Q4_0 and Q4_1, in float32 and without rounding inputs. Files in 4 bits would favor
the format that they are in, so their weights get noise first: evenly distributed over a step of their block's codes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from urllib.request import Request, urlopen

import gguf
import torch

import eyas
from benchmarks.harness import Output, interleave, paired, report, script
from benchmarks.plain_decoding import eyas_rate, prompts_of
from eyas.targets import Target, load_target, load_tokenizer
from eyas.targets.native.linears import lone_torch, weight_formats
from eyas.targets.native.packed import GROUP, nearest4
from eyas.tree import DraftTree

_PROMPT, _WINDOW = 256, 512
Forms = Annotated[Sequence[str], "auto, bfloat16, float32, int8, int4"]


def how(form: str) -> dict[str, Any]:
    """The loading options of a form."""
    return {"dtype": "bfloat16", "quantize": form} if form.startswith("int") else {"dtype": form}


def chain(tokens: torch.Tensor) -> DraftTree:
    """A draft that is a chain of `tokens` [N]."""
    count = len(tokens)
    valid = torch.ones(1, count, dtype=torch.bool)
    return DraftTree(
        tokens.unsqueeze(0), torch.arange(-1, count - 1).unsqueeze(0), valid.float(), valid, count, counted=count
    )


def seconds_of_passes(target: Target, counts: Sequence[int], context: int) -> dict[int, float]:
    """Seconds of a pass over each of `counts` tokens after `context` tokens; key 0: of a prompt of 256 tokens."""
    ids = torch.randint(5, target.vocab_size, (context + max(counts),), generator=torch.Generator().manual_seed(0))
    cache, taken = target.allocate(1, context + max(counts)), dict[int, float]()
    with lone_torch():
        for _ in target.prefill(cache, range(1), [ids[: context + 1].tolist()], ()):
            pass
        for count in counts:
            drafted = ids[context + 1 : context + count]
            began = time.perf_counter()
            target.verify(cache, range(1), ids[context : context + 1], chain(drafted), ())
            taken[count] = time.perf_counter() - began
        cache.truncate(0, 0)
        began = time.perf_counter()
        for _ in target.prefill(cache, range(1), [ids[: _PROMPT + 1].tolist()], ()):
            pass
        taken[0] = time.perf_counter() - began
    return taken


def passes(
    model: str, forms: Forms, *, tokens: Sequence[int] = (1, 8, 16, 32), context: int = 256, repeats: int = 20,
    output: Output = None,
) -> None:  # fmt: skip
    targets = {form: load_target(model, device="cpu", **how(form)) for form in forms}
    sides = {form: partial(seconds_of_passes, target, tokens, context) for form, target in targets.items()}
    measured = interleave(sides, repeats)
    rows = {}
    for form, runs in measured.items():
        pieces = {count: [run[count] for run in runs] for count in (*tokens, 0)}
        rows[form] = {
            "weights": weight_formats(targets[form].model) or str(targets[form].dtype),
            "native": targets[form].native is not None,
            "pass_ms": {count: round(1000 * median(pieces[count]), 3) for count in tokens},
            "over_one": {count: paired(pieces[count], pieces[tokens[0]]) for count in tokens[1:]},
            "prompt_ms_a_token": round(1000 * median(pieces[0]) / _PROMPT, 4),
        }
    report({"model": model, "context": context, "forms": rows}, output)


def plain(
    model: str, forms: Forms, *, new: int = 128, repeats: int = 5, draft_model: str | None = None,
    prompt_file: Path | None = None, output: Output = None,
) -> None:  # fmt: skip
    engines = {
        f"{form}{' auto' if drafter else ''}": eyas.load(model, drafter, tree="auto" if drafter else None, **how(form))
        for form in forms
        for drafter in dict.fromkeys((None, draft_model))
    }
    prompts = prompts_of(engines[forms[0]], prompt_file, 1)
    rates = interleave({name: partial(eyas_rate, engine, prompts, new) for name, engine in engines.items()}, repeats)
    first = rates[forms[-1]]
    report(
        {
            "model": model,
            "tokens_per_second": {name: round(median(values), 2) for name, values in rates.items()},
            f"over_{forms[-1]}": {name: paired(values, first) for name, values in rates.items()},
        },
        output,
    )


@torch.inference_mode()
def log_loss(target: Target, ids: Sequence[int], windows: int) -> tuple[float, int]:
    """The mean negative log-likelihood over the second halves of independent windows, and its number of tokens."""
    total, count = 0.0, 0
    cache = target.allocate(1, _WINDOW)
    for first in range(0, min(len(ids) - _WINDOW + 1, windows * _WINDOW), _WINDOW):
        cache.truncate(0, 0)
        window = list(ids[first : first + _WINDOW])
        with lone_torch():
            (chunk,) = target.prefill(cache, range(1), [window], ())
            logits = target.head(chunk.final[0, _WINDOW // 2 - 1 :]).float()
        losses = torch.nn.functional.cross_entropy(logits, chunk.next_tokens[0, _WINDOW // 2 - 1 :], reduction="sum")
        total, count = total + float(losses), count + len(logits)
    return total / count, count


def llama_log_loss(url: str, ids: Sequence[int], windows: int) -> tuple[float, int]:
    """`log_loss` by a llama.cpp server, which returns log-probabilities of the next token only."""
    total, count = 0.0, 0
    for first in range(0, min(len(ids) - _WINDOW + 1, windows * _WINDOW), _WINDOW):
        for at in range(first + _WINDOW // 2, first + _WINDOW):
            total, count = total - llama_logprob(url, ids[first:at], ids[at], 500), count + 1
    return total / count, count


def llama_logprob(url: str, before: Sequence[int], token: int, most: int) -> float:
    """The log-probability of a token, searched among the `most` likely ones, then among 100 times as many."""
    asked = {"prompt": list(before), "n_predict": 1, "n_probs": most, "cache_prompt": True}
    request = Request(f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as answer:
        likely = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
    found = next((each["logprob"] for each in likely if each["id"] == token), None)
    return llama_logprob(url, before, token, 100 * most) if found is None else float(found)


def perplexity(
    model: str, forms: Forms, *, text: Path, windows: int = 40, llama: str | None = None, output: Output = None
) -> None:
    ids = load_tokenizer(model)(text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    found: dict[str, Any] = {}
    if llama is not None:
        loss, count = llama_log_loss(llama, ids, windows)
        found["llama.cpp"] = {"perplexity": round(math.exp(loss), 4), "tokens": count}
    for form in forms:
        target = load_target(model, device="cpu", **how(form))
        loss, count = log_loss(target, ids, windows)
        found[form] = {"weights": weight_formats(target.model), "perplexity": round(math.exp(loss), 4), "tokens": count}
    report({"model": model, "text": text.name, "forms": found}, output)


def rounding(model: str, *, text: Path, windows: int = 40, output: Output = None) -> None:
    target = load_target(model, device="cpu", dtype="float32")
    ids = load_tokenizer(model)(text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    draw, weights = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, module in list(target.layers.named_modules()):
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2:
            blocks = weight.detach().float().unflatten(1, (-1, GROUP))
            steps = (blocks.amax(2, keepdim=True) - blocks.amin(2, keepdim=True)) / 15
            weights[name] = (blocks + (torch.rand(blocks.shape, generator=draw) - 0.5) * steps).flatten(1)
            target.layers.set_submodule(name, torch.nn.Linear(*reversed(weight.shape), bias=False))

    def ggml(form: str, weight: torch.Tensor) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType[form]
        return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))

    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "float32": lambda weight: weight,
        "int4": lambda weight: nearest4(weight).floats(weight.shape[1]),
        "Q4_0": partial(ggml, "Q4_0"),
        "Q4_1": partial(ggml, "Q4_1"),
    }
    found = {}
    for form, rounded in forms.items():
        for name, weight in weights.items():
            target.layers.get_submodule(name).weight = torch.nn.Parameter(rounded(weight), requires_grad=False)
        found[form] = round(math.exp(log_loss(target, ids, windows)[0]), 4)
    report({"model": model, "text": text.name, "perplexity": found}, output)


main = script(passes, plain, perplexity, rounding)

if __name__ == "__main__":
    raise SystemExit(main())
