"""`python -m eyas`: the same as the `eyas` command."""

from eyas.cli import main

main()
