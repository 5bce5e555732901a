"""Checkpoints: what is written reads back; what is damaged is refused with its name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.drafters.checkpoint import load_network, save_network
from eyas.drafters.kinds.eagle3 import Eagle3Network
from eyas.errors import CheckpointError, ConfigError
from eyas.targets import Target

from .. import tiny

Tensors = dict[str, Tensor]


@pytest.fixture
def module() -> Eagle3Network:
    return tiny.eagle3_module(num_hidden_layers=2, fc_norm=True)


def rewrite(path: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the tensors of a saved directory in place."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def reconfigure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps(config))


def equal(a: Eagle3Network, b: Eagle3Network) -> bool:
    left = a.state_dict()
    right = b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_what_is_saved_loads_back(tmp_path: Path, module: Eagle3Network) -> None:
    save_network(module, tmp_path, {"note": "here"})
    loaded = load_network(tmp_path)
    assert equal(loaded, module)
    assert loaded.config == module.config
    assert not loaded.training
    assert not any(p.requires_grad or p.is_meta for p in loaded.parameters())
    assert torch.equal(loaded.rotary.inv_freq, module.rotary.inv_freq)
    assert json.loads((tmp_path / "config.json").read_text())["eyas"] == {"note": "here"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_it_is_written_as_midlayer_and_both_layouts_load(tmp_path: Path, module: Eagle3Network) -> None:
    save_network(module, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "midlayer.self_attn.q_proj.weight" in names
    assert "layers.1.self_attn.q_proj.weight" in names
    assert not any(n.startswith("layers.0.") for n in names)

    def rename(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    assert equal(load_network(tmp_path), module)


def test_the_dtype_of_the_file_is_kept(tmp_path: Path, module: Eagle3Network) -> None:
    save_network(module.to(torch.bfloat16), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_network(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.d2t.dtype == torch.int64


def test_a_sharded_checkpoint(tmp_path: Path, module: Eagle3Network) -> None:
    save_network(module, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {n: f"model-{i % 2 + 1}-of-2.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == file}, tmp_path / file)
    with pytest.raises(CheckpointError, match=r"found several .* and no index"):
        load_network(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert equal(load_network(tmp_path), module)
    (tmp_path / where[names[0]]).unlink()
    with pytest.raises(CheckpointError, match="can't read the header"):
        load_network(tmp_path)
    index.write_text(json.dumps({"metadata": {}}))
    with pytest.raises(CheckpointError, match="weight_map"):
        load_network(tmp_path)


DAMAGE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop("fc.weight"), r"missing: fc\.weight\s+extra: none"),
    "missing in a layer": (
        lambda t: t.pop("layers.1.mlp.up_proj.weight"),
        r"missing: layers\.1\.mlp\.up_proj\.weight",
    ),
    "extra": (lambda t: t.update({"fc.bias": torch.zeros(32)}), r"missing: none\s+extra: fc\.bias"),
    "both": (
        lambda t: t.update({"fuse.weight": t.pop("fc.weight")}),
        r"missing: fc\.weight\s+extra: fuse\.weight",
    ),
    "shape": (
        lambda t: t.update({"norm.weight": torch.ones(31), "fc.weight": torch.ones(32, 95)}),
        r"(?s)fc\.weight is \[32, 95\], the config says \[32, 96\].*norm\.weight is \[31\]",
    ),
    "twice": (
        lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(48, 32)}),
        "the same tensors twice.*: midlayer.mlp.up_proj.weight",
    ),
    "no map": (lambda t: (t.pop("d2t"), t.pop("t2d")), "no d2t tensor maps it"),
    "short map": (
        lambda t: t.update(d2t=t["d2t"][:-1].clone()),
        r"d2t is \[59\], the config says draft_vocab_size 60",
    ),
    "outside": (lambda t: t["d2t"].__setitem__(-1, 90), "60 different tokens below 97"),
    "negative": (lambda t: t["d2t"].__setitem__(0, -1), "60 different tokens below 97"),
    "twice the same token": (
        lambda t: t["d2t"].__setitem__(5, t["d2t"][4] - 1),
        "60 different tokens below 97",
    ),
    "t2d of another map": (
        lambda t: t.update(t2d=t["t2d"].logical_not()),
        "t2d and d2t name different tokens",
    ),
    "t2d of another size": (
        lambda t: t.update(t2d=t["t2d"][:-1].clone()),
        "t2d and d2t name different tokens",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, module: Eagle3Network, name: str) -> None:
    change, reason = DAMAGE[name]
    save_network(module, tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=reason):
        load_network(tmp_path)


def test_a_config_that_asks_for_other_tensors(tmp_path: Path, module: Eagle3Network) -> None:
    save_network(module, tmp_path)
    reconfigure(tmp_path, fc_norm=False, norm_before_fc=True)
    with pytest.raises(CheckpointError, match=r"missing: input_norm\.weight\s+extra: fc_norm\.0\.weight"):
        load_network(tmp_path)
    reconfigure(tmp_path, mystery=1)
    with pytest.raises(ConfigError, match="unknown key mystery"):
        load_network(tmp_path)
    reconfigure(tmp_path, fc_norm=True, norm_before_fc=False)
    assert equal(load_network(tmp_path, ignore=["mystery"]), module)


def test_harmless_differences(tmp_path: Path, module: Eagle3Network) -> None:
    """int32 maps, t2d as numbers or absent, stored RoPE tables."""
    save_network(module, tmp_path)

    def change(tensors: Tensors) -> None:
        tensors["d2t"] = tensors["d2t"].int()
        tensors["t2d"] = tensors["t2d"].to(torch.uint8)
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(tmp_path, change)
    assert equal(load_network(tmp_path), module)
    rewrite(tmp_path, lambda t: t.pop("t2d"))
    assert equal(load_network(tmp_path), module)


def test_a_full_vocabulary_needs_no_map(tmp_path: Path) -> None:
    module = tiny.eagle3_module(draft_vocab_size=tiny.VOCAB)
    save_network(module, tmp_path)
    rewrite(tmp_path, lambda t: (t.pop("d2t"), t.pop("t2d")))
    assert equal(load_network(tmp_path), module)


def test_embedding_and_head_may_be_the_target_s(tmp_path: Path, module: Eagle3Network) -> None:
    """The head is cut down to the draft vocabulary, in the order of the map."""
    save_network(module, tmp_path)
    rewrite(tmp_path, lambda t: (t.pop("embed_tokens.weight"), t.pop("lm_head.weight")))
    target = tiny.target()
    embedding = target.model.get_input_embeddings().weight
    head = target.model.get_output_embeddings().weight
    loaded = load_network(tmp_path, target)
    tokens = torch.arange(tiny.VOCAB)
    states = torch.randn(3, tiny.HIDDEN)
    assert torch.equal(loaded.embed(tokens), embedding)
    assert not any(p.shape == embedding.shape for p in loaded.parameters())  # one copy in memory
    torch.testing.assert_close(loaded.logits(states), states @ head[module.target_ids].T)
    with pytest.raises(CheckpointError, match=r"has no embed_tokens\.weight and no target was given"):
        load_network(tmp_path)
    with pytest.raises(CheckpointError, match="97 x 48 where the drafter needs 97 x 32"):
        load_network(tmp_path, Target(tiny.build_model("llama", hidden_size=48)))
    with pytest.raises(CheckpointError, match=r"no embed_tokens\.weight, and the target's is 92 x 32"):
        load_network(tmp_path, Target(tiny.build_model("llama", vocab_size=92)))


def test_its_own_embedding_wins_over_the_target_s(tmp_path: Path, module: Eagle3Network) -> None:
    save_network(module, tmp_path)
    loaded = load_network(tmp_path, tiny.target())
    assert equal(loaded, module)
    assert torch.equal(loaded.embed(torch.arange(9)), module.embed_tokens.weight[:9])


class Evil:
    """Unpickling it would run code."""

    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


def test_pickles_are_read_only_when_named_and_never_run(
    tmp_path: Path, module: Eagle3Network, capsys: pytest.CaptureFixture[str]
) -> None:
    save_network(module, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found none; .*`draft_weights=pytorch_model\.bin"):
        load_network(tmp_path)
    assert equal(load_network(tmp_path, weights="pytorch_model.bin"), module)
    for content in (Evil(), {"fc.weight": Evil()}):
        torch.save(content, tmp_path / "evil.bin")
        with pytest.raises(CheckpointError, match="can't read the weights"):
            load_network(tmp_path, weights="evil.bin")
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(CheckpointError, match="can't read the weights"):
        load_network(tmp_path, weights="evil.bin")
    torch.save([1, 2], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="can't read the weights"):
        load_network(tmp_path, weights="list.bin")
    assert capsys.readouterr().out == ""


def test_unreadable_directories(tmp_path: Path, module: Eagle3Network) -> None:
    with pytest.raises(CheckpointError, match="is this a drafter directory"):
        load_network(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        load_network(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        load_network(tmp_path)
    save_network(module, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0 broken ")
    with pytest.raises(CheckpointError, match="can't read the header"):
        load_network(tmp_path)
    with pytest.raises(CheckpointError, match="can't read the header"):
        load_network(tmp_path, weights="absent.safetensors")


def test_a_half_written_directory_has_no_config(tmp_path: Path, module: Eagle3Network, monkeypatch: Any) -> None:
    """config.json comes last: a run killed while saving leaves no directory that looks whole."""

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("eyas.drafters.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_network(module, tmp_path)
    assert not (tmp_path / "config.json").exists()
