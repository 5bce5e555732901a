"""The objective of every kind against its definition written out, and what a batch's numbers mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.data.features import FeatureBatch
from eyas.drafters.levels import HeadsNetwork
from eyas.errors import ConfigError
from eyas.train.drafter.shape import DrafterShape
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftObjective, feature_noise
from eyas.types import CONTEXT_BUCKETS

from ... import tiny
from .chains import HIDDEN, NETWORKS, VOCAB, chain, network

WIDTH = 11


def loss_of(kind: str) -> LossConfig:
    """The loss in the paper of a kind."""
    return LossConfig(**DrafterShape(kind=kind).default_loss)


def batch(taps: int, dtype: torch.dtype = torch.float32) -> FeatureBatch:
    """Two ragged chats."""
    torch.manual_seed(3)
    tokens = torch.randint(VOCAB, (2, WIDTH))
    mask = torch.zeros(2, WIDTH, dtype=torch.bool)
    mask[0, 1:3] = mask[0, 6:] = mask[1, 3:7] = True
    features = torch.randn(2, WIDTH, taps, HIDDEN, dtype=dtype)
    features[1, 7:] = 0
    return FeatureBatch(tokens, mask, features, torch.randn(2, WIDTH, HIDDEN, dtype=dtype))


def objective(
    name: str, config: LossConfig, dtype: torch.dtype = torch.float32, bf16: bool = False
) -> tuple[DraftObjective, nn.Linear, FeatureBatch]:
    made = network(name, dtype)
    torch.manual_seed(4)
    head = nn.Linear(HIDDEN, VOCAB, bias=False).to(dtype).requires_grad_(False)
    given = batch(made.config.tap_count, dtype)
    return DraftObjective(made, head, VOCAB, lambda _: given, config, bf16, seed=5), head, given


def written_out(found: DraftObjective, head: nn.Linear, given: FeatureBatch, config: LossConfig) -> Tensor:
    """Every answer token, every step, its chain decoded from scratch."""
    made = found.model
    assert given.final is not None
    loss = torch.zeros((), dtype=given.taps.dtype)
    for chat, token in given.loss_mask.nonzero().tolist():
        p = head(given.final[chat, token - 1])[made.target_ids].softmax(-1)
        for step in range(min(config.unroll, token - 1)):
            row = slice(chat, chat + 1)
            fed, normed = chain(made, given.tokens[row], given.taps[row], token - 2 - step, step + 1)[step]
            logits = made.logits_at(normed, step) if isinstance(made, HeadsNetwork) else made.logits(normed)
            weight = config.decay**step
            loss = loss - weight * config.token_weight * (p * logits.log_softmax(-1)).sum()
            if config.feature != "none":
                distance = F.smooth_l1_loss if config.feature == "smooth_l1" else F.mse_loss
                loss = loss + weight * config.feature_weight * distance(fed, given.taps[chat, token - 1, 0])
    return loss


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_loss_and_gradients_are_those_of_chains_written_out(name: str) -> None:
    """All parameters, head and embedding included, in float64."""
    config = loss_of(name if name in ("eagle1", "mla", "mlp", "medusa") else "eagle3")
    if (guesses := network(name).config.guesses) is not None:
        config = config.model_copy(update={"unroll": guesses})
    if config.unroll == 1:  # the feature losses over more than a step too
        config = config.model_copy(update={"unroll": 3})
    found, head, given = objective(name, config, torch.float64)
    part = found.score(given)
    expected = written_out(found, head, given, config)
    torch.testing.assert_close(part.loss, expected, rtol=1e-6, atol=1e-6)  # decay^step is float32
    parameters = list(found.model.parameters())
    pairs = zip(*(torch.autograd.grad(x, parameters) for x in (part.loss, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        assert ours.abs().sum() > 0
    assert part.weight == given.loss_mask[:, 2:].sum()  # token 1 has no pair before it: not in the divisor


@pytest.mark.parametrize("name", ["eagle3", "mla", "eagle1", "mlp"])
def test_bfloat16_autocast_stays_close_and_trains_the_same_parameters(name: str) -> None:
    config = loss_of(name)
    grads = []
    for bf16 in (False, True):
        found, _, given = objective(name, config, bf16=bf16)
        part = found.score(given)
        part.loss.backward()  # type: ignore[no-untyped-call]
        grads.append([p.grad for p in found.model.parameters()])
        assert all(g.dtype == torch.float32 for g in grads[-1])
    for exact, rough in zip(*grads, strict=True):
        assert F.cosine_similarity(exact.flatten(), rough.flatten(), dim=0) > 0.98


def test_parts_add_up() -> None:
    """Sums over chats: a batch is its chats, one by one."""
    found, _, given = objective("eagle3", LossConfig())
    whole = found.score(given)
    assert given.final is not None
    tensors = (given.tokens, given.loss_mask, given.taps, given.final)
    parts = [found.score(FeatureBatch(*(x[chat : chat + 1] for x in tensors))) for chat in range(2)]
    torch.testing.assert_close(whole.loss, parts[0].loss + parts[1].loss)
    for name, (total, count) in whole.metrics.items():
        assert total == pytest.approx(sum(part.metrics[name][0] for part in parts), rel=1e-5)
        assert count == sum(part.metrics[name][1] for part in parts)


def test_sampled_chains_are_a_function_of_seed_and_batch() -> None:
    config = LossConfig(unroll=4, decay=1.0, down_sample_ratio=0.5)
    found, _, given = objective("peagle", config)
    losses = []
    for number in (0, 1, 0):
        torch.rand(7)  # whatever else was drawn
        losses.append(found.micro_batch_loss(number).loss.item())
    assert losses[0] == losses[2] != losses[1]
    every, _, _ = objective("peagle", config.model_copy(update={"down_sample_ratio": None}))
    assert 0 < losses[0] < every.score(given).loss.item()
    assert found.score(given).weight == every.score(given).weight


def test_a_batch_of_short_answers_has_a_gradient_for_every_parameter() -> None:
    """Processes wait for each other's gradients, so none may be missing."""
    found, _, given = objective("peagle", LossConfig(unroll=4))
    mask = torch.zeros_like(given.loss_mask)
    mask[0, 2] = True  # no chain reaches a second guess
    found.score(given._replace(loss_mask=mask)).loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in found.model.parameters())


def test_blocks_have_no_chains_to_leave_out() -> None:
    made = tiny.network("dflash")
    config = LossConfig(unroll=4, down_sample_ratio=0.7)
    with pytest.raises(ConfigError, match=r"set loss\.anchors"):
        DraftObjective(made, nn.Identity(), tiny.VOCAB, lambda _: batch(3), config, False)


def test_noise_is_a_function_of_seed_and_batch() -> None:
    found, _, given = objective("eagle1", loss_of("eagle1"))
    losses = []
    for number in (0, 1, 0):
        torch.rand(7)  # whatever else was drawn
        losses.append(found.micro_batch_loss(number).loss.item())
    assert losses[0] == losses[2] != losses[1]
    assert found.score(given).loss.item() not in losses
    noise = feature_noise(given, 0.2, (5, 0))
    for chat, length in enumerate((11, 7)):  # up to the last answer token
        bound = 0.5 * 0.2 * 512 / length
        assert bound * 0.95 < noise[chat].abs().max() <= bound
        assert abs(noise[chat].mean()) < 0.05 * bound * 3


def test_noise_is_not_what_the_feature_loss_learns() -> None:
    """An mlp whose output is its input has a feature loss of the true features alone."""
    config = LossConfig(token_weight=0, feature="mse", feature_weight=1, unroll=1, noise=0.0)
    found, _, given = objective("mlp", config)
    core = found.core
    noisy = core(given, torch.full_like(given.taps, 3.0)).loss
    shifted = core(given._replace(taps=given.taps + 3.0)).loss
    assert noisy.item() != pytest.approx(shifted.item(), rel=1e-3)


def test_a_feature_loss_needs_a_feature_to_compare_with() -> None:
    found, _, given = objective("eagle3", LossConfig(feature="mse", feature_weight=1.0))
    with pytest.raises(ConfigError, match=r"3 taps of width 16.*set loss\.feature to none"):
        found.score(given)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kl_decay": 1.0}, "kl_decay belongs to the token loss lk"),
        ({"feature": "mse"}, "feature_weight must be above 0 if a feature loss is chosen"),
        ({"feature_weight": 1.0}, "feature_weight must be above 0 if a feature loss is chosen"),
        ({"token_weight": 0.0}, "nothing would be trained"),
        ({"token": "hinge"}, "token"),
        ({"gamma": 1.0}, "gamma"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        LossConfig(**values)


def test_each_kind_has_its_papers_loss() -> None:
    eagle1 = loss_of("eagle1")
    mlp = loss_of("mlp")
    assert (eagle1.feature, eagle1.feature_weight, eagle1.token_weight) == ("smooth_l1", 1.0, 0.1)
    assert (eagle1.unroll, eagle1.noise) == (1, 0.2)
    assert (mlp.feature, mlp.token_weight, mlp.unroll, mlp.noise) == ("mse", 0.1, 1, 0.0)
    for kind in ("eagle3", "eagle3.1", "mla"):
        config = loss_of(kind)
        assert (config.token, config.feature, config.unroll, config.decay) == ("ce", "none", 7, 0.8)


@pytest.mark.parametrize("name", ["eagle3", "mla", "eagle1", "peagle"])
def test_positions_begin_where_the_rows_do(name: str) -> None:
    """At the batch's true starts, or at starts drawn by seed and batch; validation draws none."""
    seen: list[list[list[int]]] = []
    unroll = network(name).config.guesses or 2
    _, head, given = objective(name, LossConfig(unroll=unroll))
    given = given._replace(starts=torch.tensor([40, 7]))

    def made(random_start: int | None, seed: int = 5) -> DraftObjective:
        config = LossConfig(unroll=unroll, random_start=random_start)
        found = DraftObjective(network(name), head, VOCAB, lambda _: given, config, False, seed)
        step = found.model.step

        def noted(tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Any) -> tuple[Tensor, Tensor]:
            seen.append(positions.tolist())
            return step(tokens, hidden, positions, attend)

        found.model.step = noted  # type: ignore[method-assign]
        return found

    def starts(run: Any, number: int | None = None) -> list[int]:
        seen.clear()
        run(given if number is None else number)
        first = seen[0]
        assert first == [list(range(row[0], row[0] + WIDTH)) for row in first]
        rows = [[row[0] + 1 + at for at in range(WIDTH)] for row in first]
        assert all(any(p in row for row in rows) for p in seen[1][0])  # a later step is one position further
        return [row[0] for row in first]

    plain = made(None)
    drawn = made(100)
    again = made(100)
    assert starts(plain.micro_batch_loss, 3) == starts(plain.score) == starts(drawn.score) == [40, 7]
    found = [starts(drawn.micro_batch_loss, number) for number in range(4)]
    assert found[2] == starts(again.micro_batch_loss, 2)  # as when a run is resumed
    assert found[1] != starts(made(100, seed=6).micro_batch_loss, 1)
    assert len({tuple(pair) for pair in found}) == 4
    assert all(0 <= start <= 100 for pair in found for start in pair)


def test_drafters_without_positions_refuse_random_starts() -> None:
    with pytest.raises(ConfigError, match="this drafter has none"):
        objective("medusa", LossConfig(unroll=network("medusa").config.guesses or 5, random_start=9))


def test_metrics_by_context_are_those_of_the_tokens_there() -> None:
    """Each range's figures are those of a batch in which only its answer tokens count."""
    made, head, given = objective("eagle3", LossConfig(unroll=2))
    found = DraftObjective(made.model, head, VOCAB, lambda _: given, LossConfig(unroll=2), False, by_context=True)
    given = given._replace(starts=torch.tensor([0, 2048 - 5]))
    part = found.score(given)
    counts = {"0-1k": 5, "1-2k": 2, "2-4k": 2}  # tokens 2, 6-10 of the one; 3, 4 and 5, 6 of the other
    counts["0-1k"] = int(given.loss_mask[0, 2:].sum())
    for name in ("loss", "accuracy", "accept_length"):
        by_range = {key.removeprefix(f"{name}_"): value for key, value in part.metrics.items() if "k" in key}
        shown = {key: value for key, value in by_range.items() if key in CONTEXT_BUCKETS}
        assert {key: count for key, (_, count) in shown.items() if count} == counts
    total = sum(part.metrics[f"loss_{key}"][0] for key in CONTEXT_BUCKETS)
    assert total == pytest.approx(part.loss.item(), rel=1e-5)
    for key, name in (("accuracy", "accuracy_0"), ("accept_length", "accept_length")):
        assert sum(part.metrics[f"{key}_{each}"][0] for each in CONTEXT_BUCKETS) == pytest.approx(part.metrics[name][0])
    only = given.loss_mask.clone()
    only[0] = False
    only[1, 5:] = False
    alone = found.score(given._replace(loss_mask=only)).metrics
    assert alone["accuracy_0"][1] == counts["1-2k"]
    assert part.metrics["accuracy_1-2k"][0] == alone["accuracy_0"][0]
