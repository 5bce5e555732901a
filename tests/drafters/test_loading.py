"""From a directory to a drafter that fits its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.drafters.checkpoint import save_network
from eyas.drafters.loading import load_drafter, local_directory
from eyas.errors import DrafterMismatchError, MissingModelError, UsageError
from eyas.targets import Target
from eyas.targets.fingerprint import fingerprint

from .. import tiny


def saved(path: Path, **settings: Any) -> Path:
    save_network(tiny.eagle3_module(**settings), path)
    return path


def test_it_loads_for_its_target(tmp_path: Path) -> None:
    drafter = load_drafter(saved(tmp_path, taps=[1, 2, 3]), tiny.target())
    assert drafter.taps == (1, 2, 3)
    assert drafter.network.embed_tokens.weight.dtype == torch.float32


def test_without_named_taps_it_reads_eagle3s(tmp_path: Path) -> None:
    assert load_drafter(saved(tmp_path), tiny.target()).taps == (1, 3, 4)


def test_it_takes_the_target_s_dtype(tmp_path: Path) -> None:
    target = Target(tiny.build_model("llama").to(torch.bfloat16))
    assert load_drafter(saved(tmp_path), target).network.norm.weight.dtype == torch.bfloat16


def test_it_borrows_the_target_s_embedding_and_head(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    save_file(kept, tmp_path / "model.safetensors")
    target = tiny.target()
    network = load_drafter(tmp_path, target).network
    tokens, states = torch.arange(9), torch.randn(3, tiny.HIDDEN)
    assert torch.equal(network.embed(tokens), target.model.model.embed_tokens.weight[:9])
    torch.testing.assert_close(network.logits(states), target.head(states)[:, network.target_ids])


def test_weights_of_another_target_are_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny.target()
    own = {"target_fingerprint": fingerprint(target.model)}
    for recorded, said in (({}, 0), (own, 0), ({"target_fingerprint": "0"}, 1)):
        caplog.clear()
        save_network(tiny.eagle3_module(), tmp_path, recorded)
        assert load_drafter(tmp_path, target)
        assert len(caplog.records) == said
    assert "trained for other weights" in caplog.text
    assert str(tmp_path) in caplog.text


def test_a_kind_may_be_insisted_on(tmp_path: Path) -> None:
    assert load_drafter(saved(tmp_path), tiny.target(), method="eagle3")
    with pytest.raises(UsageError, match="is an eagle3 drafter, not mlp"):
        load_drafter(tmp_path, tiny.target(), method="mlp")


def test_a_mismatch_names_every_reason(tmp_path: Path) -> None:
    wrong = {"target_hidden_size": 48, "vocab_size": 101, "num_aux_hidden_states": 4, "taps": [1, 1, 9]}
    with pytest.raises(DrafterMismatchError) as caught:
        load_drafter(saved(tmp_path, **wrong), tiny.target())
    message = str(caught.value)
    for reason in (
        "reads states 48 wide, the target's are 32",
        "vocabulary has 101 tokens, the target's 97",
        "reads 4 taps, but 3 are named: [1, 1, 9]",
        "outside the target's boundaries 0..5",
        "not distinct",
        str(tmp_path),
    ):
        assert reason in message


@pytest.mark.parametrize("source", ["no/such/place", "not a name at all", "/no/such/directory"])
def test_what_is_no_directory_and_no_hub_model(source: str) -> None:
    with pytest.raises(MissingModelError, match="there is no "):
        local_directory(source)
