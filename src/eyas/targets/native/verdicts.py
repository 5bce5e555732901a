"""What the load trial of a model found, kept in the user's cache: the same model isn't tried again on the same machine.

A verdict is about this very model. It is named by a hash of every weight as it is laid out, the config, eyas's sources
and the kernels, the source files of the model's modules, the versions of Python, torch and transformers, the processor,
the number of threads, and how products are multiplied. If any of these changes, the model is tried.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from eyas.files import write_text
from eyas.kept import code, keeps, prune
from eyas.machine import cache_directory, processor_flags, processor_model
from eyas.targets.fingerprint import weights_hash
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import describe_products
from eyas.targets.passes import Passes

_LOG = logging.getLogger("eyas")
_MOST = 1 << 20
"""Bytes of all verdicts."""
_SETTINGS = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "GOMP_", "KMP_", "EYAS_", "TORCH")
"""What the names of environment variables begin with that may change how a library computes."""


@dataclass(frozen=True)
class Verdict:
    """How a target's passes are run."""

    refusal: str | None
    """Why native passes aren't used; None = they are."""
    ropes: tuple[int, ...]
    """Which RoPE table turns the queries and keys of each layer, -1 = none."""
    ragged: bool
    """Whether rows of different lengths run end to end."""


def verdict_file(target: Passes) -> Path | None:
    """Where the verdict on a target with native passes is kept; None if it can't be, or isn't to be."""
    if not keeps() or target.native is None or target.record is not None:
        return None
    try:
        name = sha256(_made_of(target).encode()).hexdigest()[:24]
        return cache_directory() / "verdicts" / f"{name}.json"
    except (OSError, ValueError) as error:
        _LOG.info("the load trial isn't kept: %s", error)
        return None


def _made_of(target: Passes) -> str:
    """All that a verdict depends on. ValueError for weights of a library's own, OSError for unreadable sources."""
    found, model = kernels(), target.model
    sources = {str(getattr(sys.modules[type(part).__module__], "__file__", None)) for part in model.modules()}
    parts: list[Any] = [
        weights_hash(model), model.config.to_json_string(use_diff=False), code(), found and found.name,
        [sha256(Path(source).read_bytes()).hexdigest() for source in sorted(sources)],
        processor_model(), sorted(processor_flags()), torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(), torch.get_float32_matmul_precision(),
        sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS)),
        describe_products(model), target.dtype, target.ragged,
    ]  # fmt: skip
    return repr(parts)


def kept_verdict(path: Path, layers: int) -> Verdict | None:
    """The verdict in a file on a model of so many layers; None if there is none, or a damaged one, which is named."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict(**(content["verdict"] | {"ropes": tuple(content["verdict"]["ropes"])}))
        if content["hash"] == _hash(verdict) and len(verdict.ropes) == layers:
            os.utime(path)  # it is used
            return verdict
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):  # no JSON, or not of this form
        pass
    _LOG.warning("%s is damaged: the model is tried anew", path)
    return None


def keep_verdict(path: Path, verdict: Verdict) -> None:
    """Write a verdict for later processes."""
    try:
        write_text(path, json.dumps({"verdict": asdict(verdict), "hash": _hash(verdict)}))
        prune(path.parent, _MOST, path)
    except OSError as error:
        _LOG.info("the load trial isn't kept: %s", error)


def _hash(verdict: Verdict) -> str:
    return sha256(repr(verdict).encode()).hexdigest()
