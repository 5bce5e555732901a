"""What each rule and constant of the controller is worth: recorded answers are decoded again in simulated time.

A recording holds answers, and for every position the whole beam that the drafter offers there (8 wide, 10 deep), so
that any tree which a controller may plan can be grown from it and walked. A replay decodes them under a controller.
Rounds take what a cost table says, times noise that only the controller's clock sees, plus what planning and drafting
take beyond it (`_PLAN` and so on, measured in service). So a difference of half a percent shows within seconds, on any
machine, whatever else it does.

    python -m benchmarks.replay record smollm2 smollm2 RECORDING.npz --prompts GSM8K.jsonl MT_BENCH.jsonl --limit 24
    python -m benchmarks.replay compare RECORDING.npz --variants explore._PROBE_BUDGET=0 texts._TOKENS=9,texts._DRAFTS=4

`compare` prints, for each scenario, how many times faster `auto` is than plain decoding, and by how many percent each
variant changes that. A variant assigns to names in modules of `eyas.engine.controller`.

Copies need no beams, as what was found follows from the tokens alone:

    python -m benchmarks.replay answers MODEL RECORDING.npz --prompts EDITS.jsonl HUMANEVAL.jsonl --costs COSTS.json
    python -m benchmarks.replay copies RECORDING.npz --method suffix

    python -m benchmarks.replay shapes RECORDING.npz --rows 1 4
    python -m benchmarks.replay lures RECORDING.npz --further 0.15

`copies` prints, for each set of prompts, how many times faster `auto` and the best of ten fixed shapes are than plain
decoding, from the first answer on and from the third. `shapes` does so for a network's drafts, and `lures` decodes
texts made to defeat them.

Shapes: P positions, M candidates of a beam, R rows, W beam nodes, K children offered by each.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.harness import Output, report, script
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.history import LookupDrafter
from eyas.drafters.options import DrafterOptions
from eyas.drafters.weightless.ngram import NgramDrafter
from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.engine.controller import Controller, CostModel, CostTable, Curve, RoundRecord, TreeArm, make_controller
from eyas.engine.round import VerifiedDraft
from eyas.options import EngineOptions, TargetOptions
from eyas.session import Session
from eyas.text.chats import Message
from eyas.text.prompts import PromptRow, read_prompts
from eyas.text.template import encode_chat
from eyas.tree import DraftTree, TreeSpec, parse_tree
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import ValueTable
from eyas.types import Owner, Request, SamplingParams
from eyas.verify import Coupling, Sampler

WIDTH, DEPTH = 8, 10
_BEAM = SharedTree(DEPTH, WIDTH, WIDTH + (DEPTH - 1) * WIDTH**2)
_UNKNOWN = -2
"""A token that no beam holds."""
_NEVER = -30.0
"""The log-probability of children that no beam held."""
_PLAN = 0.35e-3
_PLAN_AND_FIT = 0.7e-3
_ANALYSIS = 0.15e-3
_DRAFTED = 0.2e-3
"""Seconds of a plan, of one that also fits costs, of reading a draft's candidates, and of a drafted round's rest."""
_COLD = 0.08
"""The share by which a pass takes longer that follows one of the other kind, plain or drafted."""
CPU = torch.device("cpu")
Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


# Recording.


class Recorder(NetworkDrafter):
    """Drafts nothing, and keeps the whole beams that a drafter would have offered."""

    def __init__(self, drafter: NetworkDrafter, values: ValueTable, group: int) -> None:
        """Ranked by the `values` of nodes, for rows of a `group`."""
        super().__init__(drafter.proposer, drafter.taps, drafter.pairs)
        self._values = values
        self._group = group
        self.beams: list[DraftTree] = []

    def draft(
        self,
        rows: range,
        spec: TreeSpec,  # noqa: ARG002
        coupling: Coupling,
        drafting: Sequence[bool] | None = None,
    ) -> DraftTree:
        whole = PlannedTree(_BEAM, values=self._values, groups=(self._group,) * len(rows))
        self.beams.append(super().draft(rows, whole, coupling, drafting))
        return DraftTree.empty(len(rows), CPU)


def record(
    model: str,
    draft_model: str,
    recording: Path,
    *,
    prompts: Sequence[Path],
    limit: Annotated[int, "prompts of each file"] = 24,
    max_new_tokens: int = 160,
    temperature: float = 0.0,
) -> None:
    """Record answers, the beams at all of their positions, and this machine's costs."""
    session = Session.open(TargetOptions(model))
    drafter = session.drafter(DrafterOptions(draft_model, None))
    controller = make_controller(session.target, drafter, "auto", 8)
    assert isinstance(controller.arm, TreeArm)
    assert isinstance(drafter, NetworkDrafter)
    recorder = Recorder(drafter, controller.arm.gain.values, int(temperature > 0.0))
    engine = session.engine(drafter, EngineOptions(_BEAM, batch_size=1, around=lambda _, __: recorder))
    arrays: dict[str, Any] = {"costs": np.array(controller.costs.table.model_dump_json())}
    number = 0
    for path in prompts:
        texts = [row.said for row in read_prompts(path) if isinstance(row, PromptRow)]
        for text in texts[:: max(1, len(texts) // limit)][:limit]:
            ids = tuple(encode_chat(session.tokenizer, [Message(role="user", content=text or "")]))
            recorder.beams.clear()
            params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=number)
            (done,) = engine.generate([Request(ids, params, chat=True)])
            beams = [beam for beam in recorder.beams if beam.size == _BEAM.budget]
            if len(beams) < WIDTH:
                continue
            arrays |= {
                f"{number}.answer": np.array(done.token_ids),
                f"{number}.about": np.array([path.stem, str(len(ids))]),
                f"{number}.tokens": torch.cat([beam.tokens for beam in beams]).to(torch.int32).numpy(),
                f"{number}.parents": torch.cat([beam.parents for beam in beams]).to(torch.int16).numpy(),
                f"{number}.logprob": torch.cat([beam.logprob for beam in beams]).numpy(),
            }
            number += 1
        print(f"{path.stem}: {number} answers so far", flush=True)
    np.savez(recording, **arrays)


# Replaying.


@dataclass
class Answer:
    """An answer and the beams below its positions; the beam p continues the tokens up to p."""

    kind: str
    prompt: int
    """Tokens of its prompt."""
    tokens: list[int]
    ids: Indices  # [P, M]
    parents: Indices  # [P, M], -1 = the root
    logprob: Floats  # [P, M] of the paths

    @cached_property
    def steps(self) -> Floats:
        """[P, M] log-probabilities of nodes given their parents."""
        above = np.take_along_axis(np.pad(self.logprob, ((0, 0), (1, 0))), self.parents + 1, 1)
        steps: Floats = np.minimum(self.logprob - above, np.float32(0.0))
        return steps

    @cached_property
    def first(self) -> Indices:
        """[P, 1 + M] the first of a node's children, which are consecutive; -1 = it has none. Index 0 is the root."""
        found = np.full((self.ids.shape[0], self.ids.shape[1] + 1), -1)
        starts = np.arange(0, self.ids.shape[1], WIDTH)
        for row, parents in zip(found, self.parents, strict=True):
            row[parents[starts] + 1] = starts
        return found

    def guessed(self, at: int) -> int:
        """How many of the likeliest guesses after position `at` come true."""
        node = -1
        for right, wanted in enumerate(self.tokens[at + 1 :]):
            node = int(self.first[at, node + 1])
            if node < 0 or self.ids[at, node] != wanted:
                return right
        return len(self.tokens) - at - 1


def lure(answers: Sequence[Answer], draw: np.random.Generator, stretch: int, length: int = 160) -> Answer:
    """A text made to defeat drafts (arXiv 2610.10929): easy to guess for a `stretch` of tokens, then not, and so on.

    Easy stretches are some of the best guessed ones of `answers`. In between no guess comes true, and the drafter is as
    sure of itself: it offers the beams of easy ones.
    """
    found = [
        (sum(answer.guessed(at) for at in range(first, first + stretch)), number, first)
        for number, answer in enumerate(answers)
        for first in range(0, len(answer.tokens) - stretch - 1, stretch)
    ]
    easy = sorted(found, reverse=True)[: max(8, len(found) // 50)]
    tokens = [_UNKNOWN]
    beams = list[tuple[Indices, Indices, Floats]]()
    while len(tokens) < length:
        for true in (True, False):
            _, number, first = easy[draw.integers(len(easy))]
            source, part = answers[number], slice(first, first + stretch)
            beams.append((source.ids[part], source.parents[part], source.logprob[part]))
            tokens += source.tokens[first + 1 : first + stretch + 1] if true else [_UNKNOWN] * stretch
    ids, parents, logprob = (np.concatenate(parts) for parts in zip(*beams, strict=True))
    return Answer("lure", 100, tokens, ids, parents, logprob)


def load(recording: Path, further: float = 1.0) -> tuple[list[Answer], CostTable]:
    """The answers of a recording, and the costs of the machine that made it.

    Its passes' further tokens take only the share `further` of their time, as where wide passes are cheap.
    """
    with np.load(recording) as file:
        answers = list[Answer]()
        while f"{len(answers)}.answer" in file:
            number = len(answers)
            kind, prompt = file[f"{number}.about"].tolist()
            ids, parents = (file[f"{number}.{name}"].astype(np.int64) for name in ("tokens", "parents"))
            tokens = file[f"{number}.answer"].tolist()
            answers.append(Answer(kind, int(prompt), tokens, ids, parents, file[f"{number}.logprob"]))
        costs = CostTable.model_validate_json(str(file["costs"]))
    seconds = np.array(costs.pass_by_tokens.seconds)
    passes = costs.pass_by_tokens.model_copy(
        update={"seconds": tuple((seconds[0] + further * (seconds - seconds[0])).tolist())}
    )
    return answers, costs.model_copy(update={"pass_by_tokens": passes})


@dataclass
class Row:
    """An answer that is being written."""

    answer: Answer
    text: int
    """Its number."""
    at: int = 0
    """The position of its latest token."""
    unread: int = 0
    """Pairs that the drafter has deferred."""

    @property
    def length(self) -> int:
        return self.answer.prompt + self.at + 1

    @property
    def done(self) -> bool:
        return self.at >= len(self.answer.tokens) - 1

    def children(self, node: int, count: int) -> tuple[list[int], list[int], list[float]]:
        """The `count` best children of a beam's node (-1 = the root): nodes, tokens, log-probabilities."""
        start = int(self.answer.first[self.at, node + 1]) if node >= -1 else -1
        found = slice(start, start + min(count, WIDTH)) if start >= 0 else slice(0, 0)
        nodes = list(range(found.start, found.stop))
        missing = count - len(nodes)
        return (
            nodes + [-2] * missing,
            self.answer.ids[self.at, found].tolist() + [-1] * missing,
            self.answer.steps[self.at, found].tolist() + [_NEVER] * missing,
        )

    def path(self, tree: DraftTree, row: int) -> list[int]:
        """The nodes that the target follows; the answer's last token ends a round of its own."""
        parents, tokens, valid = (part[row].tolist() for part in (tree.parents, tree.tokens, tree.valid))
        path = [0]
        above = -1
        for wanted in self.answer.tokens[self.at + 1 : -1]:
            nodes = (
                n for n in range(above + 1, len(tokens)) if valid[n] and parents[n] == above and tokens[n] == wanted
            )
            above = next(nodes, -1)
            if above < 0:
                break
            path.append(above + 1)
        return path


def grown(spec: TreeSpec, rows: Sequence[Row]) -> DraftTree:
    """The trees that the drafter would have drafted."""
    growth = spec.start(len(rows), CPU)
    nodes = [[-1] for _ in rows]
    while True:
        offered = [[row.children(node, growth.fanout) for node in beam] for row, beam in zip(rows, nodes, strict=True)]
        steps = torch.tensor([[logprobs for _, _, logprobs in beam] for beam in offered])  # [R, W, K]
        frontier = growth.expand(steps, torch.tensor([[tokens for _, tokens, _ in beam] for beam in offered]))
        if frontier is None:
            return growth.tree()
        nodes = [
            [offered[row][above][0][offered[row][above][1].index(token)] for token, above in zip(*beam, strict=True)]
            for row, beam in enumerate(zip(frontier.tokens.tolist(), frontier.parents.tolist(), strict=True))
        ]


@dataclass(frozen=True)
class Noise:
    """What the controller's clock sees of the machine."""

    each: float = 0.03
    """The spread of single rounds."""
    drift: float = 0.05
    """The spread of the machine's speed, which changes within some fifty rounds."""
    switch: float = 0.0
    """How often it becomes half as slow again, or fast again."""
    late: float = 0.01
    """The share of rounds that take half as long again."""

    def factors(self, draw: np.random.Generator) -> Iterator[float]:
        """The factor of each round."""
        log = slow = 0.0
        while True:
            log = 0.98 * log + self.drift * math.sqrt(1.0 - 0.98**2) * draw.standard_normal()
            slow = 0.4 - slow if draw.random() < self.switch else slow
            late = 1.5 if draw.random() < self.late else 1.0
            yield late * math.exp(log + slow + self.each * draw.standard_normal())


class Replay:
    """Decodes answers, `rows` at a time; `seconds` are the true ones."""

    def __init__(self, costs: CostTable, rows: int, noise: Iterator[float], sampled: bool) -> None:
        """For rounds that take what `costs` say, and look as `noise` says."""
        self.seconds = 0.0
        self._costs = CostModel(costs)
        self._rows = rows
        self._noise = noise
        self._sampled = sampled
        self._live: list[Row] = []
        self._begun = 0
        """Answers so far."""
        self.taken: dict[int, float] = {}
        """The seconds of each answer from its beginning to its end, by its number."""
        self._host = 0.0
        """Seconds that the controller has taken since the last round."""
        self._drafted = False

    def clock(self) -> float:
        """The time that the controller sees."""
        return self.seconds + self._host

    def controller(self, costs: CostModel) -> Controller:
        """A controller whose plans and analyses take time."""
        arm = TreeArm()
        settle, learn = arm.gain.settle, arm.gain.learn

        def plan(*, values: bool = True) -> None:
            settle(values=values)
            self._host += _PLAN_AND_FIT if values else _PLAN

        def analyze(texts: Sequence[int], draft: VerifiedDraft, *args: Any) -> None:
            learn(texts, draft, *args)
            self._host += _ANALYSIS * (draft.tree.network.candidates is not None)

        arm.gain.settle = plan  # type: ignore[method-assign]
        arm.gain.learn = analyze  # type: ignore[method-assign, assignment]
        return Controller(costs, arm, clock=self.clock)

    def run(self, answers: Sequence[Answer], chosen: Controller | TreeSpec | None) -> float:
        """The seconds that all answers take under a controller, or with a fixed tree; None = by plain rounds."""
        waiting = list(answers)
        while waiting or self._live:
            pairs = 0
            while waiting and len(self._live) < self._rows:
                answer = waiting.pop(0)
                self._live.append(Row(answer, self._begun, unread=answer.prompt))
                self.taken[self._begun] = -self.seconds
                self._begun += 1
                pairs += answer.prompt
            self._round(chosen, pairs)
            for row in self._live:
                if row.done:
                    self.taken[row.text] += self.seconds
            self._live = [row for row in self._live if not row.done]
        return self.seconds

    def _round(self, chosen: Controller | TreeSpec | None, pairs: int) -> None:
        live, costs = self._live, self._costs
        texts, lengths = [row.text for row in live], [row.length for row in live]
        overhead = self._spend()
        spec = chosen if isinstance(chosen, TreeSpec) else None
        if isinstance(chosen, Controller):
            spec = chosen.plan(texts, lengths, [self._sampled] * len(live), [row.unread for row in live])
        tree = DraftTree.empty(len(live), CPU)
        drafting = 0.0
        observing = 0.0
        if spec is not None:
            tree = grown(spec, live)
            unread = sum(row.unread for row in live)
            levels = spec.depth if spec is chosen else tree.network.levels  # a fixed shape drafts all of its levels
            drafting = float(costs.draft_seconds(len(live), spec.max_fanout, levels))
            drafting += float(costs.observe_seconds(unread, len(live))) if unread else 0.0
        paths = [row.path(tree, index) for index, row in enumerate(live)]
        emitted = sum(map(len, paths))
        counts = tree.valid.sum(1).tolist() or [0] * len(live)
        nodes = sum(counts)
        padded = len(live) * max(counts) - sum(counts)
        passing = float(costs.pass_seconds(len(live) + nodes, len(live), lengths))
        passing += float(costs.padding_seconds(padded, len(live))) if padded else 0.0
        passing *= 1.0 + _COLD * (self._drafted != (spec is not None))
        self._drafted = spec is not None
        if spec is not None:
            observing = float(costs.observe_seconds(emitted, len(live))) + _DRAFTED
        factor = next(self._noise)
        self.seconds += drafting + passing + observing
        if isinstance(chosen, Controller):
            draft = None if spec is None else VerifiedDraft(tree, paths)
            seconds = factor * (drafting + passing + observing)
            chosen.learn(
                RoundRecord(
                    texts,
                    lengths,
                    spec,
                    draft,
                    factor * drafting,
                    factor * passing,
                    len(live) + nodes,
                    emitted,
                    seconds,
                    None,
                    overhead,
                    pairs,
                )
            )
        for row, path in zip(live, paths, strict=True):
            row.at += len(path)
            row.unread = 0 if spec is not None else row.unread + 1

    def _spend(self) -> float:
        """The seconds that the controller has taken since the last round, which now count."""
        host = self._host
        self._host = 0.0
        self.seconds += host
        return host


# Copies.

SHAPES = (
    "chain:1",
    "chain:2",
    "chain:4",
    "chain:8",
    "chain:12",
    "chain:16",
    "chain:24",
    "dynamic:8,2,8",
    "dynamic:12,4,16",
    "dynamic:32,8,32",
)
"""The fixed shapes with which `auto` is compared."""
_SEARCH = 0.06e-3
"""Seconds of a search in one row's tokens, measured in service."""


def answers(
    model: str,
    recording: Path,
    *,
    prompts: Sequence[Path],
    limit: Annotated[int, "prompts of each file"] = 16,
    max_new_tokens: int = 300,
    temperature: float = 0.0,
    costs: Annotated[
        Path | None, "a `--costs` file of the model with `--method suffix`; made if it isn't there"
    ] = None,
) -> None:
    """Record plain answers, with the tokens of their prompts, and this machine's costs."""
    session = Session.open(TargetOptions(model))
    drafter = session.drafter(DrafterOptions(None, "suffix"))
    controller = make_controller(session.target, drafter, "auto", 4, costs)
    engine = session.engine(None, EngineOptions(None, batch_size=1))
    arrays: dict[str, Any] = {"costs": np.array(controller.costs.table.model_dump_json())}
    number = 0
    for path in prompts:
        said = [row.said for row in read_prompts(path) if isinstance(row, PromptRow)]
        for text in said[:: max(1, len(said) // limit)][:limit]:
            ids = tuple(encode_chat(session.tokenizer, [Message(role="user", content=text or "")]))
            params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=number)
            (done,) = engine.generate([Request(ids, params, chat=True)])
            arrays |= {
                f"{number}.answer": np.array(done.token_ids),
                f"{number}.prompt": np.array(ids),
                f"{number}.about": np.array([path.stem, str(len(ids))]),
            }
            number += 1
            np.savez(recording, **arrays)
        print(f"{path.stem}: {number} answers so far", flush=True)


@dataclass
class Written:
    """An answer of which only the tokens are known."""

    kind: str
    prompt: list[int]
    tokens: list[int]


class CopyReplay:
    """Decodes answers, `rows` at a time, with what a lookup drafter finds; `seconds` are the true ones."""

    def __init__(self, costs: CostTable, drafter: LookupDrafter, noise: Iterator[float], rows: int) -> None:
        self.seconds = 0.0
        self.rate = 0.0
        """Tokens per second while no row was empty: how long the last rows take alone is chance."""
        self._costs = CostModel(costs)
        self._drafter = drafter
        self._sampler = Sampler(rows, 1, CPU)
        self._noise = noise
        self._rows = rows
        self._live: list[tuple[int, int]] = []
        """The number of the answer in each row, and how many of its tokens are written."""
        self._drafter.pairs.resize(rows)

    def clock(self) -> float:
        """The time that the controller sees."""
        return self.seconds

    def run(self, answers: Sequence[Written], chosen: Controller | TreeSpec | None) -> list[float]:
        """The seconds that each answer takes under a controller, with a fixed shape, or by plain rounds (None)."""
        taken = [0.0] * len(answers)
        begun = 0
        written = 0
        while begun < len(answers) or self._live:
            while begun < len(answers) and len(self._live) < self._rows:
                row = len(self._live)
                self._drafter.pairs.begin(row, answers[begun].prompt, Owner("user"))
                self._live.append((begun, 1))
                self._commit(row, [*answers[begun].prompt[1:], answers[begun].tokens[0]])
                begun += 1
            before = self.seconds
            written += self._round(answers, chosen)
            if begun < len(answers):
                self.rate = written / self.seconds
            for number, _ in self._live:
                taken[number] += self.seconds - before
            for row in reversed(range(len(self._live))):
                number, at = self._live[row]
                if at >= len(answers[number].tokens):
                    self._end(row)
        return taken

    def _end(self, row: int) -> None:
        """End the answer in a row; the last row takes its place, as in an engine."""
        last = len(self._live) - 1
        self._drafter.finish(row)
        if row != last:
            self._drafter.pairs.move(last, row)
            self._live[row] = self._live[last]
        self._drafter.pairs.truncate(last, 0)
        self._live.pop()

    def _round(self, answers: Sequence[Written], chosen: Controller | TreeSpec | None) -> int:
        """Decode a round; returns the tokens that it wrote."""
        rows = len(self._live)
        texts = [number for number, _ in self._live]
        lengths = [len(answers[n].prompt) + at for n, at in self._live]
        spec = chosen
        if isinstance(chosen, Controller):
            spec = chosen.plan(texts, lengths, [False] * rows, [0] * rows)
        assert not isinstance(spec, Controller)
        tree = DraftTree.empty(rows, CPU)
        if spec is not None:
            tree = self._drafter.draft(range(rows), spec, self._sampler.coupling(range(rows), True))
        paths = [self._path(tree, row, answers[number].tokens[at:-1]) for row, (number, at) in enumerate(self._live)]
        emitted = [
            answers[number].tokens[at : at + len(path)] for (number, at), path in zip(self._live, paths, strict=True)
        ]
        counts = tree.valid.sum(1).tolist() or [0] * rows
        padded = rows * max(counts) - sum(counts)
        passing = float(self._costs.pass_seconds(float(rows + sum(counts)), rows, lengths))
        passing += float(self._costs.padding_seconds(padded, rows)) if padded else 0.0
        drafting = _SEARCH * rows * (spec is not None)
        factor = next(self._noise)
        self.seconds += passing + drafting
        if isinstance(chosen, Controller):
            draft = None if spec is None else VerifiedDraft(tree, paths, emitted)
            chosen.learn(
                RoundRecord(
                    texts,
                    lengths,
                    spec,
                    draft,
                    factor * drafting,
                    factor * passing,
                    rows + sum(counts),
                    sum(map(len, emitted)),
                    factor * (drafting + passing),
                )
            )
        for row, tokens in enumerate(emitted):
            number, at = self._live[row]
            self._live[row] = number, at + len(tokens)
            self._commit(row, tokens)
        return sum(map(len, emitted))

    @staticmethod
    def _path(tree: DraftTree, row: int, wanted: Sequence[int]) -> list[int]:
        """The nodes that the target follows."""
        parts = (tree.parents[row].tolist(), tree.tokens[row].tolist(), tree.valid[row].tolist())
        nodes = list(zip(*parts, strict=True))
        path = [0]
        above = -1
        for token in wanted:
            above = next((n for n, node in enumerate(nodes) if node == (above, token, True)), -1)
            if above < 0:
                break
            path.append(above + 1)
        return path

    def _commit(self, row: int, tokens: Sequence[int]) -> None:
        taps = torch.zeros(1, len(tokens), 0, 1)
        self._drafter.observe(range(row, row + 1), torch.tensor([tokens]), taps, [len(tokens)])


def made_up(draw: np.random.Generator, count: int = 8, length: int = 200) -> list[Written]:
    """Texts that no model wrote: of random tokens, copies that stop, and texts made to defeat copies."""
    made = []
    for _ in range(count):
        prompt = draw.integers(50_000, size=400).tolist()
        new = draw.integers(50_000, 100_000, size=length).tolist()
        at = int(draw.integers(200))
        # easy to guess, then not, again and again: a copied passage, then pairs of tokens that always go on otherwise
        lure = list[int]()
        while len(lure) < length:
            start = int(draw.integers(350))
            lure += prompt[start : start + 20]
            for start in draw.integers(390, size=8).tolist():
                lure += [*prompt[start : start + 2], new[len(lure) % length]]
        made += [
            Written("random", prompt, new),
            Written("stops", prompt, [*prompt[at : at + length // 4], *new[: 3 * length // 4]]),
            Written("lure", prompt, lure[:length]),
        ]
    return made


def copies(
    recording: Path,
    *,
    method: str = "suffix",
    costs: Annotated[Path | None, "other costs than the recording's"] = None,
    rows: Annotated[int, "answers that are decoded together"] = 1,
    seeds: int = 2,
    output: Output = None,
) -> None:
    """`auto` and fixed shapes with copies, by set, nothing learned before; speedups over plain decoding.

    Sets of texts that no model wrote are added: `random`, `stops` (copies that end) and `lure` (made to defeat copies).
    With several rows, recorded answers of all sets are mixed, and speedups are of the time in which no row is empty.
    """
    torch.set_num_threads(1)
    with np.load(recording) as file:
        table = CostTable.model_validate_json(str(file["costs"]) if costs is None else costs.read_text())
        read = [
            Written(str(file[f"{n}.about"][0]), file[f"{n}.prompt"].tolist(), file[f"{n}.answer"].tolist())
            for n in range(sum(name.endswith(".answer") for name in file))
        ]
    make = {"suffix": SuffixDrafter, "ngram": NgramDrafter}[method]
    if rows > 1:
        read = [replace(answer, kind="recorded") for answer in read]
    read += made_up(np.random.default_rng(0), max(8, 3 * rows))
    found: list[dict[str, Any]] = []
    for kind in dict.fromkeys(answer.kind for answer in read):
        own = [answer for answer in read if answer.kind == kind and len(answer.tokens) > 1]
        if len(own) < 2 * rows > 2:
            continue  # most of the time some rows would be empty
        taken: dict[str, list[list[float]]] = {}
        whole: dict[str, float] = {}
        for seed in range(seeds):
            draw = np.random.default_rng(seed)
            order = [own[index] for index in draw.permutation(len(own))]
            for name in ("plain", "auto", *SHAPES):
                replay = CopyReplay(table, make(CPU), Noise().factors(draw), rows)
                chosen: Controller | TreeSpec | None = None
                if name == "auto":
                    chosen = Controller(CostModel(table), TreeArm(computes=False, looks_up=True), clock=replay.clock)
                elif name != "plain":
                    chosen = parse_tree(name)
                taken.setdefault(name, []).append(replay.run(order, chosen))
                rate = sum(len(one.tokens) - 1 for one in own) / replay.seconds if rows == 1 else replay.rate
                whole[name] = whole.get(name, 0.0) + 1.0 / rate
        speedup = {name: whole["plain"] / seconds for name, seconds in whole.items()}
        best = max(SHAPES, key=speedup.__getitem__)
        row = {
            "set": kind,
            "auto": round(speedup["auto"], 3),
            "best shape": best,
            "its speedup": round(speedup[best], 3),
            "auto / best": round(speedup["auto"] / max(1.0, speedup[best]), 3),
        }
        if rows == 1:
            later = {name: sum(sum(run[2:]) for run in runs) for name, runs in taken.items()}
            pairs = zip(taken["plain"], taken["auto"], strict=True)
            row["worst answer"] = round(min(one / other for run in pairs for one, other in zip(*run, strict=True)), 3)
            if len(own) > 2:
                fastest = min(later["plain"], *map(later.__getitem__, SHAPES))
                row["from the third"] = round(fastest / later["auto"], 3)
        found.append(row)
    about = {"answers": len(read), "method": method, "rows": rows, "unit": "times plain decoding"}
    report(about, output, found)


# Comparing.


@dataclass(frozen=True)
class Scenario:
    """How answers are decoded."""

    rows: int = 1
    noise: Noise = Noise()
    wrong: float = 0.0
    """The spread of start-up costs around the true ones."""
    plain: float = 1.0
    """The factor by which start-up costs of plain rounds are wrong."""
    hopeless: int = 0
    """If above 0, answers are cut to so many tokens, of which the drafter guesses none."""

    def speedup(self, answers: Sequence[Answer], costs: CostTable, seed: int, sampled: bool) -> float:
        """How many times faster a controller decodes the answers, in some order, than plain rounds do."""
        draw = np.random.default_rng(seed)
        order = [answers[index] for index in draw.permutation(len(answers))]
        if self.hopeless:
            order = [replace(answer, tokens=[_UNKNOWN] * min(self.hopeless, len(answer.tokens))) for answer in order]
        plain = Replay(costs, self.rows, self.noise.factors(draw), sampled).run(order, None)
        replay = Replay(costs, self.rows, self.noise.factors(draw), sampled)
        known = CostModel(self._measured(costs, draw))
        return plain / replay.run(order, replay.controller(known))

    def _measured(self, costs: CostTable, draw: np.random.Generator) -> CostTable:
        def noisy(curve: Curve, first: float = 1.0) -> Curve:
            factors = np.exp(self.wrong * draw.standard_normal(len(curve.seconds)))
            factors[0] *= first
            return Curve(sizes=curve.sizes, seconds=tuple((factors * np.array(curve.seconds)).tolist()))

        names = ("draft_by_rows", "level_by_positions", "observe_by_pairs")
        changed = {name: noisy(getattr(costs, name)) for name in names}
        return costs.model_copy(update={"pass_by_tokens": noisy(costs.pass_by_tokens, self.plain), **changed})


ONE = Scenario()
SCENARIOS = {
    "1": ONE,
    "4": replace(ONE, rows=4),
    "8": replace(ONE, rows=8),
    "1 dear": replace(ONE, wrong=0.12, plain=0.85),
    "1 cheap": replace(ONE, wrong=0.12, plain=1.15),
    "4 cheap": replace(ONE, rows=4, wrong=0.12, plain=1.15),
    "1 noisy": replace(ONE, noise=Noise(0.05, 0.08, 1 / 300, 0.03)),
    "1 vain": replace(ONE, hopeless=32),
    "4 vain": replace(ONE, rows=4, hopeless=32),
}


@contextmanager
def assigned(variant: str) -> Iterator[None]:
    """The controller with other constants: `explore._STRETCH=4,gain._HOPE=0`."""
    saved = []
    for part in filter(None, variant.split(",")):
        name, _, value = part.partition("=")
        module, _, constant = name.rpartition(".")
        home = importlib.import_module(f"eyas.engine.controller.{module}")
        saved.append((home, constant, getattr(home, constant)))
        setattr(home, constant, tuple(value) if isinstance(value := json.loads(value), list) else value)
    yield
    for home, constant, value in saved:
        setattr(home, constant, value)


def compare(
    recording: Path,
    *,
    variants: Annotated[Sequence[str], "MODULE.NAME=VALUE[,...]; values as JSON"] = (),
    seeds: int = 2,
    sampled: Annotated[bool, "the recording has a temperature"] = False,
    output: Output = None,
) -> None:
    """The speedup in each scenario, and how much each variant changes it."""
    torch.set_num_threads(1)
    answers, costs = load(recording)

    def speedups(variant: str) -> dict[str, float]:
        with assigned(variant):
            return {
                name: float(np.mean([one.speedup(answers, costs, seed, sampled) for seed in range(seeds)]))
                for name, one in SCENARIOS.items()
            }

    base = speedups("")
    rows: list[dict[str, Any]] = [{"variant": "speedup", **{name: round(value, 3) for name, value in base.items()}}]
    for variant in variants:
        found = speedups(variant)
        rows.append(
            {"variant": variant, **{name: round(100.0 * (found[name] / base[name] - 1.0), 1) for name in SCENARIOS}}
        )
        print(rows[-1], flush=True)
    report({"answers": len(answers), "seeds": seeds, "unit": "percent of `speedup`"}, output, rows)


DRAFTED = (
    "chain:1",
    "chain:2",
    "chain:3",
    "chain:4",
    "chain:6",
    "chain:8",
    "dynamic:3,2,6",
    "dynamic:4,3,8",
    "dynamic:5,4,15",
    "dynamic:8,4,24",
)
"""The fixed shapes with which a network's trees are compared."""


def shapes(
    recording: Path,
    *,
    rows: Annotated[Sequence[int], "answers that are decoded together; 1: a result for each set"] = (1, 4),
    further: Annotated[float, "seconds of a pass's further tokens, as a share of the recording's"] = 1.0,
    seeds: int = 2,
    sampled: Annotated[bool, "the recording has a temperature"] = False,
    output: Output = None,
) -> None:
    """`auto` and fixed shapes with a network's drafts, nothing learned before; speedups over plain decoding."""
    torch.set_num_threads(1)
    recorded, costs = load(recording, further)
    sets = dict.fromkeys(answer.kind for answer in recorded)
    found: list[dict[str, Any]] = []
    for count, kind in [(n, kind) for n in rows for kind in (("all",) if n > 1 else sets)]:
        own = [answer for answer in recorded if kind in ("all", answer.kind)]
        seconds: dict[str, float] = {}
        for seed in range(seeds):
            draw = np.random.default_rng(seed)
            order = [own[index] for index in draw.permutation(len(own))]
            for name in ("plain", "auto", *DRAFTED):
                replay = Replay(costs, count, Noise().factors(draw), sampled)
                chosen: Controller | TreeSpec | None = parse_tree(name) if name in DRAFTED else None
                if name == "auto":
                    chosen = replay.controller(CostModel(costs))
                seconds[name] = seconds.get(name, 0.0) + replay.run(order, chosen)
        best = min(DRAFTED, key=seconds.__getitem__)
        found.append(
            {
                "rows": count,
                "set": kind,
                "auto": round(seconds["plain"] / seconds["auto"], 3),
                "best shape": best,
                "its speedup": round(seconds["plain"] / seconds[best], 3),
                "auto / best": round(min(seconds["plain"], seconds[best]) / seconds["auto"], 3),
            }
        )
    about = {"recorded": len(recorded), "further": further, "seeds": seeds, "unit": "times plain decoding"}
    report(about, output, found)


STRETCHES = (2, 4, 8, 16, 32, 64)
"""Tokens of a stretch that is easy to guess, or isn't."""


def lures(
    recording: Path,
    *,
    further: Annotated[float, "seconds of a pass's further tokens, as a share of the recording's"] = 1.0,
    seeds: int = 3,
    output: Output = None,
) -> None:
    """Answers made to defeat a network's drafts, alone and beside three recorded ones: their speed over plain rounds.

    One row for each length of the stretches, number of rows, and number of recorded answers that came before.
    """
    torch.set_num_threads(1)
    recorded, costs = load(recording, further)
    found: list[dict[str, Any]] = []
    for rows, before, stretch in itertools.product((1, 4), (0, 12), STRETCHES):
        draw = np.random.default_rng(stretch)
        made = [lure(recorded, draw, stretch) for _ in range(8)]
        ratios: dict[str, list[float]] = {"lure": [], "others": []}
        for seed in range(seeds):
            others = [recorded[index] for index in np.random.default_rng(seed).permutation(len(recorded))]
            order, others = others[:before], others[before:]
            for one in made:
                order += [one, *others[: rows - 1]]
                others = others[rows - 1 :]
            noise = [Noise().factors(np.random.default_rng(seed)) for _ in range(2)]
            plain, auto = (Replay(costs, rows, factors, False) for factors in noise)
            plain.run(order, None)
            auto.run(order, auto.controller(CostModel(costs)))
            for number, answer in enumerate(order[before:], before):
                kind = "lure" if answer.kind == "lure" else "others"
                ratios[kind].append(plain.taken[number] / auto.taken[number])
        row: dict[str, float] = {"rows": rows, "before": before, "stretch": stretch}
        for kind, known in ratios.items():
            if known:
                row |= {kind: round(float(np.mean(known)), 3), f"worst of {kind}": round(min(known), 3)}
        found.append(row)
    about = {"recorded": len(recorded), "further": further, "seeds": seeds, "unit": "times plain decoding"}
    report(about, output, found)


main = script(record, compare, answers, copies, shapes, lures)
if __name__ == "__main__":
    raise SystemExit(main())
