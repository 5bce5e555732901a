"""A target of eight layers that exported drafters are meant for."""

from __future__ import annotations

import pytest
import torch

from eyas.interop.export.subject import Serving
from eyas.targets.loading import load_ends, load_tokenizer

from ..pairs import save_target

LAYERS = 8


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Serving:
    path = save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS, max_position_embeddings=512)
    return Serving(str(path), load_ends(path, dtype=torch.float32, device="cpu"), load_tokenizer(path))
