"""What runs in processes of its own: the tests on a device, and vLLM if it is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig

from benchmarks.gpu.pairs import Sizes, release_pairs
from benchmarks.gpu.steps import Outcome, Skipped

ROOT = Path(__file__).parents[2]
TESTS = {
    "losslessness": ("tests/engine/test_equality.py", "tests/engine/test_round.py"),
    "kernels of training": ("tests/train/loss/test_causal_kernels.py",),
    "engine": tuple(
        f"tests/engine/test_{name}.py" for name in ("engine", "sampling", "prefix", "grammar", "serving", "under_load")
    ),
}
"""Name -> test files whose models are on the device that EYAS_TEST_DEVICE names."""
WORKERS = 4


def run_tests(files: tuple[str, ...], sizes: Sizes, device: torch.device) -> Outcome:
    """Test files with their models on the device."""
    if find_spec("pytest") is None:
        raise Skipped("pytest isn't installed")
    release_pairs()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", "-m", "not slow", *files]
    command += ["-k", sizes.tests] if sizes.tests else []
    if device.type != "cpu" and find_spec("xdist") is not None:
        command += ["-n", str(WORKERS)]
    environment = os.environ | {"EYAS_TEST_DEVICE": str(device)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", done.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    wrong = [] if done.returncode == 0 else failed or [f"pytest ended with {done.returncode}: {done.stdout[-300:]}"]
    return Outcome([{"files": len(files), "passed": 0, "failed": 0, **counts}], wrong, done.stdout.splitlines()[-40:])


def vllm_rates(sizes: Sizes, device: torch.device) -> Outcome:
    """Plain decoding of the random pair's shape in vLLM as it is by default."""
    if device.type != "cuda" or find_spec("vllm") is None:
        raise Skipped("there is no GPU" if device.type != "cuda" else "vLLM isn't installed")
    release_pairs()
    with TemporaryDirectory() as folder:
        LlamaConfig(**sizes.llama, architectures=["LlamaForCausalLM"], tie_word_embeddings=False).save_pretrained(
            folder
        )
        job = {
            "model": folder, "batches": sizes.batches, "prompt": sizes.prompt, "tokens": sizes.tokens,
            "repeats": sizes.repeats, "vocab": sizes.llama["vocab_size"],
        }  # fmt: skip
        output = Path(folder, "rates.json")
        command = [sys.executable, str(Path(__file__).parent / "inside" / "vllm_rates.py"), str(output)]
        subprocess.run(command, input=json.dumps(job), text=True, check=True)
        found = json.loads(output.read_text(encoding="utf-8"))
    rows = [
        {"batch": int(batch), "setting": f"vLLM {found['version']}, plain", "tokens/s": round(rate["median"], 1),
         "min": round(rate["min"], 1), "max": round(rate["max"], 1)}
        for batch, rate in found["rates"].items()
    ]  # fmt: skip
    return Outcome(rows)
