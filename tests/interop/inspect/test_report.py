"""What inspection finds in a directory: facts, problems and suspicions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.drafters.checkpoint import ABSOLUTE, save_network
from eyas.drafters.files import Headers, TensorInfo, read_headers, read_json
from eyas.errors import CheckpointError, ModelError
from eyas.interop.inspect.report import DrafterReport, TargetProfile, detect, locate, report_drafter

from ... import tiny
from ...pairs import save_drafter

LIKE = TargetProfile(layers=4, hidden_size=32, vocab_size=0, max_length=256, rope_theta=10000.0)


def examine(path: Path, target: TargetProfile | None = None) -> DrafterReport:
    found = locate(str(path))
    assert found.path is not None
    return report_drafter(found.path, target)


def facts(path: Path, **changes: Any) -> TargetProfile:
    """The profile of a target that fits the drafter, with changes."""
    return TargetProfile(**{**vars(LIKE), "vocab_size": read_json(path / "config.json")["vocab_size"], **changes})


def edit(path: Path, *drop: str, **add: Any) -> None:
    """Remove the keys `drop` from config.json and set others."""
    config = read_json(path / "config.json")
    kept = {key: value for key, value in config.items() if key not in drop} | add
    (path / "config.json").write_text(json.dumps(kept), encoding="utf-8")


def retensor(path: Path, *drop: str, **add: torch.Tensor) -> None:
    """Remove the tensors `drop` from the weight file and set others."""
    tensors = load_file(path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k not in drop} | add, path / "model.safetensors")


def test_a_good_drafter(tmp_path: Path) -> None:
    path = save_drafter(tmp_path, max_position_embeddings=4096)
    edit(path, eyas={"recipe": "tiny"})
    report = examine(path, facts(path))
    assert (report.problems, report.warnings, report.missing, report.extra) == ([], [], [], [])
    assert (report.kind, report.taps, report.dtypes) == ("eagle3", [1, 2, 4], ["F32"])
    assert "eagle_aux_hidden_state_layer_ids" in report.tap_source
    assert report.own_embedding
    assert report.own_head
    assert report.config["draft_vocab_size"] == 120
    parameters = tiny.eagle3_module(vocab_size=report.config["vocab_size"], draft_vocab_size=120).parameters()
    assert report.parameters == sum(p.numel() for p in parameters)
    assert report.as_dict()["usable"] is True
    json.dumps(report.as_dict())


def test_without_its_own_embedding_and_head(tmp_path: Path) -> None:
    path = save_drafter(tmp_path)
    retensor(path, "embed_tokens.weight", "lm_head.weight")
    report = examine(path, facts(path))
    assert (report.own_embedding, report.own_head, report.missing, report.problems) == (False, False, [], [])
    narrow = examine(path, facts(path, hidden_size=48))
    assert any("no embedding of its own, and the target's is 48 wide" in problem for problem in narrow.problems)


def test_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    path = save_drafter(tmp_path)
    retensor(path, "fc.weight", **{"surplus": torch.zeros(2), "norm.weight": torch.ones(31)})
    report = examine(path)
    assert (report.missing, report.extra) == (["fc.weight"], ["surplus"])
    assert any("norm.weight is [31], the config says [32]" in problem for problem in report.problems)
    assert not report.as_dict()["usable"]


def test_the_vocabulary_map(tmp_path: Path) -> None:
    path = save_drafter(tmp_path)
    good = load_file(path / "model.safetensors")
    ids = good["d2t"] + torch.arange(120)
    for tensors, drop, expected in (
        ({}, ("d2t",), "no d2t tensor maps it"),
        ({"d2t": ids * 100}, (), "d2t has numbers beyond the vocabulary"),
        ({"t2d": ~good["t2d"]}, (), "name different tokens"),
        ({"d2t": good["d2t"][:7]}, (), "d2t is [7]"),
    ):
        save_file(good, path / "model.safetensors")
        retensor(path, *drop, **tensors)
        report = examine(path)
        assert any(expected in problem for problem in report.problems), expected
    save_file(good | {"d2t": ids}, path / "model.safetensors")
    report = examine(path)
    assert (report.notes, report.problems) == ([ABSOLUTE], [])


def test_pickles_only(tmp_path: Path) -> None:
    path = save_drafter(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    report = examine(path)
    (problem,) = report.problems
    assert "found none; pytorch_model.bin is a pickle" in problem
    assert "`draft_weights=pytorch_model.bin`" in problem
    (path / "pytorch_model.bin").unlink()
    assert examine(path).problems[0].endswith("found none")


def test_what_is_suspicious(tmp_path: Path) -> None:
    path = save_drafter(tmp_path, max_position_embeddings=2048)
    edit(path, "taps", "eagle_aux_hidden_state_layer_ids", "eagle_config", "rope_theta", "rope_parameters")
    report = examine(path, facts(path, rope_theta=500000.0, max_length=8192))
    assert report.problems == []
    assert report.taps is None
    assert "the kind's default" in report.tap_source
    for words in (
        "no taps in config.json",
        "max_position_embeddings is 2048",
        "no rope_theta",
        "no provenance",
        "rope_theta is 10000, but the target's is 500000",
        "max_position_embeddings 2048 is less than the target's 8192",
    ):
        assert any(words in warning for warning in report.warnings), words


def test_taps_that_may_count_layer_outputs(tmp_path: Path) -> None:
    path = save_drafter(tmp_path, taps=[1, 11, 20])
    assert not any("layer outputs" in w for w in examine(path, facts(path, layers=24)).warnings)  # `taps` is certain
    edit(path, "taps")
    (warning,) = [w for w in examine(path, facts(path, layers=24)).warnings if "layer outputs" in w]
    assert "[2, 12, 21]" in warning
    assert not any("layer outputs" in w for w in examine(path, facts(path, layers=25)).warnings)


def test_a_drafter_of_another_target(tmp_path: Path) -> None:
    path = save_drafter(tmp_path, taps=[1, 2, 9])
    report = examine(path, facts(path, hidden_size=48, vocab_size=50, layers=3))
    for words in (
        "states of 32, but the target's is 48",
        "but the target's is 50",
        "[9] lie outside the target's boundaries 0..4",
    ):
        assert any(words in problem for problem in report.problems), words


def test_taps_and_their_number(tmp_path: Path) -> None:
    path = save_drafter(tmp_path)
    edit(path, num_aux_hidden_states=2)
    assert any("reads 2 different taps, but the config names [1, 2, 4]" in p for p in examine(path).problems)


def test_an_unknown_key_is_a_problem(tmp_path: Path) -> None:
    path = save_drafter(tmp_path)
    edit(path, swirl=3)
    assert any("unknown key swirl" in problem for problem in examine(path).problems)


def headers_of(*names: str) -> Headers:
    return Headers({name: TensorInfo((1,), "F32", Path("x")) for name in names}, ["x"])


@pytest.mark.parametrize(
    ("config", "names", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, (), "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 5}, (), "eagle3"),
        ({"model_type": "llama"}, ("fc.weight", "midlayer.hidden_norm.weight", "norm.weight"), "eagle3"),
        ({"model_type": "llama"}, ("fc.weight", "layers.0.mlp.up_proj.weight"), "eagle1"),
        ({"model_type": "llama"}, ("model.fc.weight",), "eagle1"),
        ({"speculators_model_type": "eagle3"}, ("fc.weight",), "eagle3"),
        ({"speculators_model_type": "dflash"}, ("fc.weight",), "dflash"),
        ({"speculators_model_type": "mtp"}, ("fc.weight",), "speculators mtp"),
        ({"speculators_model_type": "peagle"}, ("fc.weight",), "peagle"),
        ({"draft_vocab_size": 5, "parallel_drafting": True}, (), "peagle"),
        ({"draft_vocab_size": 5}, ("mask_hidden",), "peagle"),
        ({"model_type": "llama"}, ("model.norm.weight", "lm_head.weight"), "target"),
        ({}, ("a.weight",), "unknown"),
    ],
)
def test_kinds(config: dict[str, Any], names: tuple[str, ...], kind: str) -> None:
    assert detect(config, headers_of(*names)) == kind


def test_other_kinds_of_drafters_are_named(tmp_path: Path) -> None:
    edit(save_drafter(tmp_path), speculators_model_type="mtp")
    assert any("eyas loads eagle3, " in problem for problem in examine(tmp_path).problems)


@pytest.mark.parametrize("kind", ["eagle1", "mla", "mlp", "medusa"])
def test_every_kind_is_examined(tmp_path: Path, kind: str) -> None:
    save_network(tiny.network(kind), tmp_path, {"target_fingerprint": "abc"})
    fits = facts(tmp_path, fingerprint="abc")
    assert (examine(tmp_path, fits).kind, examine(tmp_path, fits).problems) == (kind, [])
    other = examine(tmp_path, facts(tmp_path, fingerprint="def")).warnings
    assert any("trained for other weights" in warning and "abc" in warning for warning in other)
    retensor(tmp_path, "layers.0.self_attn.o_proj.weight", "layers.0.weight", "blocks.0.layers.0.weight")
    assert len(examine(tmp_path).missing) == 1


def test_headers_count_without_reading(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "d2t": torch.zeros(4, dtype=torch.int64)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    headers = read_headers(tmp_path)
    assert (headers.parameters, headers.dtypes, headers.files) == (
        11,
        ["BF16", "F32"],
        ["one.safetensors", "two.safetensors"],
    )
    (tmp_path / "two.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"two\.safetensors.*is the file complete"):
        read_headers(tmp_path)


def test_what_is_no_model_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        locate(str(tmp_path))
    with pytest.raises(ModelError, match="no copy in the Hub's cache"):
        locate("no/such-model")
