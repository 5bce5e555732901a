"""The verbs of the experiments."""
