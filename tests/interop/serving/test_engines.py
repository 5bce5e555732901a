"""Other engines' commands: every option in every engine's words or refused, trees, keys, what is printed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from eyas.cli.common.options import ChatTargetOptions, DraftOptions
from eyas.cli.serve.elsewhere import OWN_OPTIONS
from eyas.cli.serve.serve import CapacityOptions, ServerOptions
from eyas.errors import UsageError
from eyas.interop.export.drafter import TreePlan
from eyas.interop.serving.commands import ServedDrafter
from eyas.interop.serving.engines import ENGINES, serve_command, translated

REFUSED = None
# option -> its value, and what vLLM, SGLang and llama.cpp are told
TABLE: dict[str, tuple[Any, str | None, str | None, str | None]] = {
    "host": ("0.0.0.0", "--host 0.0.0.0", "--host 0.0.0.0", "--host 0.0.0.0"),
    "port": (8001, "--port 8001", "--port 8001", "--port 8001"),
    "api_key": (["a", "b"], "--api-key a b", REFUSED, "--api-key a,b"),
    "served_model_name": (["a", "b"], "--served-model-name a b", REFUSED, "--alias a,b"),
    "root_path": ("/a", "--root-path /a", "--fastapi-root-path /a", REFUSED),
    "ssl_certfile": ("c.pem", "--ssl-certfile c.pem", REFUSED, "--ssl-cert-file c.pem"),
    "ssl_keyfile": ("k.pem", "--ssl-keyfile k.pem", REFUSED, "--ssl-key-file k.pem"),
    "fim_tokens": ("<A>{prefix}<B>{suffix}", REFUSED, REFUSED, REFUSED),
    "reasoning_parser": ("mistral", "--reasoning-parser mistral", "--reasoning-parser mistral", REFUSED),
    "seed": (3, "--seed 3", "--random-seed 3", "--seed 3"),
    "chat_template": (
        "t.jinja",
        "--chat-template t.jinja",
        "--chat-template t.jinja",
        "--jinja --chat-template-file t.jinja",
    ),
    "allow_origin": (["x"], '--allowed-origins ["x"]', REFUSED, "--cors-origins x"),
    "allow_host": (["x"], REFUSED, REFUSED, REFUSED),
    "trusted_proxy": (["10.0.0.1"], REFUSED, REFUSED, REFUSED),
    "parse_special_tokens": (True, REFUSED, REFUSED, REFUSED),
    "per_request_spec_decode_metrics": ("summary", "--per-request-spec-decode-metrics summary", REFUSED, REFUSED),
    "otlp_traces_endpoint": ("http://a/v1/traces", "--otlp-traces-endpoint http://a/v1/traces", REFUSED, REFUSED),
    "max_connections": (50, REFUSED, REFUSED, REFUSED),
    "idle_seconds": (7.0, REFUSED, REFUSED, REFUSED),
    "request_seconds": (3.0, REFUSED, REFUSED, REFUSED),
    "drain_seconds": (2.5, "--shutdown-timeout 3", REFUSED, REFUSED),
    "max_body_bytes": (10, REFUSED, REFUSED, REFUSED),
    "log_interval": (5.0, REFUSED, REFUSED, REFUSED),
    "log_format": ("json", REFUSED, REFUSED, "--log-jsonl"),
    "log_level": ("debug", REFUSED, "--log-level debug", REFUSED),
    "max_running": (8, "--max-num-seqs 8", "--max-running-requests 8", "--parallel 8"),
    "max_waiting": (9, REFUSED, "--max-queued-requests 9", REFUSED),
    "max_model_len": (99, "--max-model-len 99", "--context-length 99", "--kv-unified --kv-unified-per-slot 99"),
    "max_cached_tokens": (500, REFUSED, "--max-total-tokens 500", "--kv-unified --ctx-size 500"),
    "prefix_tokens": (0, "--no-enable-prefix-caching", "--disable-radix-cache", "--no-cache-prompt"),
    "prefill_chunk": (64, "--max-num-batched-tokens 64", "--chunked-prefill-size 64", "--batch-size 64"),
    "dtype": ("bfloat16", "--dtype bfloat16", "--dtype bfloat16", REFUSED),
    "device": ("cuda:1", REFUSED, "--device cuda --base-gpu-id 1", "--device CUDA1"),
    "attention": ("eager", REFUSED, REFUSED, "--flash-attn off"),
    "compile": (True, REFUSED, "--enable-torch-compile", REFUSED),
    "enforce_eager": (True, "--enforce-eager", "--disable-cuda-graph", REFUSED),
    "quantize": ("int8", REFUSED, REFUSED, REFUSED),
    "kv_cache_dtype": ("int8", REFUSED, REFUSED, "--cache-type-k q8_0 --cache-type-v q8_0"),
    "keep_panels": (True, REFUSED, REFUSED, REFUSED),
    "kernels": ("triton", REFUSED, REFUSED, REFUSED),
    "draft_window": ("256", REFUSED, REFUSED, REFUSED),
    "draft_quantize": ("off", REFUSED, REFUSED, REFUSED),
    "costs": ("c.json", REFUSED, REFUSED, REFUSED),
    "coupled": (True, REFUSED, REFUSED, REFUSED),
    "acceptance": ("typical", REFUSED, REFUSED, REFUSED),
}


def test_the_table_has_every_option() -> None:
    groups = (ChatTargetOptions, DraftOptions, ServerOptions, CapacityOptions)
    assert {field.name for group in groups for field in fields(group)} == set(TABLE) | set(OWN_OPTIONS)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TABLE)
def test_an_option_is_said_or_refused_by_name(name: str, engine: str) -> None:
    value, *said = TABLE[name]
    wanted = said[list(ENGINES).index(engine)]
    words = ENGINES[engine].translators
    if wanted is not REFUSED:
        assert " ".join(translated(engine, words, {name: value})) == wanted
        return
    with pytest.raises(UsageError, match=f"`{name}="):
        translated(engine, words, {name: value})


def test_values_that_only_some_consumers_take() -> None:
    vllm, sglang, llama = (ENGINES[name].translators for name in ("vllm", "sglang", "llama.cpp"))
    assert translated("", vllm, {"max_running": 4, "max_waiting": 2})[2:] == ["--max-num-queued-reqs", "6"]
    assert translated("", sglang, {"api_key": ["k"], "device": "cpu"}) == ["--api-key", "k", "--device", "cpu"]
    assert translated("", llama, {"device": "cpu", "log_format": "text"}) == ["--device", "none"]
    pool = translated("", llama, {"max_cached_tokens": 9, "max_model_len": 4})
    assert pool == ["--kv-unified", "--ctx-size", "9", "--kv-unified-per-slot", "4"]
    for wanted, words in (
        ({"prefix_tokens": 5}, "`prefix_tokens=5`, only to `prefix_tokens=0`"),
        ({"port": 0}, "isn't possible with another engine"),
        ({"max_body_bytes": 1, "coupled": True}, "no counterpart to `max_body_bytes=`, `coupled=`"),
    ):
        with pytest.raises(UsageError, match=words):
            translated("vLLM", vllm, wanted)


SPECULATION = {
    "vllm": '--speculative-config {"method": "eagle3", "model": "D", "num_speculative_tokens": 5}',
    "sglang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path D --speculative-num-steps 5 "
    "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
    "llama.cpp": "-md D --spec-type draft-eagle3 --spec-draft-n-max 5 --no-spec-draft-backend-sampling",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_whole_command(engine: str) -> None:
    one = ENGINES[engine]
    served_drafter = ServedDrafter("eagle3", "D", TreePlan(5, 4, 15))
    command = serve_command(one, ["P", "serve"], "M", served_drafter, ["--port", "1", "--x"])
    target = {"vllm": "M", "sglang": "--model-path M", "llama.cpp": "-m M"}[engine]
    expected = ["P serve", target, SPECULATION[engine], *one.extra, "--port 1 --x"]
    assert " ".join(command.argv) == " ".join(expected)
    plain = serve_command(one, None, "M", None, [])
    assert not any("spec" in part for part in plain.argv)
    first = {"vllm": ["vllm", "serve"], "sglang": ["python", "-m", "sglang.launch_server"]}
    assert list(plain.argv[: len(first.get(engine, ["llama-server"]))]) == first.get(engine, ["llama-server"])


def test_eagle1_and_vllm_as_a_module() -> None:
    served_drafter = ServedDrafter("eagle", "D", TreePlan(3, 1, 3))
    command = serve_command(ENGINES["vllm"], ["python", "-m", "server"], "M", served_drafter, [])
    assert command.argv[3:5] == ("--model", "M")  # the module doesn't take it by place
    assert '"method": "eagle"' in command.argv[-1]
    assert "EAGLE" in serve_command(ENGINES["sglang"], None, "M", served_drafter, []).argv


def test_a_key_from_the_environment_is_not_printed() -> None:
    hidden = {"a b": "EYAS_API_KEY"}
    by_variable = serve_command(ENGINES["vllm"], ["vllm", "serve"], "M x", None, [], "a b")
    assert by_variable.environment == {"VLLM_API_KEY": "a b"}
    assert by_variable.text(hidden) == "VLLM_API_KEY=\"$EYAS_API_KEY\" vllm serve 'M x'"
    by_option = serve_command(ENGINES["sglang"], ["sglang"], "M", None, [], "a b")
    assert by_option.text(hidden) == 'sglang --model-path M --enable-metrics --api-key "$EYAS_API_KEY"'


@pytest.mark.parametrize(
    ("engine", "tree", "plan"),
    [
        ("vllm", "chain:4", (4, 1, 4)),
        ("llama.cpp", "dynamic:5,4,15", None),
        ("sglang", "dynamic:5,4,15", (5, 4, 15)),
        ("sglang", "dynamic:5,4,15,0.5", None),
        ("sglang", "chain:4", (4, 1, 4)),
        ("sglang", "static:eagle1", None),
        ("sglang", "shared:4,4,32", None),
        ("vllm", "auto", None),
        ("vllm", "auto:chain", None),
    ],
)
def test_trees(engine: str, tree: str, plan: tuple[int, int, int] | None) -> None:
    if plan is not None:
        assert ENGINES[engine].plan(tree, "tree") == plan
        return
    with pytest.raises(UsageError, match="drafts only chains"):
        ENGINES[engine].plan(tree, "tree")
