"""The recipes of real models: sizes from the models' own config.json, and a few steps on the same architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.data.capture.shard import read_rows
from eyas.data.tokens.batches import grouped
from eyas.session import load
from eyas.targets import load_tokenizer
from eyas.text.chats import exchange, write_chats
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.settings import sized
from eyas.train.drafter.shape import drafter_config, with_taps
from eyas.train.drafter.train import train_drafter
from eyas.train.recipe import load_recipe
from eyas.types import Request, SamplingParams

from .models import CONFIGS, ConfigOnly, save_tiny

RECIPES = Path(__file__).parents[2] / "src/eyas/recipes"

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SIZES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "eagle3_8b", LLAMA,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 128256, "taps": (2, 16, 29), "rope_theta": 500000.0,
         "max_position_embeddings": 131072},
    ),
    (
        "eagle3_8b", "Qwen/Qwen3-8B",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 151936, "taps": (2, 18, 33), "rope_theta": 1000000,
         "max_position_embeddings": 40960},
    ),
    (
        "eagle3_32b", "Qwen/Qwen3-32B",
        {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 151936, "taps": (2, 32, 61), "rope_theta": 1000000,
         "max_position_embeddings": 40960, "batch_tokens": 4096},
    ),
    (
        "eagle3_moe", "Qwen/Qwen3-30B-A3B",
        {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128, "vocab_size": 151936, "taps": (2, 24, 45), "rope_theta": 1000000,
         "max_position_embeddings": 40960},
    ),
    (
        "eagle3_moe", "openai/gpt-oss-20b",
        {"hidden_size": 2880, "intermediate_size": 11520, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 64, "vocab_size": 201088, "taps": (2, 12, 20), "rope_theta": 150000,
         "max_position_embeddings": 131072},
    ),
    (
        "eagle3_mla", "deepseek-ai/DeepSeek-V2-Lite-Chat",
        {"hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16, "kv_lora_rank": 512,
         "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "vocab_size": 102400, "taps": (2, 13, 24), "rope_theta": 10000, "max_position_embeddings": 163840},
    ),
    (
        "eagle3_mla", "deepseek-ai/DeepSeek-V3",
        {"hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128, "kv_lora_rank": 512,
         "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "vocab_size": 129280, "taps": (2, 30, 58), "rope_theta": 10000, "max_position_embeddings": 163840},
    ),
    (
        "eagle3_8b", "qwen3_5",  # taps follow full-attention layers
        {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4,
         "head_dim": 256, "vocab_size": 248320, "taps": (4, 16, 28), "rope_theta": 10000.0,
         "max_position_embeddings": 32768},
    ),
]  # fmt: skip


def section(name: str, *overrides: str) -> DrafterTrainConfig:
    found = load_recipe(RECIPES / f"{name}.yaml", overrides).drafter
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "model", "expected"), SIZES, ids=[f"{name}-{model}" for name, model, _ in SIZES])
def test_sizes_are_the_models(name: str, model: str, expected: dict[str, Any], tmp_path: Path) -> None:
    target = ConfigOnly.of(model, tmp_path)
    config = sized(section(name, f"drafter.target={model}"), target, "bfloat16")
    made = drafter_config(with_taps(config.shape, target, ()), target)
    found = {**made.model_dump(), "rope_theta": made.model_dump()["rope_parameters"]["rope_theta"]}
    expected = {"batch_tokens": 8192, **expected}
    assert config.batch_tokens == expected.pop("batch_tokens")
    assert config.max_length == 4096
    assert {key: found[key] for key in expected} == expected
    assert (made.draft_vocab_size, made.target_hidden_size) == (32_000, expected["hidden_size"])
    assert (made.embedding, made.head) == ("own", "own")


def test_a_target_with_a_short_context_is_not_outgrown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[LLAMA], "max_position_embeddings": 2048}))
    target = ConfigOnly.of(LLAMA, tmp_path)
    target.config.max_position_embeddings = 2048
    target.config.vocab_size = 20_000
    config = sized(section("eagle3_8b"), target, "bfloat16")
    assert (config.max_length, config.batch_tokens) == (2048, 4096)
    assert config.shape.draft_vocab_size is None  # all that it has
    assert drafter_config(config.shape, target).draft_vocab_size == 20_000


def test_the_settings_are_the_published_ones() -> None:
    """Those of models of billions of parameters; others get Muon."""
    for name in ("eagle3", "eagle3_8b", "eagle3_32b", "eagle3_moe", "eagle3_mla"):
        loop = section(name, "drafter.target=x", "drafter.store=x", "drafter.output=x").loop
        optimizer = loop.optimizer.resolved(4096, sharded=False)
        assert optimizer.kind == ("muon" if name == "eagle3" else "adamw")
        assert (optimizer.lr, optimizer.betas, optimizer.clip) == (
            1.5e-4 if name == "eagle3" else 1e-4,
            (0.9, 0.95),
            0.5,
        )
        assert (loop.schedule.kind, loop.schedule.warmup) == ("cosine", 0.015)
        assert (loop.epochs, loop.steps) == (5, None)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    texts = [(f"What is {i}+{i}?", f"{i}+{i} = <<{i}+{i}={2 * i}>>{2 * i}") for i in range(30)]
    write_chats(path, [exchange(f"c{i}", *pair) for i, pair in enumerate(texts)])
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("eagle3_8b", LLAMA),
        pytest.param("eagle3_32b", "Qwen/Qwen3-32B", marks=pytest.mark.slow),
        pytest.param("eagle3_moe", "Qwen/Qwen3-30B-A3B", marks=pytest.mark.slow),
        pytest.param("eagle3_mla", "deepseek-ai/DeepSeek-V2-Lite-Chat", marks=pytest.mark.slow),
        pytest.param("eagle3_8b", "qwen3_5", marks=pytest.mark.slow),
    ],
)
def test_it_trains_a_drafter_of_the_architecture(name: str, model: str, chats: Path, tmp_path: Path) -> None:
    """The recipe as it is, but for where things lie and how much is validated: so steps come from its epochs."""
    target = save_tiny(model, tmp_path / "target")
    config = section(
        name,
        f"drafter.target={target}",
        "drafter.source=online",
        "drafter.store=null",
        f"drafter.chats={chats}",
        f"drafter.output={tmp_path / 'run'}",
        "drafter.held_out_share=0.2",
        "drafter.device=cpu",
        "drafter.target_dtype=float32",
        "drafter.validation.batches=1",
        "drafter.validation.prompts=1",
        "drafter.validation.max_tokens=8",
    )
    place = train_drafter(config)
    made = json.loads((place / "config.json").read_text())
    rows = read_rows(load_tokenizer(str(target)), chats, 0.2, None, made["vocab_size"]).rows["train"]
    lengths = sorted(len(row.tokens) for row in rows)
    # of so few chats an `auto` micro-batch holds as little as the longest allows, for more steps
    budget = lengths[-1] if config.batch_tokens == "auto" else config.batch_tokens
    epoch = len(list(grouped(range(len(lengths)), lengths, budget)))
    steps = -(-5 * epoch // config.loop.accumulate)
    assert made["eyas"]["steps"] == made["eyas"]["loop"]["steps"] == steps > 1
    assert made["draft_vocab_size"] == made["vocab_size"]
    assert (made["hidden_size"], made["num_hidden_layers"]) == (32, 1)
    assert ("kv_lora_rank" in made) == (name == "eagle3_mla")
    settings = (tmp_path / "run" / "settings.txt").read_text()
    assert f"up to {budget:,} tokens, {epoch} an epoch" in settings
    assert f"{steps} of {config.loop.accumulate} micro-batches" in settings
    assert "warning" not in settings

    request = Request((3, 20, 21, 22, 1, 4), SamplingParams(max_tokens=12, ignore_eos=True))
    plain = load(target, dtype="float32").generate([request])[0]
    drafted = load(target, place, tree="chain:3", dtype="float32").generate([request])[0]
    assert drafted.token_ids == plain.token_ids
