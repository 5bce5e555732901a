"""Random cases of `lossless_families`: targets of every architecture, drafters that disagree, trees, batches, requests.

All of it is drawn from one `random.Random`, so a seed gives the same cases everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch

from eyas.drafters.base import Drafter
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import drafter_layout
from eyas.engine import Engine, Speculation
from eyas.engine.controller import Controller, CostModel, CostTable, Curve, RoundRecord
from eyas.targets import Target, load_target
from eyas.targets.linears import prepack_linears
from eyas.tree import parse_tree
from eyas.types import Completion, GrammarSpec, Limits, Request, SamplingParams
from tests import pairs, tiny

T = TypeVar("T")

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "quantize": "int8"},
}
"""Options of `load_target`; int8 weights are multiplied by bfloat16 states."""
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
GRAMMARS = (
    GrammarSpec("regex", r"[0-9]{1,3}(\.[0-9]{1,3}){3}( +[a-z]+)*"),
    GrammarSpec("choice", json.dumps(["return a", "return b", "return", "a + b"])),
    GrammarSpec("json_schema", json.dumps({"type": "array", "items": {"enum": ["clip", "coin", 7, None]}})),
)


@dataclass(frozen=True)
class Setting:
    """How some requests are answered together."""

    drafter: str
    """A name in `DRAFTERS`, the oracle, or none: plain decoding in a batch."""
    tree: str
    """As `--tree` takes it; `auto:COST` is the controller where a token costs that share of a pass."""
    coupled: bool
    batch_size: int
    prefill_chunk: int
    prefix_tokens: int
    cached_tokens: int | None
    """The limit of the cache; a tight one preempts sequences."""


def random_setting(rng: Random) -> Setting:
    """One drafter, tree and batch size of all there are."""
    batch = rng.randint(1, 16)
    return Setting(
        drafter=rng.choice([PLAIN, *DRAFTERS, *[ORACLE] * 4]),
        tree=random_tree(rng),
        coupled=rng.random() < 0.7,
        batch_size=batch,
        prefill_chunk=rng.choice([3, 16, 512]),
        prefix_tokens=rng.choice([0, 400]),
        cached_tokens=rng.choice([None, 256 * ((batch + 1) // 2)]),
    )


def random_tree(rng: Random) -> str:
    """A chain, a static, dynamic or shared tree of random size, or the controller's choice of each round."""
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
    """Requests with prompts of 1 to 60 tokens, many of which begin alike, greedy or sampled in all ways there are."""
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


def save_family(family: str, folder: Path, seed: int) -> Path:
    """A random model of an architecture whose vocabulary is the tokenizer's, saved as users have it."""
    sizes = {**tiny.fitting(family), "vocab_size": len(pairs.tokenizer())}
    tiny.build_model(family, seed=seed, **sizes).save_pretrained(folder)
    return folder


@dataclass
class Bench:
    """A loaded target with drafters for it."""

    target: Target
    networks: dict[str, Any]

    @classmethod
    def load(cls, folder: Path, precision: str, seed: int) -> Bench:
        """The model of a folder, and a random network of every sort in `DRAFTERS`, laid out as `load_drafter` does."""
        target = load_target(folder, device="cpu", **PRECISIONS[precision])
        layout = drafter_layout(target)
        networks = {}
        for name, (kind, settings) in DRAFTERS.items():
            network = tiny.network(kind, seed, vocab_size=target.vocab_size, **settings)
            if "shared" in (network.config.embedding, network.config.head):
                network.borrow(target)
            networks[name] = network.to(target.dtype)
            if layout is not None:
                prepack_linears(networks[name], layout)
        return cls(target, networks)

    def alone(self, requests: Sequence[Request]) -> list[Completion]:
        """Plain answers, each request by itself."""
        return Engine(self.target, pairs.tokenizer()).generate(requests)

    def together(self, requests: Sequence[Request], setting: Setting, plain: Sequence[Completion]) -> list[Completion]:
        """The answers as a `setting` has them; the oracle knows the `plain` ones."""
        controller = speculation = None
        if setting.drafter != PLAIN:
            cost = setting.tree.removeprefix("auto:")
            fixed = cost == setting.tree
            controller = None if fixed else Simulated(float(cost))
            drafter = self._drafter(setting.drafter, requests, plain)
            speculation = Speculation(drafter, parse_tree(setting.tree) if fixed else None, setting.coupled)
        limits = Limits(
            max_running=setting.batch_size,
            max_cached_tokens=setting.cached_tokens,
            prefill_chunk=setting.prefill_chunk,
            prefix_tokens=setting.prefix_tokens,
        )
        engine = Engine(self.target, pairs.tokenizer(), speculation, controller=controller, limits=limits)
        return engine.generate(requests)

    def _drafter(self, name: str, requests: Sequence[Request], plain: Sequence[Completion]) -> Drafter:
        if name == ORACLE:
            sequences = [[*request.prompt, *done.token_ids] for request, done in zip(requests, plain, strict=True)]
            return Oracle(sequences, (0, 2, tiny.LAYERS), vocab_size=self.target.vocab_size)
        network = self.networks[name]
        return NetworkDrafter(network, network.config.taps or network.config.default_taps(tiny.LAYERS))


class Oracle(tiny.OracleDrafter):
    """Proposes the plain answers among wrong tokens, and only wrong ones after an answer that differs."""

    def _ahead(self, slot: int) -> list[int] | None:
        known = self._tokens[slot]
        fitting = (s[1 + len(known) :] for s in self._sequences if known and s[1 : 1 + len(known)] == known)
        return next(fitting, None)


class Simulated(Controller):
    """The controller of `--tree auto`, told made-up times, so that it plans the same rounds everywhere."""

    def __init__(self, token: float) -> None:
        """A pass lasts 1 second, and `token` more for every token beyond the first."""
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
        super().__init__(CostModel(table), clock=lambda: 0.0)

    def learn(self, record: RoundRecord) -> None:
        seconds = float(self._pass.at(record.tokens))
        super().learn(replace(record, draft_seconds=0.001, pass_seconds=seconds, seconds=seconds + 0.001))
