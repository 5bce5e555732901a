"""The exception tree. Every message says what is wrong and what to do about it.

A message names a parameter as a Python caller writes it, in backticks and with its equals sign: `` `draft_window=` ``,
or with a value `` `dtype=float32` ``. The command line shows it as the option that sets it
(`eyas.cli.common.aliases.in_options`).
"""

from __future__ import annotations

VALUE_ERROR = "Value error, "
"""What pydantic writes before the message of a ValueError."""


class EyasError(Exception):
    """Base of everything eyas raises on purpose."""


class UsageError(EyasError):
    """The call itself is wrong: a bad option, value or combination (exit code 2)."""


class LockedError(UsageError):
    """Another process is writing the same file or folder."""


class PluginError(EyasError):
    """Something that another package adds can't be used; the message names the package and its entry point."""


class StoppedError(EyasError):
    """A signal (Ctrl-C, SIGTERM) ended the work; the message says what is kept."""

    def __init__(self, kept: str, signal_number: int) -> None:
        super().__init__(kept)
        self.signal_number = signal_number


class ConfigError(UsageError):
    """A configuration file or key=value override is wrong."""


class RequestError(UsageError):
    """A prompt or its sampling parameters are wrong."""


class DataError(EyasError):
    """A data file has a bad row; the message names file and line."""


class RowError(DataError):
    """One row can't be used, but the others can; unusable rows are counted by `reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class OutputError(EyasError):
    """A result couldn't be written: a full disk, a folder without permission."""


class EndpointError(EyasError):
    """An endpoint can't be reached or used at all."""


class ModelError(EyasError):
    """A target can't be loaded or can't be used for speculation."""


class MissingModelError(UsageError):
    """A model is neither at the given path nor on the Hub."""


class UnsupportedModelError(ModelError):
    """The target keeps state where it can't be rolled back, or its layers need masks eyas doesn't build."""


class CheckpointError(EyasError):
    """A checkpoint is missing tensors, has extra ones, or has the wrong shapes."""


class ExportError(EyasError):
    """A consumer can't represent a drafter, or what was written for it reads back differently."""


class TrainingError(EyasError):
    """A training run can't continue: loss or gradients are NaN or infinite, or a process failed."""


class DrafterMismatchError(EyasError):
    """The drafter doesn't fit the target."""


class ClusterError(EyasError):
    """Workers on other machines failed: they died, or their versions or weights differ from this process's."""


class StoreError(EyasError):
    """A feature store is missing, damaged, captured from another target, or can't be written."""


class CacheMemoryError(EyasError):
    """The slot cache couldn't grow."""


class PassMemoryError(EyasError):
    """Memory ran out in a pass of at most `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__(
            f"memory ran out in a pass of {tokens} tokens: use shorter prompts, a smaller `batch_size=` or `dtype=`, "
            "or `quantize=` int8 or int4"
        )
        self.tokens = tokens


class QueueFullError(EyasError):
    """Too many requests are waiting already; `retry_after` is the number of seconds to wait before retrying."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InvariantError(EyasError):
    """Slots, caches and scheduler disagree: a bug in eyas, never the caller's fault."""
