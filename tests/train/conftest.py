"""A tiny target on disk and some chats for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.text.chats import exchange, write_chats
from eyas.train.lm.lm import LmModelConfig, build_lm, train_tokenizer


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_chats(
        path,
        [exchange(f"c{i}", f"What is {i}+{i}?", f"{i}+{i} = <<{i}+{i}={2 * i}>>{2 * i}") for i in range(80)],
    )
    return path


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers, sharp enough not to repeat one token."""
    return save_target(tmp_path_factory.mktemp("target"), embedding=1)


@pytest.fixture(scope="session")
def sure_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a few likely tokens at each position, so that there is something to learn."""
    return save_target(tmp_path_factory.mktemp("sure_target"), embedding=20)


def save_target(folder: Path, embedding: float, layers: int = 4) -> Path:
    """Save a random target with its tied embedding and head scaled by `embedding`."""
    tokenizer = train_tokenizer(["What is 1+1? 2+2 = <<2+2=4>>4"], 512, 256)
    torch.manual_seed(0)
    shape = LmModelConfig(hidden_size=32, layers=layers, heads=2, kv_heads=1, intermediate_size=48, context=256)
    model = build_lm(shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(embedding if "embed" in name else 8)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
