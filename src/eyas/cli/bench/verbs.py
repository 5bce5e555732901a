"""Measure drafters, methods, answers, checkpoints, trees, servers."""

from eyas.cli.bench.accuracy import accuracy
from eyas.cli.bench.bench import bench
from eyas.cli.bench.checkpoints import checkpoints
from eyas.cli.bench.methods import methods
from eyas.cli.bench.report import report
from eyas.cli.bench.serve import serve
from eyas.cli.bench.trees import trees

VERBS = {
    "measure": bench, "methods": methods, "accuracy": accuracy, "checkpoints": checkpoints, "trees": trees,
    "serve": serve, "report": report,
}  # fmt: skip
DEFAULT = "measure"
