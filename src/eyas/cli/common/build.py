"""From option groups to engines and parameters. Combinations are checked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eyas.cli.common.options import DraftOptions, RuntimeOptions, SamplingOptions, TargetOptions
from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.targets import Target
    from eyas.types import Limits, SamplingParams
    from eyas.verify import WalkRule

METHODS = ("eagle1", "eagle3", "mla", "mlp")
_OPTION_OF = {"max_tokens": "max_new_tokens", "stop_token_ids": "stop_token_id"}


def sampling_params(options: SamplingOptions) -> SamplingParams:
    """The parameters; UsageError names the option with the bad value."""
    from pydantic import ValidationError

    from eyas.types import SamplingParams

    values = dict(vars(options))
    values |= {name: values.pop(option) for name, option in _OPTION_OF.items()}
    try:
        return SamplingParams(**values)
    except ValidationError as error:
        bad = error.errors()[0]
        name = str(bad["loc"][0])
        flag = "--" + _OPTION_OF.get(name, name).replace("_", "-")
        raise UsageError(f"{flag} {bad['input']}: {bad['msg']}") from None


def tree_text(options: DraftOptions) -> str | None:
    """The tree asked for; None = the drafter's own. Refuses combinations in which an option would be ignored."""
    if options.method not in (None, *METHODS, "none"):
        raise UsageError(f"unknown method {options.method!r}: write {', '.join(METHODS)} or none")
    if options.method == "none":
        _refuse_draft_options(options)
        return None
    if options.draft_model is None:
        raise UsageError("speculation needs a drafter: give --draft-model, or --method none for plain decoding")
    if options.num_speculative_tokens is None:
        return options.tree
    count = options.num_speculative_tokens
    if options.tree is not None:
        raise UsageError("--num-speculative-tokens and --tree both say what to draft: give one of them")
    if count == "auto":
        return count
    if not count.isdecimal() or int(count) < 1:
        raise UsageError(f"--num-speculative-tokens {count}: write a number of at least 1, or auto")
    return f"chain:{count}"


def open_engine(
    target: TargetOptions, draft: DraftOptions, batch_size: int | None = None, limits: Limits | None = None
) -> Engine:
    """Load everything."""
    tree = tree_text(draft)
    quiet()
    from eyas.engine import load

    return load(
        target.model,
        draft.draft_model,
        tree=tree,
        costs=draft.costs,
        coupled=draft.coupled is not False,
        rule=walk_rule(draft.acceptance),
        batch_size=batch_size,
        limits=limits,
        dtype=target.dtype,
        device=target.device,
        attention=target.attention,
        compiled=target.compile,
        draft_weights=draft.draft_weights,
        ignore_config_keys=draft.ignore_config_key,
        method=None if draft.method == "none" else draft.method,
    )


def open_target(name: str, runtime: RuntimeOptions) -> Target:
    """Load a target alone."""
    quiet()
    from eyas.targets import load_target

    return load_target(
        name,
        dtype=runtime.dtype,
        device=runtime.device,
        attention=runtime.attention,
        compiled=runtime.compile,
    )


def walk_rule(acceptance: str | None) -> WalkRule | None:
    """`typical[:EPSILON,DELTA]`, or None for the lossless walk."""
    if acceptance is None:
        return None
    from eyas.verify import TypicalWalk

    kind, colon, rest = acceptance.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")] if colon else []
    except ValueError:
        numbers = [0.0]
    if kind != "typical" or len(numbers) not in (0, 2):
        raise UsageError(f"unknown acceptance {acceptance!r}: write typical or typical:EPSILON,DELTA")
    return TypicalWalk(*numbers)


def numbers(text: str, option: str) -> list[float]:
    """A comma-separated list."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text!r}: write numbers with commas between them") from None


def quiet() -> None:
    """Keep transformers' progress bars out of the terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _refuse_draft_options(options: DraftOptions) -> None:
    given = [name for name, value in vars(options).items() if name != "method" and value is not None and value != []]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"--method none drafts nothing, so {flags} would be ignored: leave out one or the other")
