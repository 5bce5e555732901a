"""What a run says: one JSON line a record, always; a progress bar where somebody looks."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RunLog:
    """Appends to `metrics.jsonl`; on resume, records past the resumed step are cut first."""

    def __init__(self, path: Path, steps: int, done: int) -> None:
        kept: list[str] = []
        if path.exists() and done:
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= done]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._out = path.open("a", encoding="utf-8")
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done)

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._out.close()

    def advance(self, step: int) -> None:
        """Move the bar to `step` finished steps."""
        self._bar.update(self._task, completed=step)

    def record(self, step: int, values: dict[str, float | str]) -> None:
        """Write one record."""
        self._out.write(json.dumps({"step": step, **values}) + "\n")
        self._out.flush()
        shown = " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        self._bar.update(self._task, description=shown)
        if not self._console.is_terminal:
            self._console.print(f"step {step} {shown}", highlight=False, soft_wrap=True)
