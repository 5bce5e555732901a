"""Scores kept on disk: a JSON file for each candidate, in a folder named after the settings.

A score holds only for the settings, the weights and the prompts it was taken with; anything else is measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.bench.offline.candidates import TaskScore
from eyas.errors import DataError
from eyas.files import write_json


class Ledger:
    """Scores by candidate and task in `folder`/KEY, KEY being a digest of the settings."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], tasks: Mapping[str, str]) -> None:
        """`tasks`: name -> digest of its prompts. `settings`: whatever else a score depends on."""
        self.settings = dict(settings)
        self._tasks = dict(tasks)
        text = json.dumps(self.settings, sort_keys=True)
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:12]
        self._weights: dict[str, str] = {}
        self._rows: dict[str, dict[str, Any]] = {}  # candidate -> task -> row of its file

    def open(self, name: str, weights: str) -> None:
        """Read the scores of a candidate; `weights` is the digest of its files. Raises DataError."""
        self._weights[name], self._rows[name] = weights, {}
        path = self._path(name)
        if not path.is_file():
            return
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["weights"] == weights:
                self._rows[name] = dict(known["tasks"])
            self.scores(name)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} has no readable scores: delete it, and they are measured again") from error

    def scores(self, name: str) -> dict[str, TaskScore]:
        """The candidate's scores on the tasks of this measurement, by task."""
        rows = self._rows[name]
        return {
            task: TaskScore.from_dict(rows[task]["score"])
            for task, prompts in self._tasks.items()
            if task in rows and rows[task]["prompts"] == prompts
        }

    def put(self, name: str, task: str, score: TaskScore) -> None:
        """Keep a score: it is on the disk when this returns."""
        self._rows[name][task] = {"prompts": self._tasks[task], "score": score.as_dict()}
        content = {"settings": self.settings, "weights": self._weights[name], "tasks": self._rows[name]}
        write_json(self._path(name), content)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
