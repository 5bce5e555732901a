"""What consumers find in their files, key by key, beside what eyas reads back."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from eyas.drafters.checkpoint import save_network
from eyas.drafters.files import read_json
from eyas.drafters.network import DraftNetwork
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.drafter import DrafterToExport, ServedTarget, TreePlan, drafter_to_export, tree_plan
from eyas.interop.export.export import export
from eyas.interop.export.forms import refusals
from eyas.targets import Target

from ... import tiny
from ...pairs import tokenizer

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter")
    made = tiny.network("eagle3", vocab_size=len(tokenizer()), draft_vocab_size=120, taps=[2, 4, 5], embedding="shared",
                        max_position_embeddings=64, default_tree="dynamic:4,3,9")  # fmt: skip
    save_network(made, path, {"validation": {"decoded_accept_length": 3.25}, "target": "someone"})
    return path


def full_vocabulary(**settings: Any) -> DraftNetwork:
    size = len(tokenizer())
    sizes = {"vocab_size": size, "draft_vocab_size": size, "taps": [2, 4, 5], "embedding": "shared"}
    return tiny.network("eagle3", **sizes, **settings)


def written(
    drafter: Path, to: str, served_target: ServedTarget, path: Path
) -> tuple[dict[str, Any], dict[str, Any], str]:
    done = export(drafter, to, path, served_target)
    return read_json(path / "config.json"), load_file(path / "model.safetensors"), done.command


def test_vllm(drafter: Path, served_target: ServedTarget, tmp_path: Path) -> None:
    config, tensors, command = written(drafter, "vllm", served_target, tmp_path)
    assert config[IDS] == config["eagle_config"][IDS] == config["taps"] == [2, 4, 5]
    assert config["max_position_embeddings"] == 512  # the target's
    assert (config["rope_theta"], config["rope_parameters"]["rope_theta"]) == (10000.0, 10000.0)
    assert "embed_tokens.weight" not in tensors
    assert {"layers.0.hidden_norm.weight", "d2t", "t2d"} <= set(tensors)
    assert '"method": "eagle3"' in command
    assert '"num_speculative_tokens": 4' in command
    assert "3.25 tokens per target pass" in (tmp_path / "README.md").read_text()


def test_what_is_false_by_default_is_left_out(drafter: Path, served_target: ServedTarget, tmp_path: Path) -> None:
    """SpecForge's class drops its norm wherever there is a key `norm_output`."""
    for consumer in ("safeailab", "sglang", "vllm", "tensorrt-llm", "openvino"):
        config, _, _ = written(drafter, consumer, served_target, tmp_path / consumer)
        assert not {"norm_output", "fc_norm", "norm_before_fc", "norm_before_residual", "qk_norm"} & config.keys()
    save_network(full_vocabulary(norm_output=True), tmp_path / "normed")
    assert written(tmp_path / "normed", "vllm", served_target, tmp_path / "out")[0]["norm_output"] is True


def test_openvino(drafter: Path, served_target: ServedTarget, tmp_path: Path) -> None:
    config, tensors, command = written(drafter, "openvino", served_target, tmp_path / "out")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert {"midlayer.hidden_norm.weight", "d2t", "t2d", "lm_head.weight"} <= set(tensors)
    assert "embed_tokens.weight" not in tensors
    convert, taps = command.split(" && ")
    folder = tmp_path / "out" / "openvino"
    assert convert.startswith(
        f"optimum-cli export openvino --model {tmp_path / 'out'} --task text-generation-with-past"
    )
    assert convert.endswith(f" {folder}")
    folder.mkdir()
    (folder / "openvino_model.xml").write_text('<rt_info>\n  <eagle3_mode value="True" />\n</rt_info>\n')
    subprocess.run(taps, shell=True, check=True)
    info = (folder / "openvino_model.xml").read_text()
    assert '<eagle3_mode value="True" /><hidden_layers_list value="2, 4, 5" />' in info


def test_sglang_counts_outputs(drafter: Path, served_target: ServedTarget, tmp_path: Path) -> None:
    config, tensors, command = written(drafter, "sglang", served_target, tmp_path)
    assert config["eagle_config"][IDS] == [1, 3, 4]
    assert IDS not in config
    assert config["draft_vocab_size"] == 120
    assert "midlayer.hidden_norm.weight" in tensors
    assert command.endswith("--speculative-num-steps 4 --speculative-eagle-topk 3 --speculative-num-draft-tokens 10")


def test_safeailab_must_not_see_a_target_size_or_it_copies_no_embedding(
    drafter: Path, served_target: ServedTarget, tmp_path: Path
) -> None:
    config, tensors, command = written(drafter, "safeailab", served_target, tmp_path / "a")
    assert command.endswith("--depth 3 --top-k 3 --total-token 10")  # which drafts four levels, as dynamic:4,3,9 does
    assert "target_hidden_size" not in config
    assert "embed_tokens.weight" not in tensors
    assert IDS not in config
    own = tiny.network("eagle3", vocab_size=len(tokenizer()), draft_vocab_size=120)
    save_network(own, tmp_path / "own")
    config, tensors, _ = written(tmp_path / "own", "safeailab", served_target, tmp_path / "b")
    assert config["target_hidden_size"] == 32
    assert "embed_tokens.weight" in tensors


def test_tensorrt_llm(drafter: Path, served_target: ServedTarget, tmp_path: Path) -> None:
    config, tensors, command = written(drafter, "tensorrt-llm", served_target, tmp_path)
    settings = yaml.safe_load((tmp_path / "trtllm.yaml").read_text())["speculative_config"]
    assert settings == {
        "decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model_dir": str(tmp_path),
        "eagle3_layers_to_capture": [1, 3, 4],
    }  # fmt: skip
    assert IDS not in config
    assert "midlayer.hidden_norm.weight" in tensors
    assert str(tmp_path / "trtllm.yaml") in command


def test_speculators(drafter: Path, served_target: ServedTarget, tmp_path: Path) -> None:
    config, _, command = written(drafter, "speculators", served_target, tmp_path)
    assert config["speculators_config"]["verifier"]["name_or_path"] == served_target.name
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["norm_before_residual"] is False  # never left to a default
    assert config["transformer_layer_config"]["rope_theta"] == 10000.0
    assert config[IDS] == [2, 4, 5]
    assert command == f"vllm serve {tmp_path}"


def test_atom_gets_copies(served_target: ServedTarget, tmp_path: Path) -> None:
    made = full_vocabulary(head="shared")
    save_network(made, tmp_path / "d")
    config, tensors, _ = written(tmp_path / "d", "atom", served_target, tmp_path / "out")
    assert torch.equal(tensors["embed_tokens.weight"], served_target.embedding)
    assert torch.equal(tensors["lm_head.weight"], served_target.head)
    assert config["eagle_config"][IDS] == [2, 4, 5]
    assert IDS not in config
    assert not {"d2t", "t2d"} & set(tensors)


def test_no_map_where_the_vocabulary_is_full(served_target: ServedTarget, tmp_path: Path) -> None:
    made = full_vocabulary(head="own")
    save_network(made, tmp_path / "d")
    for to in ("vllm", "sglang", "safeailab", "tensorrt-llm"):
        _, tensors, _ = written(tmp_path / "d", to, served_target, tmp_path / to)
        assert not {"d2t", "t2d"} & set(tensors)


def test_an_embedding_that_is_the_target_s_is_left_out(served_target: ServedTarget, tmp_path: Path) -> None:
    made = tiny.network("eagle3", vocab_size=len(tokenizer()), draft_vocab_size=120, taps=[2, 4, 5])
    with torch.no_grad():
        made.embed_tokens.weight.copy_(served_target.embedding)
    save_network(made, tmp_path / "d")
    _, tensors, _ = written(tmp_path / "d", "sglang", served_target, tmp_path / "out")
    assert "embed_tokens.weight" not in tensors


@pytest.mark.parametrize(
    ("tree", "plan"),
    [("dynamic:5,4,15", TreePlan(5, 4, 15)), ("dynamic:5,4,15,0.1", TreePlan(5, 4, 15)),
     ("chain:6", TreePlan(6, 1, 6)), ("static:eagle1", TreePlan(3, 1, 3)), (None, TreePlan(3, 1, 3))],
)  # fmt: skip
def test_trees_as_engines_count_them(tree: str | None, plan: TreePlan) -> None:
    made = tiny.network("eagle3", **({} if tree is None else {"default_tree": tree}))
    assert tree_plan(drafter_to_export(made, None, {})) == plan


def test_a_target_that_caps_its_logits_lends_no_rows() -> None:
    head = ServedTarget("x", Target(tiny.build_model("gemma2"))).head
    assert head is None
    assert ServedTarget("x", tiny.target()).head is not None


@pytest.mark.parametrize(
    ("model_type", "refused"),
    [("qwen3_next", {"safeailab"}), ("bamba", {"safeailab", "vllm", "speculators"}), ("llama", set())],
)
def test_engines_that_draft_for_no_such_recurrent_target_say_so(model_type: str, refused: set[str]) -> None:
    config = tiny.build_model(model_type).config
    target: Any = SimpleNamespace(partial=SimpleNamespace(config=config, num_layers=tiny.LAYERS))
    drafter = DrafterToExport(tiny.eagle3_module().config, {}, target)
    found = {
        name: [refusal for refusal in refusals(drafter, consumer.families, consumer.rules) if refusal.field == "target"]
        for name, consumer in CONSUMERS.items()
    }
    assert {name for name, reasons in found.items() if reasons} == refused
