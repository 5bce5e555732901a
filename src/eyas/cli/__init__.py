"""The command line: a file for every verb, and what they share in `common/`."""

from eyas.cli.app import main

__all__ = ["main"]
