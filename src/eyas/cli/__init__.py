"""The command line: one file a verb."""

from eyas.cli.app import main

__all__ = ["main"]
