"""The states that vLLM's hidden-states connector gives of the demo target, against those of eyas's own capture.

vLLM for CPU runs everything but the connector's copy through a GPU's pinned memory, which `inside/cpu_connector.py`
replaces. The capture is killed (-9) once it has a shard, goes on, is compared number by number, and trained from.

    python -m benchmarks.engines.states --vllm VENV/bin/python --output FILE.json
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from benchmarks.engines.building import build_vllm
from benchmarks.engines.vllm import SERVER, environment
from benchmarks.harness import report, script
from eyas.data.chats.stdlib import chats_of, library_modules
from eyas.data.store import FeatureStore
from eyas.data.store.encoding import EncodedStates
from eyas.interop.serving.hidden_states import connector_arguments
from eyas.text.chats import write_chats
from tests.toy.pair import TOY, TOY_TARGET

FINAL = "final"
STEPS = 2
"""Of training from the store."""


def vllm_options(python: Path, spool: Path) -> list[str]:
    """What makes `eyas data capture` use this vLLM, with the connector that works without a GPU."""
    inside = {"PYTHONPATH": str(Path(__file__).parent / "inside")}
    variables = [f"{name}={value}" for name, value in (environment(python, 1) | inside).items()]
    transfer = json.loads(connector_arguments((), spool, "float32", 1)[-1])
    transfer |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "cpu_connector"}
    return [
        *("--engine", "vllm", "--engine-command", shlex.join(["env", *variables, str(python), "-m", SERVER])),
        "--engine-option=--enforce-eager",
        *(f"--engine-option={part}" for part in ("--kv-transfer-config", json.dumps(transfer))),
    ]


def killed_with_a_shard(words: Sequence[str], store: Path) -> bool:
    """Run until the store has a shard, then kill -9; False if it ended before."""
    with subprocess.Popen(words) as process:
        while process.poll() is None and not list(store.glob("*-0*.safetensors")):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


def differences(own: FeatureStore, other: FeatureStore) -> dict[str, dict[str, float]]:
    """Boundary, or final -> the largest difference of a state's number, the largest number, and the relative error.

    That is the norm of all differences over the norm of all numbers.
    """
    found: dict[str, dict[str, float]] = {}
    squares: dict[str, list[float]] = {}
    for row in range(len(own)):
        ours, theirs = own.read(row), other.read(row)
        for name, index in [*((str(k), i) for i, k in enumerate(own.layout.taps)), (FINAL, None)]:
            a, b = (_numbers(each.final if index is None else each.taps, index) for each in (ours, theirs))
            worst = found.setdefault(name, {"difference": 0.0, "largest": 0.0})
            worst["difference"] = max(worst["difference"], float((a - b).abs().max()))
            worst["largest"] = max(worst["largest"], float(a.abs().max()))
            sums = squares.setdefault(name, [0.0, 0.0])
            sums[0] += float((a - b).double().square().sum())
            sums[1] += float(a.double().square().sum())
    for name, (wrong, whole) in squares.items():
        found[name]["relative"] = (wrong / whole) ** 0.5
    return found


def _numbers(states: EncodedStates | None, index: int | None) -> Any:
    assert states is not None
    values = states.values.float()
    return values if index is None else values[:, index]


@script
def main(
    *,
    output: Path,
    vllm: Annotated[Path | None, "the Python of one with vLLM for CPU"] = None,
    folder: Annotated[Path, "where vLLM is built"] = Path(".engines"),
    chats: int = 100,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Capture twice, compare, train, and write what came of it."""
    python = vllm.absolute() if vllm else build_vllm(folder.absolute() / "vllm")
    states = "float32" if dtype == "float32" else "bf16"
    eyas = [sys.executable, "-m", "eyas"]
    with TemporaryDirectory() as work:
        source, own, other, spool = (Path(work) / name for name in ("chats.jsonl", "own", "vllm", "spool"))
        spool.mkdir()
        every = [chat for module in library_modules() for chat in chats_of(module)]
        write_chats(source, every[:: len(every) // chats][:chats])
        words = [
            *(*eyas, "data", "capture", "--model", TOY_TARGET, "--chats", str(source), "--dtype", dtype),
            *f"--states {states} --final all --max-length 512 --shard-mib 8 --batch-tokens 2048".split(),
        ]
        subprocess.run([*words, "--output", str(own)], check=True)
        again = [*words, "--output", str(other), *vllm_options(python, spool)]
        killed = killed_with_a_shard(again, other)
        kept = len(list(other.glob("*.safetensors")))
        for lost in spool.iterdir():
            lost.unlink()
        subprocess.run(again, check=True)
        left = len(list(spool.iterdir()))
        stores = FeatureStore.open(own), FeatureStore.open(other)
        splits = stores[0].settings.splits
        subprocess.run(
            [
                *(
                    *eyas,
                    "train",
                    str(TOY / "recipes/drafter.yaml"),
                    f"drafter.target={TOY_TARGET}",
                    f"drafter.store={other}",
                ),
                *(f"drafter.output={work}/run", f"drafter.loop.steps={STEPS}", "drafter.validation={decode: false}"),
            ],
            check=True,
        )
        logged = [json.loads(line) for line in (Path(work) / "run" / "metrics.jsonl").read_text().splitlines()]
        result = {
            "versions": stores[1].manifest.versions,
            "dtype": dtype,
            "rows": {name: split.rows for name, split in splits.items()},
            "tokens": sum(split.tokens for split in splits.values()),
            "same rows and target": (stores[0].settings.splits, stores[0].settings.target)
            == (stores[1].settings.splits, stores[1].settings.target),
            "damage": list(stores[1].verify()),
            "shards": len(stores[1].manifest.shards),
            "shards when it was killed": kept if killed else None,
            "files left": left,
            "boundaries": differences(*stores),
            "loss of training from it": {str(row["step"]): row["loss"] for row in logged if "loss" in row},
        }
    report(result, output)


if __name__ == "__main__":
    raise SystemExit(main())
