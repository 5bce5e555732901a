"""Startup of `eyas generate` in fresh processes: seconds to the first token, and memory beyond that of the libraries.

Each turn starts with an empty cache that has the compiled kernels, then with a filled one whose panels are mapped
(`kept`), then with panels laid out again (`EYAS_KEEP=0`). Memory is the Pss (private memory plus the share of mapped
pages) minus the Pss after the imports; the size of the target's file is given for comparison. The best of 30 passes
shows whether mapped panels are read as fast as panels in huge pages.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness import Output, report, script
from eyas.assets import target_as_file
from eyas.cache.folder import cache_directory
from eyas.cache.kept import DISABLE

_CHILD = """
import json, re, sys, time
import torch, eyas.cli.app, eyas.session, transformers.models.llama.modeling_llama
from pathlib import Path

def pss():
    return int(re.findall(r"^Pss:\\s+(\\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)[0]) // 1024

libraries = pss()
engine = eyas.session.load(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
prompt = tuple(engine.tokenizer("Why is the sky blue?").input_ids)
next(iter(engine.stream([eyas.Request(prompt, eyas.SamplingParams(max_tokens=1))])))
first = time.time() - float(sys.argv[1])
cache, rows, times = engine.target.allocate(1), range(1), []
memory = pss() - libraries
for _ in range(30):
    cache.truncate(0, 0)
    at = time.perf_counter()
    engine.target.prefill_to_end(cache, rows, [prompt[:1]], ())
    times.append(time.perf_counter() - at)
print(json.dumps({"first_token": first, "mib": memory, "pass_ms": 1000 * min(times)}))
"""


def start(words: list[str], environment: Mapping[str, str]) -> dict[str, float]:
    """Start a fresh process and return its measurements."""
    line = [sys.executable, "-c", _CHILD, repr(time.time()), *words]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment}  # else starts compile
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@script
def main(
    model: str,
    draft_model: Annotated[str | None, "a drafter"] = None,
    *,
    repeats: Annotated[int, "turns"] = 5,
    output: Output = None,
) -> None:
    words = [model, *([draft_model] if draft_model else [])]
    found: dict[str, list[dict[str, float]]] = {"first": [], "second": [], "not kept": []}
    start(words, {})  # compiles what isn't compiled yet
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "eyas").mkdir()
            for part in ("native", "machine", "gguf"):
                if (cache_directory() / part).is_dir():
                    (Path(folder) / "eyas" / part).symlink_to(cache_directory() / part)
            for name in ("first", "second"):
                found[name].append(start(words, {"XDG_CACHE_HOME": folder}))
            found["not kept"].append(start(words, {"XDG_CACHE_HOME": folder, DISABLE: "0"}))
    result: dict[str, Any] = {
        name: {key: round(statistics.median(turn[key] for turn in turns), 2) for key in turns[0]} | {"turns": turns}
        for name, turns in found.items()
    }
    file = Path(target_as_file(model))
    result["file_mib"] = file.stat().st_size >> 20 if file.is_file() else None
    report(result, output)


if __name__ == "__main__":
    raise SystemExit(main())
