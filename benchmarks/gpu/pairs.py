"""The models of `make gpu`: sizes, the wide pair, and a random pair of an 8B model's shape."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.steps import Skipped
from benchmarks.heavy_pair import widened_drafter, widened_target
from eyas.drafters.checkpoint import load_network
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.kinds.eagle3 import Eagle3Config, Eagle3Network
from eyas.drafters.loading import drafter_of
from eyas.drafters.network import DraftNetwork, set_vocabulary
from eyas.errors import UnsupportedModelError
from eyas.targets import Target
from eyas.targets.taps import choose_taps
from eyas.targets.triton import why_unusable
from tests.toy.pair import TOY_DRAFTER, TOY_TARGET

BF16 = torch.bfloat16


@dataclass(frozen=True, eq=False)  # hashable, as a cache key
class Sizes:
    """Sizes of models, batches and answers."""

    name: str
    wide: dict[str, int]
    """Config fields of the wide pair's target; its depth and heads per key head are the demo target's."""
    llama: dict[str, int]
    """Config fields of the random pair's target."""
    draft_vocab: int
    batches: tuple[int, ...]
    prompt: int
    """Tokens per prompt."""
    tokens: int
    """Tokens per answer."""
    repeats: int
    rounds: int
    """Number of rounds over which host time and syncs are counted."""
    answers: int
    """Tokens per answer compared for losslessness."""
    train_length: int
    """Tokens of the chat of a training step."""
    train_steps: int
    chats: int
    """Number of chats to capture."""
    tests: str = ""
    """The `pytest -k` expression of the tests to run; all by default."""


FULL = Sizes(
    name="full",
    wide={
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    },
    llama={
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    draft_vocab=32000, batches=(1, 4, 16, 64), prompt=128, tokens=64, repeats=3, rounds=16, answers=64,
    train_length=2048, train_steps=40, chats=240,
)  # fmt: skip
SMALL = Sizes(
    name="small",
    wide={
        "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "num_key_value_heads": 3,
    },
    llama={
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_hidden_layers": 4, "vocab_size": 997, "max_position_embeddings": 512,
    },
    draft_vocab=256, batches=(1, 4), prompt=12, tokens=8, repeats=2, rounds=3, answers=12,
    train_length=96, train_steps=24, chats=40, tests="llama or kernels or prefix",
)  # fmt: skip
"""For the stand-in on a CPU: the same steps with meaningless figures."""


class Pair(NamedTuple):
    """A target and a drafter of its shape."""

    target: Target
    drafter: NetworkDrafter


@lru_cache(maxsize=1)  # models are large: one pair at a time
def make_pair(name: str, sizes: Sizes, device: torch.device) -> Pair:
    """The pair called `wide` or `random`, in bfloat16.

    `modules` is the random one without kernels in Triton, `int4` the same with the target's weights in 4 bits.
    """
    if name == "wide":
        return wide_pair(sizes, device)
    return random_pair(sizes, device, name != "modules", "int4" if name == "int4" else None)


def release_pairs() -> None:
    """Release the memory of the last pair."""
    make_pair.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wide_pair(sizes: Sizes, device: torch.device) -> Pair:
    """The demo pair in wider matrices that compute the same (`benchmarks/heavy_pair.py`)."""
    light = LlamaForCausalLM.from_pretrained(TOY_TARGET, dtype=torch.float32)
    network = load_network(TOY_DRAFTER)
    assert isinstance(network, Eagle3Network)
    model = widened_target(light, sizes.wide).requires_grad_(False).to(device, BF16)
    return _pair(model, widened_drafter(network, sizes.wide, 1))


def random_pair(sizes: Sizes, device: torch.device, own_kernels: bool = True, quantize: str | None = None) -> Pair:
    """Random weights, made on the device. The drafter's tokens are useless and are replaced by an oracle's."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes.llama, tie_word_embeddings=False), dtype=BF16)
    model = model.eval().requires_grad_(False)
    make_sure(model)
    if quantize is not None:
        why = why_unusable(device)
        if why is not None:
            raise Skipped(why)
        from eyas.targets.triton.packed_linears import quantize_linears  # imports triton

        quantize_linears(model, quantize)
    shape: dict[str, Any] = {name: size for name, size in sizes.llama.items() if name != "num_hidden_layers"}
    config = Eagle3Config(
        **shape,
        draft_vocab_size=sizes.draft_vocab,
        target_hidden_size=shape["hidden_size"],
        num_aux_hidden_states=3,
        taps=choose_taps(model.config),
    )
    with torch.device(device):
        network = Eagle3Network(config)
        set_vocabulary(network, torch.arange(sizes.draft_vocab))
    return _pair(model, network, own_kernels)


def make_sure(model: Any) -> None:
    """Make the next token a fixed permutation of the last one, by a wide margin, whatever the layers add.

    With the logits of random weights, nearly half of the answers would diverge from plain decoding at a near-tie, and
    an oracle couldn't hold an accept length. All matrices are read and multiplied as usual.
    """
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    order = torch.randperm(len(embedding), device=embedding.device)
    head.copy_(embedding[order] * (0.02 / embedding.float().std()))
    embedding.mul_(64 / embedding.float().std())


def triton_passes(model: Any) -> Any:
    """A model's passes in Triton; None where they can't run, and for models that have none."""
    if why_unusable(model.device) is not None:
        return None
    from eyas.targets.triton.decoder import triton_decoder  # imports triton

    try:
        return triton_decoder(model)
    except UnsupportedModelError:
        return None


def _pair(model: Any, network: DraftNetwork, own_kernels: bool = True) -> Pair:
    from tests.recording import recorder

    triton = triton_passes(model) if own_kernels else None
    target = Target(model, decoder=triton, record=recorder(model.device))
    network = network.eval().requires_grad_(False).to(target.device, BF16)
    taps = network.config.taps_of(target.num_layers)
    return Pair(target, drafter_of(network, taps, None, target.record, kernels=target.decoder is not None))


@contextmanager
def without_graphs(pair: Pair) -> Iterator[None]:
    """Engines made from a pair within the block run its passes kernel by kernel, without CUDA graphs."""
    found = pair.target.record, pair.drafter.pairs.record
    pair.target.record = pair.drafter.pairs.record = None
    try:
        yield
    finally:
        pair.target.record, pair.drafter.pairs.record = found


@contextmanager
def stock_attention(target: Target) -> Iterator[Any]:
    """The target's model with transformers' SDPA attention, which `generate` uses."""
    model = target.model
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield model
    finally:
        model.set_attn_implementation(own)
