"""From a directory or Hub id to a drafter that fits its target."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from eyas.assets import named_drafter
from eyas.drafters.checkpoint import open_checkpoint
from eyas.drafters.config import DrafterConfig
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.formats.opening import gguf_in
from eyas.errors import CheckpointError, DrafterMismatchError, UsageError
from eyas.runtime import use_huge_pages
from eyas.targets import Target
from eyas.targets.fingerprint import fingerprint
from eyas.targets.linears import can_prepack, prepack_linears

_LOG = logging.getLogger("eyas")


def load_drafter(
    source: str | Path,
    target: Target,
    *,
    weights: str | None = None,
    ignore_config_keys: Collection[str] = (),
    method: str | None = None,
) -> NetworkDrafter:
    """Load strictly, check against `target`, and put it on the target's device in the target's dtype.

    `method` is the kind the caller expects. A drafter trained for other weights than the target's is used, and said so
    in the log: it stays lossless, but may draft badly.
    """
    path = local_directory(source)
    checkpoint = open_checkpoint(path, weights=weights, ignore=ignore_config_keys, layers=target.num_layers)
    for doubt in checkpoint.report.doubts:
        _LOG.warning("the drafter %s: %s", source, doubt)
    network = checkpoint.network(target)
    check_method(method, checkpoint.kind.name, str(source))
    taps = network.config.taps or network.config.default_taps(target.num_layers)
    check_fit(network.config, taps, target, str(source))
    network = network.to(device=target.device, dtype=target.dtype)
    if can_prepack(target.device, target.dtype):
        prepack_linears(network)
        use_huge_pages()
    _compare_targets(checkpoint.provenance.get("target_fingerprint"), target, str(source))
    return NetworkDrafter(network, taps)


def check_method(method: str | None, kind: str, name: str) -> None:
    """Refuse a method that isn't the drafter's."""
    if method not in (None, kind):
        raise UsageError(f"{name} is an {kind} drafter, not {method}: leave the method out, the files say what it is")


def _compare_targets(recorded: Any, target: Target, name: str) -> None:
    if not isinstance(recorded, str):
        return
    found = fingerprint(target.model)
    if recorded != found:
        _LOG.warning(
            "the drafter %s was trained for other weights than this target's (fingerprint %s, here %s): output is "
            "the target's own all the same, but the drafter may guess badly; check its accept length",
            name, recorded, found,
        )  # fmt: skip


class TargetSizes(Protocol):
    """What a drafter must agree with its target about."""

    @property
    def hidden_size(self) -> int:
        """Ht"""

    @property
    def vocab_size(self) -> int:
        """V"""

    @property
    def final_boundary(self) -> int:
        """The last boundary that can be a tap."""


def check_fit(config: DrafterConfig, taps: tuple[int, ...], target: TargetSizes, name: str) -> None:
    """Refuse a drafter made for another target, with every reason at once."""
    wrong = []
    if config.target_hidden_size != target.hidden_size:
        wrong.append(f"it reads states {config.target_hidden_size} wide, the target's are {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        wrong.append(f"its vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}")
    if config.tap_count != len(taps):
        wrong.append(f"it reads {config.tap_count} taps, but {len(taps)} are named: {list(taps)}")
    if any(not 0 <= tap <= target.final_boundary for tap in taps):
        wrong.append(f"its taps {list(taps)} lie outside the target's boundaries 0..{target.final_boundary}")
    if len(set(taps)) != len(taps):
        wrong.append(f"its taps {list(taps)} are not distinct")
    if wrong:
        raise DrafterMismatchError(
            f"the drafter {name} does not fit the target:\n  "
            + "\n  ".join(wrong)
            + "\nUse one trained for this model."
        )


def local_directory(source: str | Path) -> Path:
    """`source` itself if it is a directory or GGUF file, else the Hub snapshot of that name (no pickles)."""
    path = Path(named_drafter(source))
    if path.is_dir() or gguf_in(path) is not None:
        return path
    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{source} is neither a directory nor a Hub model that can be reached: {error}"
        ) from error
