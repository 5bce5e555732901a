"""Translates options of `eyas serve` into arguments of other engines.

Options without a counterpart are refused by name, never ignored. Flags are those of vLLM 0.32, SGLang's main branch of
2026-09, and the llama.cpp in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from eyas.errors import UsageError

Options = Mapping[str, Any]
"""The options given by the user: name in Python -> value."""
Translator = Callable[[str, Any, Options], list[str]]
"""Translates one option: (name, value, all given options) -> arguments. Raises UsageError."""


def option(name: str) -> str:
    """The option as users type it, such as `--max-running`."""
    return "--" + name.replace("_", "-")


def _one(flag: str) -> Translator:
    return lambda _name, value, _given: [flag, str(value)]


def _many(flag: str) -> Translator:
    return lambda _name, values, _given: [flag, *values]


def _joined(flag: str) -> Translator:
    return lambda _name, values, _given: [flag, ",".join(values)]


def _single(flag: str) -> Translator:
    def translate(name: str, values: list[str], _given: Options) -> list[str]:
        if len(values) > 1:
            raise UsageError(f"this engine takes only one {option(name)}: remove the others")
        return [flag, *values]

    return translate


def _choice(choices: Mapping[Any, list[str]]) -> Translator:
    """A translator for an option of which the engine supports only some values."""

    def translate(name: str, value: Any, _given: Options) -> list[str]:
        if value not in choices:
            known = " or ".join(f"{option(name)} {each}" for each in choices)
            raise UsageError(f"this engine has no counterpart to {option(name)} {value}, only to {known}")
        return choices[value]

    return translate


def _port(name: str, value: int, _given: Options) -> list[str]:
    if value == 0:
        raise UsageError("--port 0 isn't possible with another engine: give a port")
    return [option(name), str(value)]


def _vllm_waiting(_name: str, value: int, given: Options) -> list[str]:
    """Translate to vLLM's limit, which is for running and waiting requests together."""
    if "max_running" not in given:
        raise UsageError("--max-waiting also needs --max-running: vLLM limits running and waiting requests together")
    return ["--max-num-queued-reqs", str(value + given["max_running"])]


def _sglang_device(_name: str, value: str, _given: Options) -> list[str]:
    kind, _, number = value.partition(":")
    return ["--device", kind, *(["--base-gpu-id", number] if number else [])]


def _llama_device(_name: str, value: str, _given: Options) -> list[str]:
    kind, _, number = value.partition(":")
    return ["--device", "none" if kind == "cpu" else f"{kind.upper()}{number or 0}"]


def _llama_length(_name: str, value: int, given: Options) -> list[str]:
    """Translate to llama.cpp's limit for each slot; without `--ctx-size`, its pool holds all slots at that limit."""
    pool = [] if "max_cached_tokens" in given else ["--kv-unified"]
    return [*pool, "--kv-unified-per-slot", str(value)]


_EVERYWHERE: dict[str, Translator] = {"host": _one("--host"), "port": _port, "log_format": _choice({"text": []})}
VLLM: dict[str, Translator] = _EVERYWHERE | {
    "api_key": _many("--api-key"),
    "chat_template": _one("--chat-template"),
    "root_path": _one("--root-path"),
    "seed": _one("--seed"),
    "ssl_certfile": _one("--ssl-certfile"),
    "ssl_keyfile": _one("--ssl-keyfile"),
    "served_model_name": _many("--served-model-name"),
    "allow_origin": lambda _name, origins, _given: ["--allowed-origins", json.dumps(origins)],
    "drain_seconds": lambda _name, seconds, _given: ["--shutdown-timeout", str(math.ceil(seconds))],
    "dtype": _one("--dtype"),
    "enforce_eager": lambda _name, _value, _given: ["--enforce-eager"],
    "max_running": _one("--max-num-seqs"),
    "max_waiting": _vllm_waiting,
    "max_model_len": _one("--max-model-len"),
    "prefix_tokens": _choice({0: ["--no-enable-prefix-caching"]}),
    "prefill_chunk": _one("--max-num-batched-tokens"),
}
SGLANG: dict[str, Translator] = _EVERYWHERE | {
    "api_key": _single("--api-key"),
    "chat_template": _one("--chat-template"),
    "root_path": _one("--fastapi-root-path"),
    "seed": _one("--random-seed"),
    "served_model_name": _single("--served-model-name"),
    "dtype": _one("--dtype"),
    "device": _sglang_device,
    "compile": lambda _name, _value, _given: ["--enable-torch-compile"],
    "enforce_eager": lambda _name, _value, _given: ["--disable-cuda-graph"],
    "max_running": _one("--max-running-requests"),
    "max_waiting": _one("--max-queued-requests"),
    "max_model_len": _one("--context-length"),
    "max_cached_tokens": _one("--max-total-tokens"),
    "prefix_tokens": _choice({0: ["--disable-radix-cache"]}),
    "prefill_chunk": _one("--chunked-prefill-size"),
}
LLAMA_CPP: dict[str, Translator] = _EVERYWHERE | {
    "api_key": _joined("--api-key"),
    "chat_template": lambda _name, file, _given: ["--jinja", "--chat-template-file", str(file)],
    "seed": _one("--seed"),
    "ssl_certfile": _one("--ssl-cert-file"),
    "ssl_keyfile": _one("--ssl-key-file"),
    "served_model_name": _joined("--alias"),
    "allow_origin": _joined("--cors-origins"),
    "device": _llama_device,
    "attention": _choice({"sdpa": ["--flash-attn", "on"], "eager": ["--flash-attn", "off"]}),
    "max_running": _one("--parallel"),
    "max_model_len": _llama_length,
    "max_cached_tokens": lambda _name, value, _given: ["--kv-unified", "--ctx-size", str(value)],
    "prefix_tokens": _choice({0: ["--no-cache-prompt"]}),
    "prefill_chunk": _one("--batch-size"),
    "log_format": _choice({"text": [], "json": ["--log-jsonl"]}),
}


def translated(engine: str, translators: Mapping[str, Translator], given: Options) -> list[str]:
    """The arguments for all given options; UsageError, naming them, if any have no counterpart."""
    unknown = [option(name) for name in given if name not in translators]
    if unknown:
        raise UsageError(
            f"{engine} has no counterpart to {', '.join(unknown)}: remove it, or give the engine's own option with "
            "--engine-option"
        )
    return [part for name, value in given.items() for part in translators[name](name, value, given)]
