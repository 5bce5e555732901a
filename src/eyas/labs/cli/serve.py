"""The options of `eyas serve` that make it learn: the feature `learn`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Option

from eyas.cli.common.options import DraftOptions
from eyas.drafters.options import AUTO, read_method
from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.labs.learn.serving import Learning


@dataclass(frozen=True)
class LearnOptions:
    """Whether to learn from a server's requests, and from which."""

    PANEL: ClassVar[str] = "Learning"
    learn: Annotated[
        Path | None,
        Option(metavar="DIR", file_okay=False, help="Collect requests in DIR and serve what `eyas learn` trains."),
    ] = None
    learn_exclude: Annotated[
        list[str], Option(metavar="KEY", help="An API key to never learn from; may be repeated.")
    ] = field(default_factory=list)
    learn_only: Annotated[
        list[str], Option(metavar="KEY", help="Learn from this API key and no other; may be repeated.")
    ] = field(default_factory=list)
    learn_per_key: Annotated[
        list[str],
        Option(
            "--learn-per-key", "--learn-apart",
            metavar="KEY", help="An API key that gets its own drafter, trained on it alone; may be repeated.",
        ),
    ] = field(default_factory=list)  # fmt: skip
    learn_share: Annotated[float, Option(min=0.0, max=1.0, help="The share of requests to collect.")] = 1.0
    learn_gib: Annotated[float, Option(min=0.001, help="Maximum GiB of requests kept in DIR.")] = 4.0
    learn_canary: Annotated[
        float, Option(min=0.01, max=0.5, help="The share of rows that a new drafter serves on trial.")
    ] = 0.1

    def check(self, draft: DraftOptions) -> None:
        """Reject options that do nothing or contradict each other, before heavy imports. Raises UsageError."""
        if self.learn is None:
            if self != LearnOptions():
                raise UsageError(
                    "--learn-exclude, --learn-only, --learn-per-key, --learn-share, --learn-gib and --learn-canary say "
                    "how to learn: give --learn DIR, too"
                )
            return
        if refused := set(self.learn_per_key) - set(self.learn_only or self.learn_per_key) or (
            set(self.learn_per_key) & set(self.learn_exclude)
        ):
            raise UsageError(f"--learn-per-key: {len(refused)} of these keys aren't learned from at all")
        if draft.drafter is None or draft.draft_model is None:
            raise UsageError("--learn is about a drafter: give --draft-model")
        if draft.draft_model == AUTO:
            raise UsageError(f"--learn trains one drafter: name it, in place of --draft-model {AUTO}")
        if read_method(draft.method).lookup is not None:
            raise UsageError(f"--learn is about a drafter alone, not together with copies: leave out {draft.method}")
        if draft.acceptance is not None:
            raise UsageError("--learn needs the lossless walk, so that swaps change no token: leave out --acceptance")
        if draft.draft_weights is not None:
            raise UsageError("--learn reads model.safetensors of every generation: leave out --draft-weights")

    def opened(self) -> Learning | None:
        """The part of a server that collects and swaps drafters; None if it doesn't learn."""
        if self.learn is None:
            return None
        from eyas.labs.learn.collect import LearnRule
        from eyas.labs.learn.serving import LearnConfig, Learning
        from eyas.serve.app import client_of_key

        excluded, only, separate = (
            frozenset(client_of_key(key.encode()) for key in keys)
            for keys in (self.learn_exclude, self.learn_only, self.learn_per_key)
        )
        rule = LearnRule(excluded, only or None, self.learn_share)
        limit = int(self.learn_gib * 2**30)
        return Learning(LearnConfig(self.learn, rule, limit, self.learn_canary, tuple(sorted(separate))))
