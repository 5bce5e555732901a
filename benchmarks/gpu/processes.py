"""Tests on a device, run in a separate process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.pairs import Sizes, release_pairs
from benchmarks.gpu.steps import Outcome, Skipped

ROOT = Path(__file__).parents[2]
TESTS = {
    "losslessness": ("tests/engine/test_equality.py", "tests/engine/test_round.py"),
    "kernels of training": ("tests/train/loss/test_chain_attention_kernels.py",),
    "recurrent targets": ("tests/engine/test_recurrent_targets.py",),
    "engine": tuple(
        f"tests/engine/test_{name}.py"
        for name in ("engine", "sampling", "prefix_cache", "grammar", "serving", "under_load")
    ),
}
"""Name -> test files that place their models on the device in EYAS_TEST_DEVICE."""
WORKERS = 4


def run_tests(files: tuple[str, ...], sizes: Sizes, device: torch.device) -> Outcome:
    """Run test files with their models on the device."""
    if find_spec("pytest") is None:
        raise Skipped("pytest isn't installed")
    release_pairs()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "--tb=line",
        "-m",
        "not slow",
        *files,
    ]
    command += ["-k", sizes.tests] if sizes.tests else []
    if device.type != "cpu" and find_spec("xdist") is not None:
        command += ["-n", str(WORKERS)]
    environment = os.environ | {"EYAS_TEST_DEVICE": str(device)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", done.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    wrong = [] if done.returncode == 0 else failed or [f"pytest ended with {done.returncode}: {done.stdout[-300:]}"]
    lines = done.stdout.splitlines()
    reasons = list(dict.fromkeys(line for line in lines if line.startswith("E  ")))  # each once: many tests share one
    return Outcome([{"files": len(files), "passed": 0, "failed": 0, **counts}], wrong, [*reasons[:40], *lines[-20:]])
