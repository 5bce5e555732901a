"""A drafter that learns from the traffic it serves."""

from eyas.cli.learn.learn import pin, promote, revert, run, status

VERBS = {"run": run, "status": status, "promote": promote, "revert": revert, "pin": pin}
