"""Which causal language models of transformers work: every registered class, tried with tiny random weights.

    python -m benchmarks.architectures [--only llama,gemma2] [--output FILE.json] [--page docs/models.md]

Each model type is made as small as its config allows, saved, loaded as users load it, and decoded in float32. Plain
decoding must equal `transformers.generate`. Speculation with an oracle drafter that is right most of the time
(`tests/tiny.py`), in batches, greedy and sampled, must equal plain decoding. Types in the output file are not tried
again unless `--only` names them. Exits with 1 if an answer differs or an error isn't one of eyas's.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import signal
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as REGISTERED

from benchmarks.architecture_sizes import SIZES, SPECIAL
from benchmarks.harness import Output, script
from benchmarks.pages import insert
from eyas.engine import Engine, Speculation
from eyas.errors import EyasError, UsageError
from eyas.files import write_json, write_text
from eyas.targets import Target, load_target
from eyas.targets.architecture import model_class, refuse_unsupported
from eyas.tree import parse_tree
from eyas.types import Completion, Request, SamplingParams, Stats
from tests import tiny

EQUAL = "equal"
PLAIN = "plain only"
REFUSED = "refused"
UNTRIED = "not tried"
BROKEN = "broken"
MEANINGS = {
    EQUAL: "plain decoding equals `transformers.generate`, speculation equals plain decoding, every token",
    PLAIN: "plain decoding equals `transformers.generate`; a drafter is refused",
    REFUSED: "can't be a target; eyas says why before it reads weights or at load",
    UNTRIED: "no small model of this type could be made, or transformers itself can't generate with it",
    BROKEN: "a bug: an answer differs, or an error says nothing",
}
LARGEST, SECONDS = 30_000_000, 300
"""Largest number of parameters of a model that is tried, and the limit of its CPU seconds."""
MARKS = "<!-- architectures: begin -->", "<!-- architectures: end -->"


class NotTriedError(Exception):
    """No model of this type could be made, or there is nothing to compare it with."""


@dataclass
class Row:
    """The result of a model type."""

    kind: str
    """transformers' `model_type`."""
    model: str
    """The class."""
    result: str
    """A key of `MEANINGS`."""
    reason: str = ""
    """Why it was refused, not tried or broken."""
    tokens: int = 0
    """Number of tokens that speculation emitted."""
    accept_length: float = 0.0
    """Tokens per pass of the target."""
    version: str = ""
    """The version of transformers that it was tried with, if that isn't the file's."""


def tiny_config(kind: str) -> Any:
    """The smallest config of a model type."""
    special = SPECIAL.get(kind, {})
    assert isinstance(special, dict)
    config = _shrunk(CONFIG_MAPPING[kind], special)
    text = config.get_text_config()
    usual = CONFIG_MAPPING[kind]().get_text_config()
    kinds = sorted(set(getattr(usual, "layer_types", None) or ()))
    if len(kinds) > 1 and set(text.layer_types) != set(kinds):  # four layers are shorter than the pattern
        text.layer_types = [kinds[layer % len(kinds)] for layer in range(text.num_hidden_layers)]
    return config


def _shrunk(config_class: Any, special: dict[str, Any]) -> Any:
    """A config with small values for every size of its class and of its sub-configs."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        below = config_class.sub_configs.get(field.name)
        if below is not None and dataclasses.is_dataclass(below):
            values[field.name] = _shrunk(below, special.get(field.name, {})).to_dict()
        elif below is not None and field.name in special:
            values[field.name] = special[field.name]
        elif field.name == "is_decoder":
            values[field.name] = True
        elif field.name in SIZES and field.default is not None:
            values[field.name] = SIZES[field.name]
        elif field.name.endswith(("_token_id", "_token_index")) and isinstance(field.default, int):
            values[field.name] = 2
    return config_class(**{**values, **{k: v for k, v in special.items() if k not in config_class.sub_configs}})


def build(config: Any, scale: float) -> Any:
    """A random model with weights scaled up, so that it doesn't repeat itself."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # scaled up, it would make recurrent states forget everything immediately
            continue
        if parameter.dim() > 1:
            parameter.mul_(scale)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config.eos_token_id = None
    return model


def refuse_large(config: Any) -> None:
    """Raise NotTriedError if the model of a config is too large to try."""
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config, dtype=torch.float32).parameters())
    if size > LARGEST:
        raise NotTriedError(f"its smallest config here has {size:,} parameters")


def wandering(config: Any, prompts: Sequence[Sequence[int]]) -> tuple[Any, list[list[int]]]:
    """A random model and its greedy continuations of 16 tokens, which don't repeat a single token."""
    refuse_large(config)
    for scale in (14.0, 5.0, 30.0, 2.0, 1.0):
        model = build(config, scale)
        said = [tiny.continuation(model, prompt, 16) for prompt in prompts]
        finite = torch.isfinite(tiny.full_forward(model, prompts[0]).logits).all()
        if finite and all(len(set(one)) > 3 for one in said) and _is_steady(model, prompts[0]):
            return model, said
    raise NotTriedError("no random weights were found with which it says different things")


def _is_steady(model: Any, prompt: Sequence[int]) -> bool:
    """Whether transformers' logits in single steps equal those of a pass over the whole sequence, up to rounding."""
    made = model.generate(
        torch.tensor([list(prompt)]),
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    steps = torch.cat(made.logits)
    whole = tiny.full_forward(model, made.sequences[0].tolist()).logits[0, len(prompt) - 1 : -1]
    return bool((steps - whole).abs().max() <= 1e-3 * whole.abs().max())


def try_type(kind: str, folder: Path) -> Row:
    """Make, save, load and decode a model of a type."""
    row = Row(kind, REGISTERED[kind], UNTRIED)
    prompts = tiny.prompts(9, 5, 14)
    if isinstance(why := SPECIAL.get(kind), str):
        return dataclasses.replace(row, reason=why)
    try:
        with _limited(), _quiet():
            usual = CONFIG_MAPPING[kind]
            decodes = {"is_decoder": True} if "is_decoder" in {f.name for f in dataclasses.fields(usual)} else {}
            for made in (partial(usual, **decodes), partial(tiny_config, kind)):  # the default may already be refused
                config = made()
                try:
                    refuse_unsupported(model_class(config), config)
                except EyasError as error:
                    return dataclasses.replace(row, result=REFUSED, reason=str(error))
            model, said = wandering(config, prompts)
            model.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001  # whatever transformers raises: there is no model to try
        reason = str(error) if isinstance(error, NotTriedError) else f"{type(error).__name__}: {error}"
        return dataclasses.replace(row, reason=reason)
    try:
        with _limited():
            return _decoded(row, load_target(folder, dtype="float32", device="cpu"), prompts, said)
    except EyasError as error:
        return dataclasses.replace(row, result=REFUSED, reason=str(error))
    except Exception as error:  # noqa: BLE001  # what a user would see as a traceback
        return dataclasses.replace(row, result=BROKEN, reason=f"{type(error).__name__}: {error}")


def _decoded(row: Row, target: Target, prompts: Sequence[Sequence[int]], said: Sequence[list[int]]) -> Row:
    requests = [
        Request(tuple(prompt), SamplingParams(max_tokens=16, temperature=heat, seed=5, ignore_eos=True))
        for heat in (0.0, 0.8)
        for prompt in prompts
    ]
    plain = [Engine(target).generate([request])[0] for request in requests]
    if [done.token_ids for done in plain[: len(said)]] != said:
        return dataclasses.replace(row, result=BROKEN, reason="plain decoding differs from transformers.generate")
    pooled = Stats()
    try:
        for tree, batch in (("chain:3", 1), ("dynamic:4,3,9", 4)):
            for one, other in zip(plain, _speculated(target, requests, plain, tree, batch), strict=True):
                pooled.merge(other.stats)
                if one.token_ids != other.token_ids:
                    return dataclasses.replace(row, result=BROKEN, reason=f"{tree} differs from plain decoding")
    except EyasError as error:
        return dataclasses.replace(row, result=PLAIN, reason=str(error))
    return dataclasses.replace(row, result=EQUAL, tokens=pooled.tokens, accept_length=round(pooled.accept_length, 2))


def _speculated(
    target: Target, requests: Sequence[Request], plain: Sequence[Completion], tree: str, batch: int
) -> list[Completion]:
    sequences = [[*request.prompt, *done.token_ids] for request, done in zip(requests, plain, strict=True)]
    layers = target.num_layers
    taps = tuple(sorted({0, layers // 2, layers}))
    drafter = tiny.OracleDrafter(sequences, taps, omit=0.2, vocab_size=target.vocab_size, strict=False)
    engine = Engine(target, speculation=Speculation(drafter, parse_tree(tree)), batch_size=batch)
    return engine.generate(requests)


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutError after `SECONDS` of this process's CPU time, which excludes other load on the machine."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it computed for more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' log and progress bars: these models are for tests only."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield


def try_all(kinds: Sequence[str], known: dict[str, Row], file: Path | None) -> list[Row]:
    """The rows of all types by name, after trying `kinds`; `file` is written after each."""
    installed = transformers.__version__
    version = installed if file is None or not file.exists() else version_of(file)
    for number, kind in enumerate(kinds, 1):
        with TemporaryDirectory() as folder:
            row = try_type(kind, Path(folder))
            reason = row.reason.replace(folder, "MODEL")
            other = installed if installed != version else ""
            known[kind] = row = dataclasses.replace(row, reason=reason, version=other)
        gc.collect()
        print(f"{number}/{len(kinds)} {kind}: {row.result} {row.reason[:200]}", flush=True)
        if file is not None:
            write_json(file, report(known.values(), version))
    return sorted(known.values(), key=lambda row: row.kind)


def report(rows: Any, version: str) -> dict[str, Any]:
    """The contents of the output file; `version` is that of transformers for rows that name none."""
    ordered = sorted(rows, key=lambda row: row.kind)
    return {"transformers": version, "torch": torch.__version__, "rows": [asdict(r) for r in ordered]}


def read_report(file: Path) -> dict[str, Row]:
    """The rows of an output file by model type; none if there is no file."""
    if not file.exists():
        return {}
    return {row["kind"]: Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}


def version_of(file: Path) -> str:
    """The version of transformers that an output file was started with."""
    version: str = json.loads(file.read_text(encoding="utf-8"))["transformers"]
    return version


def page_section(rows: Sequence[Row], version: str) -> str:
    """The Markdown between the page's marks: the types by result, and by reason if they don't work."""
    others = Counter(row.version for row in rows if row.version)
    tried = "".join(f", {count} of them tried with {other}" for other, count in sorted(others.items()))
    parts = [f"{len(rows)} model types of transformers {version}{tried}."]
    for result, meaning in MEANINGS.items():
        found = [row for row in rows if row.result == result]
        by_reason: dict[str, list[str]] = {}
        for row in found:
            by_reason.setdefault(_reason(row), []).append(f"`{row.kind}`")
        if found:
            parts.append(f"**{result}**, {len(found)}: {meaning}.")
            lists = [
                ", ".join(kinds) if not why else f"- {why}: {', '.join(kinds)}" for why, kinds in by_reason.items()
            ]
            parts.append("\n".join(_wrapped(each) for each in lists))
    return "\n\n".join(parts)


def _reason(row: Row) -> str:
    """The reason on one short line, without the type's name and the advice after the semicolon."""
    line = re.sub(rf"^[\w-]*{re.escape(row.kind)}[\w-]* ", "", " ".join(row.reason.split())).partition(";")[0]
    return line if len(line) <= 120 else line[:117].rsplit(" ", 1)[0] + " ..."


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 140, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


@script
def main(
    *,
    only: Annotated[str | None, "comma-separated model types, tried again if known"] = None,
    output: Output = None,
    page: Annotated[Path | None, "the page whose generated part is replaced"] = None,
) -> int:
    known = {} if output is None else read_report(output)
    kinds = only.split(",") if only else [kind for kind in REGISTERED if kind not in known]
    if unknown := [kind for kind in kinds if kind not in REGISTERED]:
        raise UsageError(f"unknown model types: {', '.join(unknown)}")
    rows = try_all(kinds, known, output)
    if page is not None:
        version = transformers.__version__ if output is None else version_of(output)
        made = page_section(rows, version)
        write_text(page, insert(page.read_text(encoding="utf-8"), MARKS, made))
    return any(row.result == BROKEN for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
