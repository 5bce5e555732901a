"""Options of vLLM and SGLang: what they mean here, and which have no counterpart.

The reverse, our options translated for other engines, is `eyas.interop.serving.engines`. `docs/options.md` lists both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from typer import Argument, Option

from eyas.errors import UsageError

EPILOG = "Many options of vLLM and SGLang are understood, too: docs/options.md lists them."
_ELSEWHERE = "or have vLLM serve it: eyas serve --engine vllm --engine-option=..."


TARGET_HELP = "a folder, GGUF file (FILE.gguf, REPO:FILE.gguf) or Hub id; smollm2 is a small one to try"
DRAFTER_HELP = "a folder, GGUF file or Hub id of a draft model or a small language model; smollm2 is that model's"
DRAFTER_OR_AUTO_HELP = f"{DRAFTER_HELP}; auto looks for one"
"""What names a target or a drafter, in every help."""


SAMPLING_OPTIONS = {"max_tokens": "max_new_tokens", "stop_token_ids": "stop_token_id"}
"""Sampling parameter -> the option that sets it, where the names differ."""
_OPTIONS = SAMPLING_OPTIONS | {
    "compiled": "compile",
    "eager": "enforce_eager",
    "ignore_config_keys": "ignore_config_key",
}
"""Parameter of the library -> the option that sets it, where the names differ."""


def option_name(name: str) -> str:
    """The option of a parameter, as typed: `--max-running` for `max_running`."""
    return "--" + _OPTIONS.get(name, name).replace("_", "-")


def in_options(message: str) -> str:
    """A message of the library with its parameters as options: `--dtype float32` for `dtype=float32` in backticks."""
    return re.sub("`([a-z_]+)=([^`]*)`", lambda found: f"{option_name(found[1])} {found[2]}".rstrip(), message)


class Aliases(Protocol):
    """A dataclass of options that stand for others."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    required: ClassVar[Mapping[str, str]]
    """Option -> the message if it is missing."""
    arguments: ClassVar[Mapping[str, str]]
    """Positional argument -> the option that it stands for."""

    def meaning(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each given alias, as spelled, and the values of the options it stands for. Raises UsageError."""


@dataclass(frozen=True)
class ModelArgument:
    """The target as the first argument: `eyas generate MODEL` is `eyas generate --model MODEL`."""

    required: ClassVar[Mapping[str, str]] = {
        "model": "which target? Give MODEL or --model: a folder, GGUF file or Hub id"
    }
    arguments: ClassVar[Mapping[str, str]] = {"model_argument": "model"}

    model_argument: Annotated[
        str | None, Argument(metavar="MODEL", help=f"The target: {TARGET_HELP}.", show_default=False)
    ] = None

    def meaning(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The argument stands for `--model`."""
        if self.model_argument is not None:
            yield "the argument MODEL", {"model": self.model_argument}


@dataclass(frozen=True)
class SpeculationAliases:
    """Speculation settings in the form of vLLM (one JSON object) and SGLang (several numbers)."""

    required: ClassVar[Mapping[str, str]] = {}
    arguments: ClassVar[Mapping[str, str]] = {}

    speculative_config: Annotated[str | None, Option(hidden=True, metavar="JSON")] = None
    speculative_algorithm: Annotated[str | None, Option(hidden=True)] = None
    speculative_num_steps: Annotated[int | None, Option(hidden=True, min=1)] = None
    speculative_eagle_topk: Annotated[int | None, Option(hidden=True, min=1)] = None
    speculative_num_draft_tokens: Annotated[int | None, Option(hidden=True, min=2)] = None
    synthetic_accept_length: Annotated[float | None, Option(hidden=True, min=1.0)] = None

    def meaning(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """They stand for `--draft-model`, `--method`, `--num-speculative-tokens`, `--tree` and `--acceptance`."""
        if self.speculative_config is not None:
            yield "--speculative-config", vllm_config(self.speculative_config)
        if self.speculative_algorithm is not None:
            yield "--speculative-algorithm", {"method": _algorithm(self.speculative_algorithm)}
        shape = (self.speculative_num_steps, self.speculative_eagle_topk, self.speculative_num_draft_tokens)
        if shape != (None, None, None):
            yield _spelled(shape), {"tree": sglang_tree(*shape)}
        if self.synthetic_accept_length is not None:
            yield "--synthetic-accept-length", {"acceptance": f"synthetic:{self.synthetic_accept_length:g}"}


def vllm_config(text: str) -> dict[str, Any]:
    """Our options for vLLM's `--speculative-config`; UsageError names every key that isn't supported."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--speculative-config isn't valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(
            '--speculative-config must be a JSON object, such as {"method": "eagle3", "model": "DRAFTER", '
            '"num_speculative_tokens": 3}'
        )
    unknown = [key for key in config if key not in VLLM_KEYS]
    if unknown:
        advice = "; ".join(f"{key}: {_ADVICE.get(key, 'has no counterpart, leave it out')}" for key in unknown)
        raise UsageError(f"--speculative-config, {advice}; {_ELSEWHERE}")
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= VLLM_KEYS[key](value)
    if config.get("parallel_drafting"):
        method = found.get("method", "eagle3")
        if method not in _PARALLEL:
            raise UsageError(f"--speculative-config, parallel_drafting: no drafter of method {method} does that here")
        found["method"] = _PARALLEL[method]
    return found


def _vllm_method(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise UsageError(f'--speculative-config, method: {value!r} is wrong; write "eagle", "eagle3" or "draft_model"')
    if value in _OTHER_METHODS:
        raise UsageError(f"--speculative-config, method {value}: eyas has no such method: leave it out, {_ELSEWHERE}")
    return {"method": _VLLM_METHODS.get(value, value)}


def _vllm_model(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise UsageError(f"--speculative-config, model: {value!r} is neither a directory nor a Hub id")
    return {"draft_model": value}


def _vllm_tokens(value: Any) -> dict[str, Any]:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"--speculative-config, num_speculative_tokens: {value!r} isn't a number of at least 1")
    return {"num_speculative_tokens": str(value)}


def _one_device(value: Any) -> dict[str, Any]:
    if value != 1:
        raise UsageError(
            f"--speculative-config, draft_tensor_parallel_size {value!r}: drafters run on one device here; leave it "
            f"out, {_ELSEWHERE}"
        )
    return {}


def _yes_or_no(value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise UsageError(f"--speculative-config, parallel_drafting: {value!r} is neither true nor false")
    return {}


VLLM_KEYS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "method": _vllm_method,
    "model": _vllm_model,
    "num_speculative_tokens": _vllm_tokens,
    "draft_tensor_parallel_size": _one_device,
    "parallel_drafting": _yes_or_no,
}
"""Supported keys of vLLM's speculative config -> our options for a value. Raises UsageError for bad values."""
_ADVICE = {
    "disable_by_batch_size": "use --tree auto, which drafts less the more requests run",
    "speculative_token_tree": "use --tree static:NAME or --tree dynamic:DEPTH,TOPK,NODES",
    "quantization": "drafters run in the target's dtype, leave it out",
    "max_model_len": "a drafter's context is the target's, leave it out",
    "rejection_sample_method": "the output is the target's own unless --acceptance is given",
}
_VLLM_METHODS = {"eagle": "eagle1", "deepseek_mtp": "mtp", "ngram_gpu": "ngram"}
"""vLLM's methods that have another name here."""
_PARALLEL = {"eagle3": "peagle", "peagle": "peagle", "dflash": "dflash", "dspark": "dspark"}
"""vLLM's methods that can draft in parallel -> the kind of drafter that does."""
_OTHER_METHODS = frozenset({"mlp_speculator", "extract_hidden_states"})


def _algorithm(name: str) -> str:
    methods = {"EAGLE": "eagle1", "EAGLE3": "eagle3", "STANDALONE": "draft_model", "NGRAM": "ngram", "DFLASH": "dflash"}
    if name.upper() not in methods:
        raise UsageError(f"--speculative-algorithm {name}: eyas knows {', '.join(methods)}")
    return methods[name.upper()]


def sglang_tree(steps: int | None, topk: int | None, draft_tokens: int | None) -> str:
    """The tree that SGLang's three numbers describe; its draft tokens include the root, unlike `--tree`'s."""
    if steps is None:
        raise UsageError("--speculative-num-steps says how deep to draft: give it as well")
    if topk in (None, 1):
        if draft_tokens not in (None, steps + 1):
            raise UsageError(
                f"--speculative-num-draft-tokens {draft_tokens}: a chain of {steps} steps has {steps + 1} of them; for "
                "a tree give --speculative-eagle-topk above 1"
            )
        return f"chain:{steps}"
    if draft_tokens is None:
        raise UsageError("--speculative-eagle-topk above 1 needs --speculative-num-draft-tokens: the size of the tree")
    return f"dynamic:{steps},{topk},{draft_tokens - 1}"


def _spelled(shape: tuple[int | None, ...]) -> str:
    names = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    return " ".join(f"{name} {value}" for name, value in zip(names, shape, strict=True) if value is not None)


_DEVICES = (
    "a model runs on one device here; over several, another engine serves it: eyas serve --engine vllm "
    "--engine-option=--tensor-parallel-size=N"
)
_MEMORY = "the cache grows as needed; --max-cached-tokens limits it"
_PREFIXES = "--prefix-tokens limits the tokens kept for prompts with a common prefix, 0 turns this off"
_QUANTIZED = f"quantized checkpoints load as they are, others in the --dtype given; leave it out, {_ELSEWHERE}"
_TOOLS = (
    "tools can be called if the chat template presents them, in the template's style; leave it out, or give another "
    "template with --chat-template"
)
_CODE = "no code of a checkpoint is run, only models that transformers knows; leave it out"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("--tensor-parallel-size", "--tp", "--tp-size"), _DEVICES),
    **dict.fromkeys(("--pipeline-parallel-size", "--pp", "--pp-size"), _DEVICES),
    **dict.fromkeys(("--data-parallel-size", "--dp", "--dp-size", "--ep-size", "--enable-expert-parallel"), _DEVICES),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), _MEMORY),
    **dict.fromkeys(("--enable-prefix-caching", "--no-enable-prefix-caching", "--disable-radix-cache"), _PREFIXES),
    **dict.fromkeys(("--quantization", "--load-format"), _QUANTIZED),
    "--trust-remote-code": _CODE,
    "--max-num-batched-tokens": "--prefill-chunk limits the prompt tokens read between two rounds",
    "--ctx-size": "--max-model-len limits a single sequence, --max-cached-tokens all of them together",
    **dict.fromkeys(("--enable-auto-tool-choice", "--tool-call-parser", "--jinja"), _TOOLS),
    "--enable-reasoning": "the model's marks separate thoughts from answers, or those that --reasoning-parser names",
    "--reasoning-format": "requests have a field reasoning_format; --reasoning-parser none is for all of them",
    "--guided-decoding-backend": "grammars are enforced by llguidance; leave it out",
    "--disable-log-requests": "the texts of requests are never logged; leave it out",
    "--disable-log-stats": "--log-interval 0 turns off the lines of statistics",
    "--n-gpu-layers": "a whole model runs on one device: --device cuda",
}
"""Options of other engines that have no counterpart -> what to do."""
