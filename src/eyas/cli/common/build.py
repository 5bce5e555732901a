"""Sampling parameters, targets and engines from option groups; bad combinations are refused before loading."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from eyas.cli.common.aliases import SAMPLING_OPTIONS, option_name
from eyas.cli.common.display import loading, note
from eyas.cli.common.options import DraftOptions, SamplingOptions, TargetPanel
from eyas.drafters.options import check_source, read_method
from eyas.drafters.weightless import METHODS
from eyas.errors import UsageError
from eyas.runtime import importing
from eyas.tree import is_auto
from eyas.tree.spec import read_tree

if TYPE_CHECKING:
    from eyas import options
    from eyas.drafters.base import Drafter
    from eyas.engine import Engine
    from eyas.session import Session
    from eyas.targets import Target
    from eyas.types import Limits, SamplingParams, TypicalAcceptance
    from eyas.verify import WalkRule


def sampling_params(options: SamplingOptions) -> SamplingParams:
    """The options as sampling parameters; UsageError names the option with the bad value."""
    from pydantic import ValidationError

    from eyas.types import SamplingParams

    values = dict(vars(options))
    values |= {name: values.pop(option) for name, option in SAMPLING_OPTIONS.items()}
    if values["max_tokens"] is None:  # no limit was given, and readers of these parameters need none
        del values["max_tokens"]
    try:
        return SamplingParams(**values)
    except ValidationError as error:
        bad = error.errors()[0]
        name = str(bad["loc"][0])
        flag = option_name(name)
        raise UsageError(f"{flag} {bad['input']}: {bad['msg']}") from None


def tree_text(options: DraftOptions) -> str | None:
    """The spec of the tree to draft; None = the drafter's own, or none for plain decoding.

    Decoding is plain with `--method none` and if no drafting option is given. Raises UsageError for unknown methods,
    and for options that would be ignored.
    """
    if options.method == "none" or options == DraftOptions():
        _refuse_draft_options(options)
        return None
    if options.draft_model is None and (options.method is None or not read_method(options.method).alone):
        raise UsageError(f"{_given_flags(options)} needs a drafter: give --draft-model, or leave it out")
    check_source(options.method, options.draft_model)
    if options.num_speculative_tokens is None:
        check_tree(options.tree)
        return options.tree
    count = options.num_speculative_tokens
    if options.tree is not None:
        raise UsageError(
            f"--num-speculative-tokens {count} and --tree {options.tree} both say what to draft: give one of them"
        )
    if count == "auto":
        return count
    if not count.isdecimal() or int(count) < 1:
        raise UsageError(f"--num-speculative-tokens {count}: write a number of at least 1, or auto")
    return f"chain:{count}"


def check_tree(text: str | None) -> None:
    """Raise UsageError for text that isn't a tree's spec; None = the drafter's own."""
    if text is not None and not is_auto(text):
        read_tree(text)


def drafter_advice(model: str) -> str | None:
    """One line about the drafter that comes with a target, and what measures its gain; None if none does."""
    from eyas.drafters.automatic import advice

    told = advice(model)
    if told is None:
        return None
    measure = f"eyas bench methods {shlex.quote(model)} --method mtp --prompt-file PROMPTS"
    return f"{told}; {measure} measures what it gains here"


def _note_plain(model: str) -> None:
    """Tell a user who gave no drafting option that decoding is plain, and what could draft."""
    told = drafter_advice(model)
    if told is not None:
        note(f"note: plain decoding, because no drafter is given; {told}")
    else:
        note("note: plain decoding, because no drafter is given (--draft-model, or --method ngram, which needs none)")


def check_engine(target: TargetPanel, draft: DraftOptions) -> str | None:
    """Check the options of an engine before anything heavy is imported; returns the tree's spec."""
    tree = tree_text(draft)
    check_acceptance(draft, tree)
    draft.engine(tree).check(draft.drafter is not None)
    target.of(target.model).check()
    if draft.drafter is not None:
        draft.drafter.check()
    return tree


def open_engine(
    target: TargetPanel,
    draft: DraftOptions,
    batch_size: int | None = None,
    limits: Limits | None = None,
    *,
    logged: bool = False,
    around: Callable[[Target, Drafter], Drafter] | None = None,
) -> Engine:
    """Load target, drafter and tokenizer into an engine; report it, and what could draft, unless it is `logged`.

    `around` as in `eyas.options.EngineOptions`.
    """
    with importing():
        tree = check_engine(target, draft)
        rule = walk_rule(draft.acceptance)
    if isinstance(walk_numbers(draft.acceptance), float):
        note("warning: the accept length is made up, for benchmarks: answers aren't the model's")
    with nullcontext() if logged else loading(target.model):
        with importing():
            hide_progress_bars()
            from eyas.session import Session

        session = Session.open(target.of(target.model))
        drafter = None if draft.drafter is None else session.drafter(draft.drafter)
        engine = session.engine(drafter, replace(draft.engine(tree, batch_size, limits, rule), around=around))
    if draft == DraftOptions() and not logged:
        _note_plain(target.model)
    return engine


def open_session(target: options.TargetOptions, *, modules: bool = False) -> Session:
    """Load a target without a drafter, and report it; `modules` as in `eyas.session.Session.open`."""
    with loading(str(target.model)):
        with importing():
            hide_progress_bars()
            from eyas.session import Session

        return Session.open(target, modules=modules)


REJECTION, SYNTHETIC = "rejection", "synthetic"
"""The names of the rule that accepts by p/q, and of the one that accepts as much as it is told."""


def check_acceptance(draft: DraftOptions, tree: str | None) -> None:
    """Raise UsageError for a rule that doesn't exist, or that doesn't go with the drafter or the `tree`."""
    if draft.acceptance != REJECTION:
        walk_numbers(draft.acceptance)
        return
    if draft.method in METHODS:
        raise UsageError(f"--acceptance {REJECTION} needs a drafter that draws from distributions: leave out --method")
    if tree is None or not tree.startswith("chain:"):
        raise UsageError(f"--acceptance {REJECTION} needs chains of a fixed length: give --tree chain:K")


def walk_rule(acceptance: str | None) -> WalkRule | None:
    """The rule that `acceptance` names; None = the lossless walk. Raises UsageError for unknown names."""
    if acceptance is None:
        return None
    from eyas.verify import RejectionWalk, SyntheticWalk, TypicalWalk

    numbers = walk_numbers(acceptance)
    if isinstance(numbers, float):
        return SyntheticWalk(numbers)
    return RejectionWalk() if numbers is None else TypicalWalk(numbers.epsilon, numbers.delta)


def walk_numbers(acceptance: str | None) -> TypicalAcceptance | float | None:
    """The numbers of a rule that has some: typical acceptance's, or a made-up accept length. Raises UsageError."""
    kind, _, length = (acceptance or "").partition(":")
    if kind != SYNTHETIC:
        return typical(acceptance)
    try:
        found = float(length)
    except ValueError:
        found = 0.0
    if not 1.0 <= found < float("inf"):
        raise UsageError(f"acceptance {acceptance!r}: write {SYNTHETIC}:LENGTH, such as {SYNTHETIC}:2.5, at least 1")
    return found


def typical(acceptance: str | None) -> TypicalAcceptance | None:
    """The numbers in `typical[:EPSILON,DELTA]`; None for other rules. Raises UsageError for unknown names."""
    if acceptance is None or acceptance == REJECTION:
        return None
    from eyas.types import TypicalAcceptance

    kind, colon, rest = acceptance.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")] if colon else []
    except ValueError:
        numbers = [0.0]
    if kind != "typical" or len(numbers) not in (0, 2):
        raise UsageError(
            f"unknown acceptance {acceptance!r}: write {REJECTION}, typical, typical:EPSILON,DELTA or "
            f"{SYNTHETIC}:LENGTH"
        )
    return TypicalAcceptance(*numbers)


def hide_progress_bars() -> None:
    """Turn off transformers' progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _refuse_draft_options(options: DraftOptions) -> None:
    flags = _given_flags(replace(options, method=None))
    if flags:
        raise UsageError(f"--method none drafts nothing, so {flags} would be ignored: leave out one or the other")


def _given_flags(options: DraftOptions) -> str:
    """The options that aren't at their defaults, as typed, separated by commas."""
    return ", ".join(option_name(name) for name, value in vars(options).items() if value is not None and value != [])
