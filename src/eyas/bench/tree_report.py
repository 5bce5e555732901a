"""What a sweep over draft trees found: ranked table and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from eyas.bench.choice import Choice
from eyas.bench.score import Candidate, rank
from eyas.bench.trees import Pass, Setting


@dataclass(frozen=True)
class TreeReport:
    """Everything about the choice."""

    drafter: str
    settings_tried: Sequence[Setting]
    passes: Sequence[Pass]
    choice: Choice
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    errors: Sequence[str]

    @property
    def in_order(self) -> list[tuple[Candidate, Pass]]:
        """Finalists best first, then the dropped ones, those that went further before the others."""
        seen: set[str] = set()
        rows = []
        for done in reversed(self.passes):
            for candidate in rank([c for c in done.candidates if c.name not in seen], self.choice.by):
                seen.add(candidate.name)
                rows.append((candidate, done))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The JSON object; `passes` holds every figure that was taken."""
        numbers = {setting.name: setting._asdict() for setting in self.settings_tried}
        return {
            "drafter": self.drafter,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            **self.choice.as_dict(),
            "passes": [
                {
                    "prompts": done.rung.groups,
                    "candidates": [candidate.as_dict() | numbers[candidate.name] for candidate in done.candidates],
                }
                for done in self.passes
            ],
            "errors": list(self.errors),
        }

    def table(self) -> Table:
        """Ranked; a setting's figures are those of the last pass it took part in."""
        table = Table("", "tree", title=f"Draft trees for {self.drafter}")
        for header in ("tokens/s", "speedup", "accept length", "efficiency", "prompts a file"):
            table.add_column(header, justify="right")
        for candidate, done in self.in_order:
            mark = "pick" if candidate is self.choice.best else "tie" if candidate.name in self.choice.ties else ""
            speedup, length = candidate.mean("speedup"), candidate.mean("accept_length")
            table.add_row(
                mark,
                candidate.name,
                f"{candidate.mean('tokens_per_second'):.1f}",
                f"{speedup:.2f}x",
                f"{length:.2f}",
                f"{speedup / length:.2f}" if length else "",
                str(done.rung.groups),
            )
        return table
