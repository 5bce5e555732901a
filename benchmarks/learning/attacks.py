"""What a learning drafter withstands and what it learns best from: candidates are trained on stored rows of traffic.

`harvest` serves requests for tool calls, random tokens and endless repetition, and stores their states in folders. The
others train candidates on such rows with the settings of a cycle, and replay them on held-out rows.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from torch import nn
from torch.nn.utils import parametrize

from benchmarks.harness import Output, report
from benchmarks.learning.day import SETTINGS, Answer, Server, accept_length
from benchmarks.learning.traffic import TOKENS, WINDOW, asked
from eyas.data.store.reader import FeatureStore, StoreSource
from eyas.data.tokens.batches import ChatBatches
from eyas.data.tokens.tokenize import TokenRow
from eyas.drafters.checkpoint import load_network, open_checkpoint, save_network
from eyas.drafters.network import DraftNetwork
from eyas.drafters.options import DrafterOptions
from eyas.files import write_text
from eyas.learn.cycle import CycleConfig, mixed_rows, recipe_for
from eyas.learn.folder import Card, LearnFolder
from eyas.learn.gate import Gate, GateConfig, replayed
from eyas.learn.traffic import TrafficRow, TrafficStore, write_store
from eyas.options import TargetOptions
from eyas.session import Session
from eyas.targets.loading import load_embedding_and_head
from eyas.targets.passes import EmbeddingAndHead
from eyas.text.chats import Message
from eyas.text.template import encode_chat
from eyas.train.loss.objective import DraftObjective
from eyas.train.recipe import run_recipe
from eyas.types import Request, SamplingParams

Work = Annotated[Path, "the folder that `harvest` wrote"]
HELD = 4
"""One honest row in `HELD` is held out."""
POISONED = 9
"""Number of honest rows per row of the attacker, who sends a tenth of the traffic."""


def harvest(model: str, drafter: str, work: Work, *, honest: int = 320, attacker: int = 50) -> None:
    """Serve requests of each kind and store their rows; kinds that were harvested before are kept."""
    session = Session.open(TargetOptions(model))
    for kind, count in (("tools", honest), ("random", attacker), ("repetitive", attacker)):
        if (work / kind / "done").is_file():
            continue
        shutil.rmtree(work / kind, ignore_errors=True)
        server = Server(session, DrafterOptions(drafter), work / kind, model, 0.1)
        for first in range(0, count, WINDOW):
            list(server.serve([_request(session, kind, number) for number in range(first, min(count, first + WINDOW))]))
        server.learning.close()
        (work / kind / "done").touch()
        print(kind, flush=True)


def _request(session: Session, kind: str, number: int) -> Request:
    rng = random.Random(number)
    vocabulary = session.target.vocab_size
    params = SamplingParams(max_tokens=TOKENS, temperature=float(number % 2), seed=number, ignore_eos=kind != "tools")
    if kind == "random":  # random prompts, answered at a high temperature
        hot = params.model_copy(update={"temperature": 2.0})
        return Request(tuple(rng.randrange(vocabulary) for _ in range(40)), hot)
    if kind == "repetitive":  # two tokens repeated, different ones per request: predictable there, wrong elsewhere
        words = [rng.randrange(vocabulary) for _ in range(2)]
        return Request(tuple(words * 20), params)
    chat: list[Message] = asked(kind, rng)
    return Request(tuple(encode_chat(session.tokenizer, chat)), params, chat=True)


class Bench:
    """The honest rows, the drafter that served, and the training and replay of candidates."""

    def __init__(self, work: Path, store: Path | None = None) -> None:
        self.work, self.folder = work, LearnFolder(work / "tools")
        self.settings, self.parent = self.folder.settings, self.folder.generation(0)
        self.target: EmbeddingAndHead = load_embedding_and_head(
            self.settings.model, dtype=self.settings.target.dtype, device="cpu"
        )
        rows = self.rows("tools")
        self.train = [row for at, row in enumerate(rows) if at % HELD]
        self.store = None if store is None else FeatureStore.open(store)
        self.held = self.kept("held", {"held": rows[::HELD]})

    def rows(self, kind: str) -> list[TrafficRow]:
        """All rows of a kind, in the order they were written."""
        layout = self.settings.layout
        traffic = TrafficStore(self.work / kind / "traffic", layout, 1 << 40)
        return [row for shard in traffic.shards() for row in shard.rows(layout)]

    def kept(self, name: str, splits: dict[str, list[TrafficRow]]) -> FeatureStore:
        """Write a store of rows, replacing an earlier one."""
        shutil.rmtree(self.work / name, ignore_errors=True)
        return write_store(self.work / name, self.settings.target, self.settings.layout, splits, name)

    def trained(self, name: str, rows: list[TrafficRow], *, mix: bool = True, steps: int | None = None) -> Path:
        """A candidate trained on these rows as a cycle trains it; a trained one is reused."""
        made = self.work / name / "run"
        if not (made / "drafter" / "config.json").is_file():
            shutil.rmtree(self.work / name, ignore_errors=True)
            rows = [*rows, *mixed_rows(self.store, self.settings, rows, 0)] if mix and self.store is not None else rows
            self.kept(f"{name}/store", {"train": rows, "validation": rows[::16]})
            opened = open_checkpoint(self.parent, layers=self.settings.target.layers)
            recipe = recipe_for(opened, self.parent, self.folder, CycleConfig(threads=1), 0).model_dump(
                mode="json", exclude_none=True, exclude_unset=True
            )
            recipe |= {"store": str(self.work / name / "store"), "output": str(made)}
            if steps is not None:
                recipe["loop"] = {**{k: v for k, v in recipe["loop"].items() if k != "epochs"}, "steps": steps}
            write_text(self.work / name / "recipe.yaml", yaml.safe_dump({"drafter": recipe}, sort_keys=False))
            run_recipe(self.work / name / "recipe.yaml")
        return made / "best"

    def replayed(self, drafter: DraftNetwork | Path, store: FeatureStore | None = None, split: str = "held") -> float:
        """Accept length on the held-out honest rows, or on a split of a store."""
        network = load_network(drafter, self.target) if isinstance(drafter, Path) else drafter
        sums, counts = replayed(network, self.target, store or self.held, split)
        return round(float(sums.sum() / counts.sum()), 4)


def poison(
    work: Work,
    store: Annotated[Path, "the drafter's original store"],
    *,
    steps: Annotated[int | None, "training steps of each candidate, instead of two epochs"] = None,
    output: Output = None,
) -> None:
    """What a tenth of random or repetitive traffic costs: accept length on honest rows, and the gate's verdict."""
    bench, found = Bench(work, store), {}
    gate = Gate(bench.parent, bench.target, bench.held, "held", None, GateConfig())
    for name in ("honest", "random", "repetitive"):
        rows = bench.train
        if name != "honest":
            rows = [*rows[: -(len(rows) // (POISONED + 1))], *bench.rows(name)[: len(rows) // (POISONED + 1)]]
        candidate = bench.trained(f"candidate-{name}", rows, steps=steps)  # the harvested folders have the bare names
        verdict = gate.judge(candidate)
        found[name] = {"rows": len(rows), "honest_held_out": bench.replayed(candidate), "promoted": verdict.promoted,
                       "of_the_store": bench.replayed(candidate, bench.store, "validation")}  # fmt: skip
    alone = bench.trained("candidate-alone", bench.rows("random"), mix=False, steps=steps)
    verdict = gate.judge(alone)
    found["random, nothing else"] = {"honest_held_out": bench.replayed(alone), "promoted": verdict.promoted}
    before = {"honest_held_out": bench.replayed(bench.parent),
              "of_the_store": bench.replayed(bench.parent, bench.store, "validation")}  # fmt: skip
    report({"before": before, "after": found}, output)


# Worse candidates.

ORDERS = tuple(itertools.permutations(range(3)))[1:]


def harms(tries: int) -> list[tuple[str, int]]:
    """The kinds and seeds of `tries` (at least 20) ways to be worse, in random order."""
    found = [("random", seed) for seed in range(tries // 3)] + [("garbage", seed) for seed in range(tries // 5)]
    found += [("taps", seed) for seed in range(len(ORDERS))]
    found += [("noise", seed) for seed in range(tries - len(found))]
    random.Random(0).shuffle(found)
    return found


def worse(bench: Bench, how: str, seed: int) -> Path:
    """Make a candidate that is worse in this way."""
    if how == "garbage":
        return bench.trained(f"garbage-{seed}", _garbage(bench, seed), mix=False, steps=8)
    network = load_network(bench.parent, bench.target).float()
    torch.manual_seed(seed)
    spoil(network, how, ORDERS[seed % len(ORDERS)])
    save_network(network, bench.work / "worse")
    return bench.work / "worse"


@torch.no_grad()
def spoil(network: DraftNetwork, how: str, order: Sequence[int]) -> None:
    """Redraw all weights, permute the taps that the drafter reads, or add noise of 0.3 standard deviations."""
    if how == "taps":
        weight: torch.Tensor = network.fc.weight  # type: ignore[union-attr, assignment]
        parts = weight.chunk(3, dim=1)
        weight.copy_(torch.cat([parts[at] for at in order], dim=1))
        return
    for parameter in network.parameters():
        noise = torch.randn_like(parameter) * parameter.std().nan_to_num(0.02)
        parameter.copy_(noise if how == "random" else parameter + 0.3 * noise)


def _garbage(bench: Bench, seed: int) -> list[TrafficRow]:
    """Rows of random tokens, with features permuted in their final states, which are the training signal.

    True states would improve the drafter, even in another order, because they teach it token frequencies.
    """
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for row in bench.train[:32]:
        tokens = torch.randint(bench.settings.layout.vocab, (len(row.tokens.tokens),), generator=rng)
        made, final = TokenRow(tokens.numpy(), row.tokens.loss_mask), row.states.final
        assert final is not None
        order = torch.randperm(final.values.shape[-1], generator=rng)
        mixed = final.values.view(torch.uint8)[:, order].view(final.values.dtype)
        states = row.states._replace(tokens=tokens.int(), final=final._replace(values=mixed))
        rows.append(TrafficRow(made, states))
    return rows


def gate(
    work: Work, *, tries: int = 50, kinds: Sequence[str] = ("random", "garbage", "taps", "noise"), rows: int = 32,
    output: Output = None,
) -> None:  # fmt: skip
    """Whether the gate promotes a worse candidate; of `tries` candidates, those of these `kinds` are tried."""
    bench = Bench(work)
    recent = bench.kept("gate", {"held": bench.rows("tools")[::HELD][:rows]})
    test = Gate(bench.parent, bench.target, recent, "held", None, GateConfig())
    found: list[dict[str, Any]] = []
    for how, seed in [one for one in harms(tries) if one[0] in kinds]:
        verdict = test.judge(worse(bench, how, seed))
        found.append(
            {"how": how, "promoted": verdict.promoted, "accept_length": verdict.figures.get("recent_candidate")}
        )
        print(len(found), found[-1], flush=True)
    report({"tries": len(found), "promoted": sum(one["promoted"] for one in found),
            "incumbent": bench.replayed(bench.parent, recent), "each": found}, output)  # fmt: skip


def forced(model: str, drafter: str, work: Work, *, tries: int = 5, output: Output = None) -> None:
    """After how many requests a worse generation is reverted that was promoted by hand, and whether answers differ.

    Noise is left out: it hardly shows in these requests, and a generation that isn't behind may stay.
    """
    bench, session = Bench(work), Session.open(TargetOptions(model))
    plain = session.engine(None, SETTINGS)
    found: list[dict[str, Any]] = []
    for at, (how, seed) in enumerate([one for one in harms(50) if one[0] != "noise"][:tries]):
        shutil.rmtree(work / "forced", ignore_errors=True)
        server = Server(session, DrafterOptions(drafter), work / "forced", model, 0.1)
        number = server.folder.add(worse(bench, how, seed), Card(number=0, made=0.0))
        server.folder.change(lambda state: state.model_copy(update={"wanted": 1}), "promoted", generation=number)
        server.learning.look()
        asked: list[Request] = []
        answers: list[Answer] = []
        while not server.folder.state.refused and len(answers) < 400:
            asked += [_request(session, "tools", 1000 * at + len(asked) + more) for more in range(25)]
            answers += map(Answer.of, server.serve(asked[len(answers) :]))
        server.learning.close()
        reason = server.folder.state.refused.get(number)
        expected = [Answer.of(one).digest for one in plain.generate(asked)]
        wrong = sum(one.digest != digest for one, digest in zip(answers, expected, strict=True))
        found.append({"how": how, "requests": len(answers), "reason": reason, "answers_that_differ": wrong,
                      "accept_length": round(accept_length(answers), 3)})  # fmt: skip
        print(found[-1], flush=True)
    totals = {name: sum(one[name] for one in found) for name in ("requests", "answers_that_differ")}
    report({"most_requests": max(one["requests"] for one in found), **totals, "each": found}, output)


# Low-rank updates.


class LowRank(nn.Module):
    """The update B A, of rank r, of a weight [out, in], scaled by 2 (alpha / r in Hu et al. 2021)."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1]) / math.sqrt(weight.shape[1]))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 2.0 * self.up @ self.down


def lowrank(
    work: Work,
    *,
    steps: int = 120,
    ranks: Sequence[int] = (8, 32),
    rates: Sequence[float] = (3e-4, 1e-3, 3e-3),
    output: Output = None,
) -> None:
    """Full against low-rank updates of all linears, after equal steps on the same batches, at each learning rate."""
    bench = Bench(work)
    store = bench.kept("lowrank", {"train": bench.train})
    found: list[dict[str, Any]] = []
    for rank, rate in itertools.product((None, *ranks), rates):
        network = load_network(bench.parent, bench.target).float().requires_grad_(True)
        trained = _adapted(network, rank)
        _learn(bench, network, trained, store, steps, rate)
        found.append({"rank": rank or "full", "rate": rate, "weights": sum(one.numel() for one in trained),
                      "accept_length": bench.replayed(network)})  # fmt: skip
        print(json.dumps(found[-1]), flush=True)
    report({"before": bench.replayed(bench.parent), "steps": steps, "runs": found}, output)


def _adapted(network: DraftNetwork, rank: int | None) -> list[nn.Parameter]:
    """The weights to train: all of them, or those of a low-rank update of each linear layer."""
    if rank is None:
        return [one for one in network.parameters() if one.requires_grad]
    network.requires_grad_(False)
    made: list[LowRank] = []
    for module in [one for one in network.modules() if isinstance(one, nn.Linear)]:
        made.append(LowRank(module.weight, rank))
        parametrize.register_parametrization(module, "weight", made[-1])
    return [parameter for one in made for parameter in one.parameters()]


def _learn(
    bench: Bench, network: DraftNetwork, trained: Sequence[nn.Parameter], store: FeatureStore, steps: int, rate: float
) -> None:
    """Train with AdamW, its learning rate decaying from `rate` to 0 by a cosine."""
    batches = ChatBatches(store.rows("train"), 512, store.settings.longest, seed=0)
    source = StoreSource(store, batches, network.config.taps_of(bench.target.num_layers))
    loss = recipe_for(
        open_checkpoint(bench.parent, layers=bench.settings.target.layers), bench.parent, bench.folder, CycleConfig(), 0
    ).loss
    objective = DraftObjective(network, bench.target.head, bench.target.vocab_size, source, loss, bf16=True)
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    network.train()
    for number in range(steps):
        part = objective.micro_batch_loss(number)
        (part.loss / max(1.0, float(part.weight))).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
