"""The arithmetic of plans: published figures come out, and parameters are those of the real modules."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import Tensor

from eyas.data.features import FeatureBatch
from eyas.data.store.layout import ShardLayout, classic_bytes
from eyas.errors import UnsupportedModelError, UsageError
from eyas.plan import devices
from eyas.plan.costs import ModelSize, Workload, capture_hours, model_size, plain_speed, regeneration_hours, storage
from eyas.plan.devices import Machine, known_machine, this_machine
from eyas.plan.drafters import (
    ACCEPT_LENGTHS,
    BlockPlan,
    BlockShape,
    Eagle3Plan,
    PlannedDrafter,
    block_parameters,
    drafter_parameters,
    expected_lengths,
)
from eyas.targets import Target
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftLoss

from .. import tiny

BIG = tf.Qwen3Config(
    hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, tie_word_embeddings=False,
)  # fmt: skip
WORK = Workload(500_000, 2048)


def test_the_published_figure() -> None:
    """500k samples of 2048 tokens at hidden 5120: 42 TB, which is 38 TiB; the published "TiB" is a slip of units."""
    total = classic_bytes(500_000 * 2048, 5120)
    assert total == 500_000 * 2048 * (8 * 5120 + 16) == 41_959_424_000_000
    assert round(total / 1e12) == 42
    assert round(total / 2**40, 2) == 38.16


def test_a_32b_model_is_counted_without_memory_for_it() -> None:
    size = model_size(BIG)
    assert size.total == 32_762_123_264  # what the published checkpoint of this shape holds
    assert size.body == size.total - 2 * size.vocab * size.hidden


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "lfm2", "jamba", "llama"])
def test_recurrent_states_are_those_of_a_running_target(name: str) -> None:
    model = tiny.build_model(name).to(torch.bfloat16)
    target = Target(model)
    size = model_size(model.config)
    assert size.states == sum(shape.nbytes for shape in target.states.values())
    assert size.attending == sum(shapes is not None for shapes in target.kv_shapes)
    assert bool(size.states) == (name != "llama")


def test_hours_of_a_hybrid_count_states_and_the_layers_that_attend() -> None:
    size = model_size(BIG)
    fast = Machine("x", 400, 2000)
    work = WORK._replace(answer_share=1.0)
    few = regeneration_hours(size._replace(attending=16), work, fast, 1, 64)
    assert few < regeneration_hours(size._replace(attending=16, states=10**8), work, fast, 1, 64)
    assert few < regeneration_hours(size, work, fast, 1, 64)


def test_the_table_of_layouts() -> None:
    rows = {row.name: row for row in storage(ShardLayout(hidden=5120, vocab=151936, taps=(2, 32, 61)), WORK)}
    assert rows["classic (8 H + 16)"].total == 41_959_424_000_000
    ours = rows["`states=fp8` `final=answers`"]
    assert 0.43 < ours.of_classic < 0.44
    # by hand: three e4m3 states with an exponent each, an id, a bit, half of the final states, two numbers a row
    per_token = 3 * 5121 + 4 + 1 / 8 + 5121 / 2 + 8 / 2048
    assert ours.per_token == pytest.approx(per_token, rel=1e-9)
    shares = [row.of_classic for row in rows.values()]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES])
def test_parameters_of_every_architecture(name: str) -> None:
    model = tiny.build_model(name)
    size = model_size(model.config)
    assert size.total == sum(p.numel() for p in model.parameters())
    if name in ("mixtral", "qwen3moe", "deepseek3", "gptoss"):  # two of four experts
        routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
        outside = 2 * size.head
        assert routed > 0
        assert size.body == size.total - outside - routed // 2


def test_a_drafter_is_counted_as_it_is_built() -> None:
    size = model_size(tiny.build_model("llama").config)
    module = tiny.eagle3_module()
    fc, layer, head = drafter_parameters(size, 3, 60)
    assert fc == module.fc.weight.numel()
    assert head == module.lm_head.weight.numel()
    matrices = [p for p in module.parameters() if p.dim() == 2]
    assert fc + layer + head == sum(p.numel() for p in matrices) - module.embed_tokens.weight.numel()


def test_hours_follow_the_machine_and_the_work() -> None:
    size = model_size(BIG)
    fast = Machine("x", 400, 2000)
    once = capture_hours(size, WORK, fast, 1)
    assert once == pytest.approx(WORK.tokens * (2 * size.body + 2 * 64 * 8192 * 2048) / 400e12 / 3600)
    assert capture_hours(size, WORK, fast, 8) == pytest.approx(once / 8)
    assert capture_hours(size, WORK._replace(samples=1_000_000), fast, 1) == pytest.approx(2 * once)
    training = Eagle3Plan(size, 3, WORK).training_hours(fast, 1)
    assert Eagle3Plan(size, 3, WORK._replace(epochs=3)).training_hours(fast, 1) == pytest.approx(3 * training)
    assert Eagle3Plan(size, 3, WORK._replace(unroll=3)).training_hours(fast, 1) < training
    by_muon = Eagle3Plan(size, 3, WORK._replace(muon_tokens=1000)).training_hours(fast, 1)
    fc, layer, _ = drafter_parameters(size, 3, WORK.draft_vocab)
    updates = WORK.epochs * WORK.tokens / 1000
    assert by_muon - training == pytest.approx(updates * 25 * size.hidden * (fc + layer) / 400e12 / 3600)
    assert plain_speed(size, fast) == pytest.approx(2000e9 / 2 / (size.body + size.head))


def test_regeneration_is_bound_by_reading_then_by_computing() -> None:
    size = model_size(BIG)
    fast = Machine("x", 400, 2000)
    work = WORK._replace(answer_share=1.0)
    assert size.total == 32_762_123_264
    alone = regeneration_hours(size, work, fast, 1, 1)
    cached = 2 * 64 * 1024 * 2048 / 2  # keys and values of half a chat, on average
    step = 2 * (size.total - size.head + cached) / 2000e9
    assert alone == pytest.approx(work.tokens * step / 3600)
    assert regeneration_hours(size, work, fast, 8, 1) == pytest.approx(alone / 8)
    many = regeneration_hours(size, work._replace(length=16), fast, 1, 1000)
    assert many == pytest.approx(500_000 * 16 * 2 * (size.body + size.head) / 400e12 / 3600)
    assert alone / 32 < regeneration_hours(size, work, fast, 1, 32) < alone / 8
    assert alone > 10 * capture_hours(size, work, fast, 1)  # often the longest step
    experts = model_size(tiny.build_model("mixtral").config)
    assert experts.body < experts.total - 2 * experts.head
    one, two, all_of_them = (regeneration_hours(experts, work, fast, 1, n) * n for n in (1, 2, 64))
    assert one < two < all_of_them / 10  # more rows read more experts


def test_training_memory_is_what_autograd_saves() -> None:
    """Counted on a drafter: two lengths, so that what doesn't grow with the tokens drops out."""
    taps = 3
    hidden = 96
    vocab = 300
    draft = 100
    size = ModelSize(4, hidden, vocab, query=64, key=32, intermediate=256, body=0, total=10**6, attending=4, states=0)

    def saved(width: int) -> int:
        network = tiny.eagle3_module(
            vocab_size=vocab, draft_vocab_size=draft, hidden_size=hidden, target_hidden_size=hidden,
            intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        ).train().requires_grad_(True)  # fmt: skip
        own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
        head = torch.nn.Linear(hidden, vocab, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        mask = torch.zeros(2, width, dtype=torch.bool)
        mask[:, width // 2 :] = True
        states = torch.randn(2, width, taps + 1, hidden, dtype=torch.bfloat16)
        batch = FeatureBatch(torch.randint(vocab, (2, width)), mask, states[:, :, :taps], states[:, :, taps])
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu"):
            done = DraftLoss(network, head, vocab, LossConfig(unroll=7))(batch)  # noqa: F841  # keeps what was saved
        kept = {address: tensor for address, tensor in kept.items() if address not in own}
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    work = Workload(1, 64, 0.5, draft_vocab=draft)
    plan = Eagle3Plan(size, taps, work)
    planned = plan.training_memory(1, 320).activations - plan.training_memory(1, 128).activations
    assert planned == pytest.approx(saved(160) - saved(64), rel=0.15)


def test_training_memory_of_a_32b_target() -> None:
    memory = Eagle3Plan(model_size(BIG), 3, WORK).training_memory(4, 2048)
    fc, layer, head = drafter_parameters(model_size(BIG), 3, 32000)
    assert memory.weights == 18 * (fc + layer + head)
    assert memory.in_loop - memory.from_store == 2 * 32_762_123_264 - 4 * 151936 * 5120
    layers = 2 * 32_762_123_264 - 4 * 151936 * 5120
    assert memory.sharded(8) == memory.activations + memory.store + (memory.weights + layers) // 8 + layers // 64
    assert memory.sharded(1) == memory.in_loop + layers // 64
    assert 30e9 < memory.from_store < 60e9


def test_speedup_is_an_honest_range() -> None:
    gain = Eagle3Plan(model_size(BIG), 3, WORK).speedup()
    assert gain is not None
    assert 1 < gain.low < gain.high < 6.74
    # a drafter half as heavy as its target
    small = Eagle3Plan(model_size(tiny.build_model("llama").config), 3, WORK._replace(draft_vocab=97))
    assert small.draft_cost > 0.1
    found = small.speedup()
    assert found is not None
    assert found.high < gain.high


@pytest.mark.parametrize("kind", ["peagle", "dflash2", "domino", "xpress", "lilicorr"])
def test_what_nobody_measured_is_not_estimated(kind: str) -> None:
    """Bytes, hours and memory are, since they follow from sizes."""
    size = model_size(BIG)
    drafter = PlannedDrafter(kind)
    work = drafter.work(size, WORK)
    plan = drafter.plan(size, 5, work)
    assert plan.speedup() is None
    assert f"none is published for {kind} drafters" in plan.assumed()[1]
    assert plan.training_hours(Machine("x", 400, 2000), 1) > 0
    assert plan.training_memory(2, 2048).from_store > 0


def test_only_kinds_whose_work_is_known_are_planned() -> None:
    for kind in ("mlp", "medusa", "nothing"):
        with pytest.raises(UsageError, match=f"no drafter of kind '{kind}' can be planned: use eagle3, peagle"):
            PlannedDrafter(kind)


def test_the_accept_length_to_expect_follows_the_data() -> None:
    """Of 400 chats little, of as many as published drafters have learned from what was published."""
    few, some, many = (Workload(samples, 250) for samples in (400, 16_000, 500_000))
    assert expected_lengths(ACCEPT_LENGTHS["eagle3"], few) == pytest.approx((1.81, 2.44), abs=0.01)
    low, high = expected_lengths(ACCEPT_LENGTHS["eagle3"], some)
    assert 2.6 < low < high < 4.1  # those of SmolLM2's drafter are 2.6 to 3.8
    assert expected_lengths(ACCEPT_LENGTHS["eagle3"], many) == ACCEPT_LENGTHS["eagle3"][:2]
    size = model_size(BIG)
    little, much = (Eagle3Plan(size, 3, work).speedup() for work in (few, many))
    assert little is not None
    assert much is not None
    assert little.low < 1 < little.high < much.low
    assert much == Eagle3Plan(size, 3, WORK).speedup()
    assert "are fewer than the 50 million of published drafters" in Eagle3Plan(size, 3, few).assumed()[1]
    assert "accept length 4.24 to 6.74:" in Eagle3Plan(size, 3, many).assumed()[1]


def test_machines() -> None:
    assert known_machine("NVIDIA A100-SXM4-80GB").name == "A100"
    assert known_machine("nvidia a10").name == "A10"
    with pytest.raises(UsageError, match="is unknown: use A100, H100"):
        known_machine("abacus")
    assert this_machine().tflops > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in bfloat16")
@pytest.mark.parametrize(("half", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_is_measured_in_what_it_trains_in(
    half: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product in bfloat16 takes some hundred times as long on a CPU that has no kernels for it."""
    multiplied: list[torch.dtype] = []
    monkeypatch.setattr(devices, "cpu_trains_in", lambda _: half)
    monkeypatch.setattr(devices.torch, "mm", lambda a, _: multiplied.append(a.dtype))
    monkeypatch.setattr(devices.time, "perf_counter", iter(range(100)).__next__)
    assert this_machine().tflops > 0
    assert multiplied == [dtype] * 3


def test_models_that_cannot_be_targets() -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        model_size(tf.xLSTMConfig(num_hidden_layers=1))
    with pytest.raises(UnsupportedModelError, match="neither a causal language model of type vit nor a multimodal one"):
        model_size(tf.ViTConfig())


def test_a_block_drafter_is_counted_as_it_is_built() -> None:
    """By hand: DSpark's Markov head of rank 256, Domino's GRU and bottleneck, and what DFlash's layers have."""
    size = model_size(tiny.build_model("llama").config)
    hidden = size.hidden
    vocab = size.vocab
    layers = 2
    layer = 2 * hidden * (size.query + size.key) + 3 * hidden * size.intermediate
    corrections = {
        "dflash": 0, "jetspec": 0, "dspark": 256 * vocab + hidden + 256,
        "domino": 3 * 1024 * (hidden + 1024) + 256 * (hidden + 1024) + 256 * vocab,
    }  # fmt: skip
    for kind, correction in corrections.items():
        found = block_parameters(size, BlockShape(kind, layers, 3, 5, 8))
        assert (found.fc, found.layers, found.correction) == (3 * hidden * hidden, layers * layer, correction)
        assert found.context == layers * 2 * hidden * size.key
        assert found.tables == (256 * vocab if kind == "dspark" else 0)
        assert (found.slots, found.guesses, found.candidates) == (5, 5 if kind == "dspark" else 4, 1)
    for kind in ("dflash2", "xpress", "lilicorr"):
        found = block_parameters(size, BlockShape(kind, layers, 3, None, 8))
        assert (found.slots, found.guesses, found.candidates) == (8, 7, 8 if kind == "lilicorr" else 1)
        network = BlockShape(kind, layers, 3, None, 8).network(size)
        assert found.own == sum(p.numel() for p in network.parameters() if p.dim() > 1)
        assert found.tables == {"dflash2": 2 * 256 * vocab, "xpress": 256 * vocab, "lilicorr": 0}[kind]


def test_hours_of_block_drafters_follow_blocks_and_slots() -> None:
    size = model_size(BIG)
    fast = Machine("x", 400, 2000)
    shape = BlockShape("dflash", 5, 5, 8, 512)

    def hours(**changes: int) -> float:
        return BlockPlan(size, shape._replace(**changes), WORK).training_hours(fast, 1)

    assert hours() == pytest.approx(8 * BlockPlan(size, shape, WORK).training_hours(fast, 8))
    assert 1.9 < hours(anchors=1024) / hours() < 2.0
    assert hours(anchors=1024) == hours(anchors=5000)  # there are no more answer tokens
    assert 1.9 < hours(block_size=16) / hours() < 2.2
    assert hours(layers=1) < hours() / 2  # its head is the same
    assert BlockPlan(size, shape._replace(kind="dspark"), WORK).training_hours(fast, 1) > hours()


def test_block_drafters_draft_once_a_round() -> None:
    size = model_size(BIG)
    shape = BlockShape("dspark", 5, 5, 7, 512)
    found = block_parameters(size, shape)
    plan = BlockPlan(size, shape, WORK)
    gain = plan.speedup()
    read = found.fc + found.layers + found.correction + size.head
    assert plan.draft_cost == pytest.approx(read / (size.body + size.head))
    assert gain is not None
    assert gain.low == pytest.approx(3.64 * 0.53)
    memory = BlockPlan(size, shape, WORK).training_memory(2, 2048)
    more = BlockPlan(size, shape._replace(anchors=256), WORK).training_memory(2, 2048)
    assert memory.weights == more.weights == 18 * found.own
    assert 1.8 < memory.activations / more.activations < 2
