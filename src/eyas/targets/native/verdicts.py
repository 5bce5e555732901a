"""Results of trials at load, kept in the user's cache so that a model isn't tried again on the same machine.

A verdict holds for exactly one model. Its file is named by a hash of all weights as they are laid out, the config,
eyas's sources and the kernels, the source files of the model's modules, the versions of Python, torch and transformers,
the processor, the number of threads, and how products are computed. If any of these changes, the model is tried again.
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

from eyas.cache.entries import is_enabled, prune, source_hash
from eyas.cache.folder import cache_directory
from eyas.files import write_text
from eyas.machine import processor_flags, processor_model
from eyas.targets.fingerprint import weights_hash
from eyas.targets.native.library import kernels
from eyas.targets.native.products import describe_products
from eyas.targets.passes import Passes

_LOG = logging.getLogger("eyas")
_MAX_BYTES = 1 << 20
"""Maximum total bytes of all verdicts."""
_SETTINGS = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "GOMP_", "KMP_", "EYAS_", "TORCH")
"""Prefixes of environment variables that may change how a library computes."""


@dataclass(frozen=True)
class Verdict:
    """How a target's passes are to be run."""

    refusal: str | None
    """The reason why native passes aren't used; None = they are used."""
    ropes: tuple[int, ...]
    """Index of the RoPE table of each layer's queries and keys, -1 = none."""
    ragged: bool
    """Whether rows of different lengths run end to end."""


def verdict_file(target: Passes) -> Path | None:
    """The file for the verdict on a target with native passes; None if none is kept."""
    if not is_enabled() or target.native is None or target.record is not None:
        return None
    try:
        name = sha256(_cache_inputs(target).encode()).hexdigest()[:24]
        return cache_directory() / "verdicts" / f"{name}.json"
    except (OSError, ValueError) as error:
        _LOG.info("the result of the load trial isn't kept: %s", error)
        return None


def _cache_inputs(target: Passes) -> str:
    """Everything that a verdict depends on. ValueError for a library's own tensors, OSError for unreadable sources."""
    found = kernels()
    model = target.model
    sources = {str(getattr(sys.modules[type(part).__module__], "__file__", None)) for part in model.modules()}
    parts: list[Any] = [
        weights_hash(model), model.config.to_json_string(use_diff=False), source_hash(), found and found.name,
        [sha256(Path(source).read_bytes()).hexdigest() for source in sorted(sources)],
        processor_model(), sorted(processor_flags()), torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(), torch.get_float32_matmul_precision(),
        sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS)),
        describe_products(model), target.dtype, target.ragged,
    ]  # fmt: skip
    return repr(parts)


def read_verdict(path: Path, layers: int) -> Verdict | None:
    """The verdict in a file on a model of `layers` layers; None if the file is missing or damaged (with a warning)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict(**(content["verdict"] | {"ropes": tuple(content["verdict"]["ropes"])}))
        if content["hash"] == _hash(verdict) and len(verdict.ropes) == layers:
            os.utime(path)  # mark it as used
            return verdict
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):  # not JSON, or not in this form
        pass
    _LOG.warning("%s is damaged: the model is tried again", path)
    return None


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Write a verdict for later processes."""
    try:
        write_text(path, json.dumps({"verdict": asdict(verdict), "hash": _hash(verdict)}))
        prune(path.parent, _MAX_BYTES, path)
    except OSError as error:
        _LOG.info("the result of the load trial isn't kept: %s", error)


def _hash(verdict: Verdict) -> str:
    return sha256(repr(verdict).encode()).hexdigest()
