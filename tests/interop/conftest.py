"""A target of eight layers that exported drafters are meant for."""

from __future__ import annotations

import pytest
import torch

from eyas.interop.export.drafter import ServedTarget
from eyas.targets.loading import load_embedding_and_head
from eyas.targets.tokenizers import load_tokenizer

from ..pairs import save_target

LAYERS = 8


@pytest.fixture(scope="session")
def served_target(tmp_path_factory: pytest.TempPathFactory) -> ServedTarget:
    path = save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS, max_position_embeddings=512)
    return ServedTarget(
        str(path), load_embedding_and_head(path, dtype=torch.float32, device="cpu"), load_tokenizer(path)
    )
