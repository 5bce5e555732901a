"""The one place where errors become messages and exit codes: 2 = usage, 1 = failure, 130 = interrupted."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from eyas.errors import EyasError, UsageError

USAGE, FAILURE, INTERRUPTED = 2, 1, 130


class _Notices(logging.Handler):
    """What the library has to say, on standard error as everything that is not output."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"{record.levelname.lower()}: {record.getMessage()}", err=True)


@contextmanager
def guarded(debug: bool) -> Iterator[None]:
    """Report what goes wrong inside; a traceback only with `debug`."""
    log, notices = logging.getLogger("eyas"), _Notices(logging.WARNING)
    log.addHandler(notices)
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except EyasError as error:
        _report(f"error: {error}", debug)
        raise typer.Exit(USAGE if isinstance(error, UsageError) else FAILURE) from None
    except Exception as error:  # noqa: BLE001  # the outermost handler
        first = (str(error).strip() or "no message").splitlines()[0]
        _report(f"unexpected {type(error).__name__}: {first} (run with --debug: `eyas --debug ...`)", debug)
        raise typer.Exit(FAILURE) from None
    finally:
        log.removeHandler(notices)


def _report(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    typer.echo(message, err=True)
