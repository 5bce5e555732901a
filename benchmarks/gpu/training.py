"""Training on a device: the objective against the CPU, the time and memory of a step, and capture to drafter."""

from __future__ import annotations

import copy
import json
import statistics
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.lossless import answers, demo_prompts
from benchmarks.gpu.pairs import SMALL, Sizes, release_pairs
from benchmarks.gpu.speed import peak_memory
from benchmarks.gpu.steps import Outcome, Row
from eyas.assets import PROMPTS
from eyas.data.capture.capture import Capture, CaptureConfig
from eyas.data.capture.shard import read_rows
from eyas.data.features import FeatureBatch
from eyas.data.store import FeatureStore
from eyas.drafters.kinds.eagle3 import Eagle3Config, Eagle3Network
from eyas.drafters.loading import load_drafter
from eyas.drafters.network import set_vocabulary
from eyas.engine import Engine, Speculation
from eyas.targets import Target, load_target, load_tokenizer
from eyas.text.chats import exchange, write_chats
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter
from eyas.train.loop.optimizer import ResolvedOptimizer, build_optimizers
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftObjective
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams, Stats
from tests.toy.pair import TOY_TARGET

TOLERANCE = 1e-3
"""Greatest relative difference of loss and gradient in float32, where kernels sum in different orders."""


def as_on_cpu(device: torch.device) -> Outcome:
    """Compare loss and gradients of one small float32 batch on the CPU and on the device."""
    network, head, batch = _problem(SMALL, torch.device("cpu"))
    found = []
    for place in (torch.device("cpu"), device):
        there = copy.deepcopy(network).to(place)
        objective = _objective(there, copy.deepcopy(head).to(place), _moved(batch, place), bf16=False)
        loss = objective.micro_batch_loss(0).loss
        torch.autograd.backward(loss)
        gradient = torch.cat([p.grad.flatten().cpu() for p in there.parameters() if p.grad is not None])
        found.append((loss.detach().cpu(), gradient))
    (loss, gradient), (other_loss, other_gradient) = found
    row: Row = {
        "what": "float32, against the CPU",
        "loss apart": float(abs(other_loss / loss - 1)),
        "gradient apart": float((other_gradient - gradient).norm() / gradient.norm()),
    }
    wrong = [name for name in ("loss apart", "gradient apart") if not row[name] <= TOLERANCE]
    return Outcome([row], wrong)


def step_time(sizes: Sizes, device: torch.device) -> Outcome:
    """An EAGLE-3 training step in the random pair's shape under bfloat16 autocast: forward, backward, AdamW."""
    release_pairs()
    network, head, batch = _problem(sizes, device)
    objective = _objective(network, head, batch, bf16=True)
    optimizers = build_optimizers(network, ResolvedOptimizer())
    seconds: list[float] = []
    with peak_memory(device) as memory:
        for _ in range(1 + sizes.repeats):
            began = time.perf_counter()
            loss = objective.micro_batch_loss(0).loss
            torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            final = float(loss.detach())  # waits for the device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:])  # the first is a warm-up
    row = {
        "what": f"a step of {sizes.train_length} tokens", "seconds": round(median, 4),
        "tokens/s": round(sizes.train_length / median), **memory,
    }  # fmt: skip
    return Outcome([row], [] if final == final else ["the loss is not a number"])


def capture_and_train(sizes: Sizes, device: torch.device) -> Outcome:
    """Capture the demo target's states, train a drafter on them, and check that answers with it equal plain ones."""
    with TemporaryDirectory() as folder:
        chats, store, run = (Path(folder, name) for name in ("chats.jsonl", "store", "run"))
        texts = [PROMPTS[i % len(PROMPTS)][1] for i in range(sizes.chats)]
        write_chats(
            chats,
            [exchange(f"c{i}", f"{i}: {text[:80]}", f"{text} That was number {i}.") for i, text in enumerate(texts)],
        )
        target = load_target(TOY_TARGET, dtype=torch.float32, device=device)
        captured = _captured(target, chats, store)
        loop = {
            "steps": sizes.train_steps, "log_every": 1, "validate_every": 1000, "optimizer": {"lr": 2e-3},
            "schedule": {"kind": "constant", "warmup": 0.0},
        }  # fmt: skip
        config = DrafterTrainConfig.model_validate(
            {
                "target": str(TOY_TARGET),
                "source": "offline",
                "store": store,
                "output": run,
                "device": str(device),
                "target_dtype": "float32",
                "batch_tokens": 512,
                "max_length": 128,
                "shape": {"kind": "eagle3", "draft_vocab_size": 512, "intermediate_size": 256},
                "loss": {"unroll": 3},
                "validation": {"batches": 1, "prompts": 1, "max_tokens": 8},
                "loop": loop,
            }
        )
        began = time.perf_counter()
        with redirect_stderr(StringIO()):  # tables and a line for every step
            drafter = load_drafter(train_drafter(config), target)
        seconds = time.perf_counter() - began
        logged = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        losses = [line["loss"] for line in logged if "loss" in line]
    trained: Row = {
        "what": f"{sizes.train_steps} steps on it", "seconds": round(seconds, 2),
        "first loss": round(losses[0], 3), "last loss": round(losses[-1], 3),
    }  # fmt: skip
    prompts = demo_prompts()
    params = SamplingParams(max_tokens=sizes.answers)
    engine = Engine(target, None, Speculation(drafter, parse_tree("chain:3")), batch_size=2)
    done = engine.generate([Request(prompt, params) for prompt in prompts])
    equal = sum(a.token_ids == b for a, b in zip(done, answers(target, prompts, params), strict=True))
    pooled = Stats()
    for completion in done:
        pooled.merge(completion.stats)
    decoded: Row = {
        "what": "answers with it that equal plain ones",
        "equal": f"{equal} of {len(prompts)}",
        "accept length": round(pooled.accept_length, 3),
    }
    wrong = ["the loss did not fall"] * (losses[-1] >= losses[0]) + ["answers differ"] * (equal < len(prompts))
    return Outcome([captured, trained, decoded], wrong)


def _captured(target: Target, chats: Path, store: Path) -> Row:
    found = read_rows(load_tokenizer(TOY_TARGET), chats, 0.05, 128, target.vocab_size)
    config = CaptureConfig(batch_tokens=4096)
    capture = Capture(target, found, config, store, name=str(TOY_TARGET), chats=chats.name)
    began = time.perf_counter()
    with capture.begun():
        capture.run()
    seconds = time.perf_counter() - began
    opened = FeatureStore.open(store)
    damaged = list(opened.verify())
    if damaged:
        raise ValueError(damaged[0])
    tokens = sum(facts.size.tokens for facts in opened.settings.splits.values())
    return {"what": f"capture of {tokens} tokens", "seconds": round(seconds, 2), "tokens/s": round(tokens / seconds)}


def _problem(sizes: Sizes, device: torch.device) -> tuple[Eagle3Network, nn.Linear, FeatureBatch]:
    """A fresh drafter in the random pair's shape, a head, and a batch of one chat with a third of it prompt."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {name: size for name, size in sizes.llama.items() if name != "num_hidden_layers"}
    hidden = shape["hidden_size"]
    vocab = shape["vocab_size"]
    length = sizes.train_length
    with torch.device(device):
        network = Eagle3Network(
            Eagle3Config(**shape, draft_vocab_size=sizes.draft_vocab, target_hidden_size=hidden, taps=(1, 2, 3))
        )
        set_vocabulary(network, torch.arange(sizes.draft_vocab))
        network.embed_tokens.requires_grad_(False)
        head = nn.Linear(hidden, vocab, bias=False).requires_grad_(False)
        mask = (torch.arange(length) > length // 3).unsqueeze(0)
        tokens = torch.randint(vocab, (1, length))
        batch = FeatureBatch(tokens, mask, torch.randn(1, length, 3, hidden), torch.randn(1, length, hidden))
    return network, head, batch


def _objective(network: Eagle3Network, head: nn.Linear, batch: FeatureBatch, bf16: bool) -> DraftObjective:
    def logits(final: Tensor) -> Tensor:
        out: Tensor = head(final)
        return out

    return DraftObjective(network, logits, head.out_features, lambda _: batch, LossConfig(), bf16)


def _moved(batch: FeatureBatch, device: torch.device) -> FeatureBatch:
    assert batch.final is not None  # of `_problem`
    tokens, mask, taps, final = (part.to(device) for part in (batch.tokens, batch.loss_mask, batch.taps, batch.final))
    return FeatureBatch(tokens, mask, taps, final)
