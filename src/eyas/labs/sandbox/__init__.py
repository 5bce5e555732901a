"""Runs programs that a model wrote, apart from everything else on the machine."""
