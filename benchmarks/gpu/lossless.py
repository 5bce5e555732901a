"""Losslessness on a device: speculation against plain decoding, and plain decoding against the CPU.

Differences are judged as by `eyas verify`: two runs may diverge only where the target scores both tokens almost the
same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from benchmarks.gpu.pairs import Sizes, triton_passes
from benchmarks.gpu.steps import Outcome, Row, Skipped
from eyas.assets import PROMPTS
from eyas.bench.offline.certificate import CertificateGrid, Certifier, first_difference, judge, scores_after
from eyas.drafters.base import Drafter
from eyas.drafters.loading import load_drafter
from eyas.engine import Engine
from eyas.errors import UnsupportedModelError
from eyas.targets import Target, load_target, load_tokenizer
from eyas.targets.graphs import Outputs, Recording
from eyas.targets.tokenizers import eos_token_ids
from eyas.text.chats import Message
from eyas.text.prompts import PromptRow
from eyas.text.template import encode_chat
from eyas.types import Request, SamplingParams
from tests.toy.pair import TOY_DRAFTER, TOY_TARGET

TREES = ("chain:4", "dynamic:4,3,8", "dynamic:4,3,8,0.1")
"""A chain, a tree, and trees whose sizes differ within a batch, with ragged passes where the device allows."""
FAMILY_PROMPTS = (13, 1, 20, 5, 9, 3)


def demo_pair(dtype: torch.dtype, sizes: Sizes, device: torch.device) -> Outcome:
    """The demo pair on texts of `eyas demo`, greedy and sampled."""
    target = load_target(TOY_TARGET, dtype=dtype, device=device)
    prompts = demo_prompts()
    params = SamplingParams(max_tokens=sizes.answers)
    # without native kernels, which would have to be compiled first
    reference = load_target(TOY_TARGET, dtype=dtype, device="cpu", prepacked=False)
    rows, wrong, detail = certified(target, load_drafter(TOY_DRAFTER, target), prompts, params, (0.0, 0.8), (1, 4))
    apart, more, parted = compared(reference, target, prompts, params)
    return Outcome([*rows, apart], wrong + more, [*detail, *parted])


def demo_prompts() -> list[tuple[int, ...]]:
    """The texts of `eyas demo` as chats."""
    tokenizer = load_tokenizer(TOY_TARGET)
    return [encode_chat(tokenizer, [Message(role="user", content=text)]) for _, text in PROMPTS]


def family(name: str, dtype: torch.dtype, sizes: Sizes, device: torch.device) -> Outcome:
    """A tiny random model of an architecture, with a drafter that is often right at any place in its trees."""
    from tests import recording, tiny  # the models that the tests use

    try:
        reference = Target(_tiny_model(name, dtype))
    except UnsupportedModelError as error:  # such as transformers' Mamba-2 in bfloat16
        raise Skipped(str(error)) from error
    record = recording.recorder(device)
    graphs = list[Recording]()

    def counted(compute: Callable[[], Outputs]) -> Recording:
        graphs.append(record(compute))
        return graphs[-1]

    model = copy.deepcopy(_tiny_model(name, dtype)).to(device)
    triton = triton_passes(model)
    target = Target(model, decoder=triton, record=counted)
    prompts = [tuple(prompt) for prompt in tiny.prompts(*FAMILY_PROMPTS)]
    params = SamplingParams(max_tokens=min(sizes.answers, 24))
    recorded = [[*p, *a] for p, a in zip(prompts, answers(target, prompts, params), strict=True)]
    oracle = tiny.OracleDrafter(recorded, (0, 2, tiny.LAYERS), device=device, strict=False)
    temperatures = (0.0,) if triton is None else (0.0, 0.8)
    rows, wrong, detail = certified(target, oracle, prompts, params, temperatures, (1, 4))
    apart, more, parted = compared(reference, target, prompts, params)
    if triton is not None and target.decoder is None:
        wrong.append("kernels in Triton were refused at load")
    passes = "modules" if target.decoder is None else target.decoder.name
    return Outcome([_pooled(rows) | {"graphs": len(graphs), "passes": passes}, apart], wrong + more, [*detail, *parted])


@lru_cache(maxsize=1)
def _tiny_model(name: str, dtype: torch.dtype) -> Any:
    from tests import tiny

    return tiny.build_model(name).to(dtype)


def certified(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    temperatures: Sequence[float],
    batches: Sequence[int],
) -> tuple[list[Row], list[str], list[Any]]:
    """A row for each cell of the certificate's grid, the cells that are wrong, and all divergences."""
    prompt_rows = [PromptRow(str(number), "here", token_ids=prompt) for number, prompt in enumerate(prompts)]
    grid = CertificateGrid(temperatures, TREES, batches)
    rows: list[Row] = []
    wrong, detail = [], []
    for cell in Certifier(target, None, drafter, params).cells(prompt_rows, grid):
        equal = cell.rows - len(cell.divergences)
        rows.append(
            {
                "against": "plain, one by one",
                "tree": cell.tree,
                "batch": cell.batch_size,
                "temperature": cell.temperature,
                "answers": cell.rows,
                "equal": equal,
                "near-ties": len(cell.divergences) - cell.real,
                "different": cell.real,
                "accept length": cell.accept_length,
            }
        )
        apart = cell.real or (target.decoder is not None and cell.divergences)  # in Triton, bits are promised
        if apart or cell.errors or not cell.rows:
            wrong.append(f"{cell.tree}, batch {cell.batch_size}: {cell.verdict} {' '.join(cell.errors)}".strip())
        detail += cell.as_dict()["divergences"]
    return rows, wrong, detail


def compared(
    reference: Target, target: Target, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> tuple[Row, list[str], list[Any]]:
    """Compare greedy plain answers on the CPU and on the device; returns a row, what is wrong, and all differences."""
    parted: list[dict[str, Any]] = []
    expected = answers(reference, prompts, params)
    found = answers(target, prompts, params)
    for prompt, there, here in zip(prompts, expected, found, strict=True):
        at = first_difference(there, here)
        if at is None:
            continue
        left, right = (answer[at] if at < len(answer) else None for answer in (there, here))
        scores = scores_after(reference, params, prompt, there[:at], eos_token_ids(reference.model))
        gap, tolerance = judge(scores, left, right, reference.dtype)
        tie = gap is not None and tolerance is not None and gap <= tolerance
        parted.append({"position": at, "cpu": left, "device": right, "gap": gap, "tolerance": tolerance, "tie": tie})
    ties = sum(each["tie"] for each in parted)
    row: Row = {
        "against": "plain on the CPU", "tree": "none", "batch": 1, "temperature": 0.0, "answers": len(prompts),
        "equal": len(prompts) - len(parted), "near-ties": ties, "different": len(parted) - ties,
    }  # fmt: skip
    return row, ["differs from the CPU's answers"] * bool(row["different"]), parted


def answers(target: Target, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> list[list[int]]:
    """Plain answers, one prompt at a time."""
    done = Engine(target).generate([Request(prompt, params) for prompt in prompts])
    return [completion.token_ids for completion in done]


def _pooled(rows: Sequence[Row]) -> Row:
    """The cells of a grid as one row."""
    lengths = [row["accept length"] for row in rows if row["tree"] != "none"]
    counts = {key: sum(row[key] for row in rows) for key in ("answers", "equal", "near-ties", "different")}
    batches, temperatures = (sorted({row[key] for row in rows}) for key in ("batch", "temperature"))
    return {
        "against": rows[0]["against"], "tree": f"{len(TREES)} trees", "batch": " and ".join(map(str, batches)),
        "temperature": " and ".join(map(str, temperatures)), **counts,
        "accept length": round(sum(lengths) / len(lengths), 2),
    }  # fmt: skip
