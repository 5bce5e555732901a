"""Whether speculation equals plain decoding on tiny random models of every architecture, token for token.

    python -m benchmarks.lossless_families [--limit 500] [--families llama,gemma2] [--dtypes float32,bfloat16,int8]
        [--seed 0] [--output FILE.json]
    python -m benchmarks.lossless_families --families llama,qwen3moe --dtypes int4,Q4_0,Q4_K,awq,gptq-zeros

`--dtypes` takes precisions, GGML types of GGUF files (for a Llama and a Qwen3-MoE) and integer layouts of checkpoints
(`tests/quantized.py`).

Every prompt is answered by plain decoding alone, then with others in a random setting: drafter, tree, batch of 1 to 16,
prefill chunk, cache limit. A seed gives the same settings on every machine. Equality is promised in float32 and
wherever passes are native (docs/lossless.md); exits with 1 if an answer there differs. Where it isn't promised,
differences and near-ties among them are counted. In float32, some prompts are also continued greedily by transformers'
`generate`. Results are added to a FILE.json of the same seed and limit; those in it aren't computed again. No speed is
measured.
"""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import torch
from transformers.utils import logging

from benchmarks.harness import described, script, table
from eyas.bench.offline.certificate import first_difference, judge, scores_after
from eyas.cli.common import display
from eyas.drafters.base import Drafter
from eyas.drafters.loading import drafter_layout, drafter_of
from eyas.engine import Engine, Speculation
from eyas.engine.controller import Controller, CostModel, CostTable, Curve, RoundRecord, TreeArm
from eyas.engine.runner import state_columns
from eyas.files import write_json
from eyas.targets import Target, load_target
from eyas.targets.linears import prepack_linears
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import PackedLinear
from eyas.targets.native.packed import GGML
from eyas.targets.tokenizers import eos_token_ids
from eyas.tree import parse_tree
from eyas.types import Completion, GrammarSpec, Limits, Request, SamplingParams, Stats
from tests import gguf_models, pairs, quantized, tiny

T = TypeVar("T")

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "quantize": "int8"},
    "int4": {"dtype": torch.bfloat16, "quantize": "int4"},
}
"""Options of `load_target` for a float checkpoint."""
FORMATS = (*GGML, *quantized.INTEGERS)
"""File formats with weights that stay packed."""
_GGUF = {"llama": gguf_models.write_llama, "qwen3moe": gguf_models.write_moe}
_SHARED = {"embedding": "shared", "head": "shared"}
_REDUCED = {"draft_vocab_size": 200}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {"head_dim": 16}),
    "eagle1 with the target's head": ("eagle1", {"head_dim": 16, **_SHARED}),
    "eagle3": ("eagle3", {"head_dim": 16, **_REDUCED}),
    "eagle3 with the target's head": ("eagle3", {"head_dim": 16, **_REDUCED, **_SHARED}),
    "mla": ("mla", _REDUCED),
    "mlp": ("mlp", {}),
}
"""Kind and settings of random draft networks."""
PLAIN, ORACLE = "none", "often right"
ROW = 256
"""Minimum number of columns per row of a tight cache."""
GRAMMARS = (
    GrammarSpec("regex", r"[0-9]{1,3}(\.[0-9]{1,3}){3}( +[a-z]+)*"),
    GrammarSpec("choice", json.dumps(["return a", "return b", "return", "a + b"])),
    GrammarSpec("json_schema", json.dumps({"type": "array", "items": {"enum": ["clip", "coin", 7, None]}})),
)


@dataclass(frozen=True)
class Setting:
    """How requests are answered together."""

    drafter: str
    """A name in `DRAFTERS`, the oracle, or none: plain decoding in a batch."""
    tree: str
    """A value of `--tree`; `auto:COST` is the controller if each further token costs that share of a pass."""
    coupled: bool
    batch_size: int
    prefill_chunk: int
    prefix_tokens: int
    cached_tokens: int | None
    """The cache limit, without recurrent states; a tight limit preempts sequences."""


def random_setting(rng: Random) -> Setting:
    """A random drafter, tree, batch size and set of limits."""
    batch = rng.randint(1, 16)
    return Setting(
        drafter=rng.choice([PLAIN, *DRAFTERS, *[ORACLE] * 4]),
        tree=random_tree(rng),
        coupled=rng.random() < 0.7,
        batch_size=batch,
        prefill_chunk=rng.choice([3, 16, 512]),
        prefix_tokens=rng.choice([0, 400]),
        cached_tokens=rng.choice([None, ROW * ((batch + 1) // 2)]),
    )


def random_tree(rng: Random) -> str:
    """A chain, a static, dynamic or shared tree of random size, or the controller's choice in each round."""
    depth, width = rng.randint(1, 7), rng.randint(1, 6)
    nodes, threshold = rng.randint(1, 30), rng.choice(["", ",0.02", ",0.1"])
    return rng.choice(
        [
            f"chain:{depth}",
            f"static:{rng.choice(['eagle1', 'slim'])}",
            f"dynamic:{depth},{width},{nodes}{threshold}",
            f"shared:{depth},{width},{4 * nodes},{nodes}{threshold}",
            f"auto:{rng.choice([0.01, 0.1, 0.4])}",
        ]
    )


def random_requests(rng: Random, count: int, vocabulary: int) -> list[Request]:
    """Requests with prompts of 1 to 60 tokens, many with a common prefix, and random sampling parameters."""
    beginning = [rng.randrange(3, vocabulary) for _ in range(30)]
    made = []
    for index in range(count):
        length = 1 + min(int(rng.expovariate(1 / 14)), 59)
        shared = rng.randint(0, length - 1) if rng.random() < 0.4 else 0
        prompt = [rng.randrange(3, vocabulary) for _ in range(length)]
        prompt[: min(shared, 30)] = beginning[: min(shared, 30)]
        grammar = _sometimes(rng, 0.1, rng.choice(GRAMMARS), None)
        params = _random_params(rng, vocabulary, ends=grammar is not None)
        made.append(Request(tuple(prompt), params, id=str(index), grammar=grammar))
    return made


def _random_params(rng: Random, vocabulary: int, ends: bool) -> SamplingParams:
    token = rng.randrange(3, vocabulary)
    return SamplingParams(
        max_tokens=rng.randint(12, 24),
        temperature=_sometimes(rng, 0.6, rng.uniform(0.2, 1.8), 0.0),
        top_k=_sometimes(rng, 0.2, rng.randint(1, 50), 0),
        top_p=_sometimes(rng, 0.3, rng.uniform(0.3, 1.0), 1.0),
        min_p=_sometimes(rng, 0.2, rng.uniform(0.0, 0.2), 0.0),
        repetition_penalty=_sometimes(rng, 0.3, rng.uniform(0.8, 1.6), 1.0),
        presence_penalty=_sometimes(rng, 0.2, rng.uniform(-0.5, 1.5), 0.0),
        frequency_penalty=_sometimes(rng, 0.2, rng.uniform(-0.5, 1.5), 0.0),
        logit_bias=_sometimes(rng, 0.2, {token: rng.uniform(-5.0, 5.0)}, {}),
        min_tokens=_sometimes(rng, 0.2, rng.randint(1, 8), 0),
        stop_token_ids=_sometimes(rng, 0.2, (token,), ()),
        ignore_eos=not ends and rng.random() < 0.5,
        seed=rng.randrange(2**63),
        logprobs=_sometimes(rng, 0.2, rng.randint(0, 5), None),
    )


def _sometimes(rng: Random, share: float, value: T, otherwise: T) -> T:
    return value if rng.random() < share else otherwise


def save_family(family: str, precision: str, folder: Path, seed: int) -> Path:
    """Save a random model of an architecture with the tokenizer's vocabulary, in the form that users have."""
    fitting = tiny.fitting_recurrent if family in _RECURRENT else tiny.fitting
    sizes = {**fitting(family), "vocab_size": len(pairs.tokenizer())}
    if precision in GGML:
        _GGUF[family](folder, precision, vocab_size=sizes["vocab_size"])
    elif precision in FORMATS:
        quantized.write(folder, precision, family=family, **sizes)
    else:
        tiny.build_model(family, seed=seed, **sizes).save_pretrained(folder)
    return folder


_RECURRENT = (*tiny.RECURRENT, *tiny.SELDOM_RECURRENT)


@dataclass
class Bench:
    """A loaded target with drafters for it."""

    target: Target
    networks: dict[str, Any]

    @classmethod
    def load(cls, folder: Path, precision: str, seed: int) -> Bench:
        """Load a folder's model, and a random network for each of `DRAFTERS`, prepacked as `load_drafter` does."""
        target = load_target(folder, device="cpu", **PRECISIONS.get(precision, {"dtype": "auto"}))
        layout = drafter_layout(target)
        networks = {}
        for name, (kind, settings) in DRAFTERS.items():
            hidden = target.hidden_size
            sizes = {"vocab_size": target.vocab_size, "hidden_size": hidden, "target_hidden_size": hidden}
            network = tiny.network(kind, seed, **sizes, **settings)
            if "shared" in (network.config.embedding, network.config.head):
                network.borrow(target)
            networks[name] = network.to(target.dtype)
            if layout is not None:
                prepack_linears(networks[name], layout)
        return cls(target, networks)

    def alone(self, requests: Sequence[Request]) -> list[Completion]:
        """Plain answers, one request at a time."""
        return Engine(self.target, pairs.tokenizer()).generate(requests)

    def together(self, requests: Sequence[Request], setting: Setting, plain: Sequence[Completion]) -> list[Completion]:
        """Answers under a `setting`; the oracle knows the `plain` answers."""
        controller = speculation = None
        if setting.drafter != PLAIN:
            cost = setting.tree.removeprefix("auto:")
            fixed = cost == setting.tree
            controller = None if fixed else Simulated(float(cost))
            drafter = self._drafter(setting.drafter, requests, plain)
            speculation = Speculation(drafter, parse_tree(setting.tree) if fixed else None, setting.coupled)
        limits = Limits(
            max_running=setting.batch_size,
            max_cached_tokens=self._cached_tokens(setting),
            prefill_chunk=setting.prefill_chunk,
            prefix_tokens=setting.prefix_tokens,
        )
        engine = Engine(self.target, pairs.tokenizer(), speculation, controller=controller, limits=limits)
        return engine.generate(requests)

    def differs_from_transformers(self, requests: Sequence[Request]) -> int:
        """Number of the requests' prompts that greedy plain decoding continues differently from `generate`."""
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        done = Engine(self.target).generate([Request(request.prompt, params) for request in requests])
        model, most = self.target.model, params.max_tokens
        expected = [tiny.continuation(model, r.prompt, most, min_new_tokens=most) for r in requests]
        return sum(one.token_ids != other for one, other in zip(done, expected, strict=True))

    def _cached_tokens(self, setting: Setting) -> int | None:
        """The setting's limit plus room for its rows' recurrent states."""
        if setting.cached_tokens is None:
            return None
        copies = 2 if setting.prefix_tokens else 1  # the prefix cache keeps one of each row's states
        states = copies * state_columns(self.target.allocate(0))
        return setting.cached_tokens + setting.cached_tokens // ROW * states

    def _drafter(self, name: str, requests: Sequence[Request], plain: Sequence[Completion]) -> Drafter:
        if name == ORACLE:
            sequences = [[*request.prompt, *done.token_ids] for request, done in zip(requests, plain, strict=True)]
            return Oracle(sequences, (0, 2, tiny.LAYERS), vocab_size=self.target.vocab_size)
        network = self.networks[name]
        return drafter_of(network, network.config.taps or network.config.default_taps(tiny.LAYERS))


class Oracle(tiny.OracleDrafter):
    """Drafts the plain answers among wrong tokens; after an answer differs, only wrong tokens."""

    def _ahead(self, slot: int) -> list[int] | None:
        known = self._tokens[slot]
        fitting = (s[1 + len(known) :] for s in self._sequences if known and s[1 : 1 + len(known)] == known)
        return next(fitting, None)


class Simulated(Controller):
    """The controller of `--tree auto` with made-up times, so that it plans the same rounds on every machine."""

    def __init__(self, token: float) -> None:
        """A pass takes 1 second, plus `token` seconds for every token after the first."""
        nothing, little = (Curve(sizes=(1.0,), seconds=(seconds,)) for seconds in (0.0, 0.001))
        self._pass = Curve(sizes=(1.0, 256.0), seconds=(1.0, 1.0 + 255 * token))
        table = CostTable(
            measured_on="nowhere",
            pass_by_tokens=self._pass,
            pass_by_rows=nothing,
            column_seconds=0.0,
            padding_by_places=nothing,
            draft_by_rows=little,
            level_by_positions=little,
            observe_by_pairs=little,
        )
        super().__init__(CostModel(table), TreeArm(), clock=lambda: 0.0)

    def learn(self, record: RoundRecord) -> None:
        seconds = float(self._pass.at(record.tokens))
        super().learn(record._replace(draft_seconds=0.001, pass_seconds=seconds, seconds=seconds + 0.001))


Progress = Callable[[str, int, int | None], None]
"""Called with the stage, the number of answers done, and their total."""


@dataclass
class Cell:
    """A family in a precision: how many answers were compared, and how they differed."""

    family: str
    precision: str
    native: bool
    """Whether the target's passes are native."""
    packed_linears: int
    """Number of linears with 4-bit or 8-bit weights."""
    answers: int = 0
    tokens: int = 0
    equal: int = 0
    near_ties: int = 0
    """Answers that differ at a token where the two candidates score the same up to rounding."""
    generated: int = 0
    not_generated: int = 0
    """Prompts also continued greedily by `generate`, and those that plain decoding continues differently."""
    accept_length: float = 0.0
    logprob_gap: float = 0.0
    """The largest difference of an emitted token's log-probability, over equal answers that report them."""
    first: dict[str, Any] | None = None
    """The first difference, with everything needed to reproduce it."""

    @property
    def promised(self) -> bool:
        """Whether every answer should be equal."""
        return self.native or self.precision == "float32"

    @property
    def broken(self) -> bool:
        """Whether an answer differs although equality is promised."""
        return (self.promised and self.equal < self.answers) or self.not_generated > 0


def groups(rng: Random, requests: Sequence[Request]) -> Iterator[tuple[Setting, Sequence[Request]]]:
    """Cut requests into groups of one to two batches, each with a random setting."""
    done = 0
    while done < len(requests):
        setting = random_setting(rng)
        size = rng.randint(setting.batch_size, 2 * setting.batch_size)
        yield setting, requests[done : done + size]
        done += size


def run_cell(bench: Bench, family: str, precision: str, limit: int, seed: int, progress: Progress) -> Cell:
    """Compare `limit` answers of one model."""
    rng = Random(f"{seed} {family} {precision}")
    packed = sum(isinstance(module, PackedLinear) for module in bench.target.model.modules())
    cell = Cell(family, precision, bench.target.native is not None, packed)
    pooled = Stats()
    for setting, batch in groups(rng, random_requests(rng, limit, bench.target.vocab_size)):
        plain = bench.alone(batch)
        for request, one, other in zip(batch, plain, bench.together(batch, setting, plain), strict=True):
            pooled.merge(other.stats)
            compare(cell, bench, setting, request, one, other)
        if precision == "float32":
            cell.generated += 1
            cell.not_generated += bench.differs_from_transformers(batch[:1])
        progress(f"{precision}, {family}", cell.answers, limit)
    cell.tokens, cell.accept_length = pooled.tokens, round(pooled.accept_length, 3)
    return cell


def compare(cell: Cell, bench: Bench, setting: Setting, request: Request, plain: Completion, other: Completion) -> None:
    """Compare an answer with plain decoding's and count the result."""
    cell.answers += 1
    at = first_difference(plain.token_ids, other.token_ids)
    if at is None and plain.finish_reason == other.finish_reason:
        cell.equal += 1
        scores = zip(plain.logprobs or (), other.logprobs or (), strict=True)
        cell.logprob_gap = max([cell.logprob_gap, *(abs(a.logprob - b.logprob) for a, b in scores)])
        return
    where = None if at is None else difference(bench, request, plain, other, at)
    cell.near_ties += where is not None and where["near_tie"]
    if cell.first is None:
        ends = [plain.finish_reason, other.finish_reason]
        cell.first = {"request": asdict(request) | {"params": request.params.model_dump()}}
        cell.first |= {"setting": asdict(setting), "finish_reasons": ends, "at": where}


def difference(bench: Bench, request: Request, plain: Completion, other: Completion, at: int) -> dict[str, Any]:
    """Where two answers differ, and the gap between the two tokens there, which isn't computed under a grammar."""
    left, right = (done.token_ids[at] if at < len(done.token_ids) else None for done in (plain, other))
    gap = tolerance = None
    if request.grammar is None:
        stops = () if request.params.ignore_eos else eos_token_ids(bench.target.model)
        scores = scores_after(bench.target, request.params, request.prompt, plain.token_ids[:at], stops)
        gap, tolerance = judge(scores, left, right, bench.target.dtype)
    tie = gap is not None and tolerance is not None and gap <= tolerance
    return {"position": at, "plain": left, "other": right, "gap": gap, "tolerance": tolerance, "near_tie": tie}


def line(cell: Cell) -> dict[str, Any]:
    """A cell as a row of the printed table."""
    return {
        "family": cell.family, "precision": cell.precision, "passes": "native" if cell.native else "modules",
        "promised": "yes" if cell.promised else "no", "answers": cell.answers, "equal": cell.equal,
        "near-ties": cell.near_ties, "as generate": f"{cell.generated - cell.not_generated} of {cell.generated}",
        "accept length": cell.accept_length, "first difference": describe(cell),
    }  # fmt: skip


def describe(cell: Cell) -> str:
    """The first difference in words."""
    if cell.first is None:
        return "-"
    setting, at = cell.first["setting"], cell.first["at"]
    where = "its end" if at is None else f"token {at['position']}, {at['plain']} or {at['other']}"
    gap = "" if at is None or at["gap"] is None else f", gap {at['gap']:.2g} of {at['tolerance']:.2g}"
    how = f"{setting['drafter']}, {setting['tree']}, batch {setting['batch_size']}"
    return f"request {cell.first['request']['id']}, {where}{gap} ({how})"


def read_cells(path: Path, seed: int, limit: int) -> list[Cell]:
    """The cells of a file; none if there is no file, or if it has another seed or limit."""
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    if (content["seed"], content["limit"]) != (seed, limit):
        return []
    names = {field.name for field in fields(Cell)}
    return [Cell(**{name: value for name, value in cell.items() if name in names}) for cell in content["cells"]]


FAMILIES = (*tiny.ARCHITECTURES, *tiny.NATIVE_ONLY, *_RECURRENT)


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names, which must all be `known`."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return text.split(",")

    return parse


@script
def main(
    *,
    families: Annotated[list[str], "all by default", names(FAMILIES)] = list(FAMILIES),  # noqa: B006
    dtypes: Annotated[list[str], "all that run on this machine", names([*PRECISIONS, *FORMATS])] = list(PRECISIONS),  # noqa: B006
    limit: Annotated[int, "answers per family and precision"] = 500,
    seed: int = 0,
    output: Annotated[Path | None, "written after each family and precision; its results aren't computed again"] = None,
) -> int:
    logging.disable_progress_bar()
    wanted = [name for name in dtypes if name in ("float32", "bfloat16") or kernels() is not None]
    cells = [] if output is None else read_cells(output, seed, limit)
    done = {(cell.family, cell.precision) for cell in cells}
    with TemporaryDirectory() as folder, display.counting() as progress:
        for precision, family in product(wanted, families):
            if (family, precision) in done or (precision in GGML and family not in _GGUF):
                continue
            path = Path(folder) / f"{family}-{precision}.gguf"
            bench = Bench.load(save_family(family, precision, path, seed), precision, seed)
            cells.append(run_cell(bench, family, precision, limit, seed, progress))
            if output is not None:
                found = [asdict(cell) | {"promised": cell.promised, "broken": cell.broken} for cell in cells]
                write_json(output, described({"seed": seed, "limit": limit, "cells": found}))
    display.output().print(table([line(cell) for cell in cells]))
    return any(cell.broken for cell in cells)


if __name__ == "__main__":
    raise SystemExit(main())
