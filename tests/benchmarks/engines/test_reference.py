"""What eyas does itself, for engines to be compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engines import reference
from eyas.drafters import decoding

from ...pairs import save_drafter, save_target


def test_the_smallest_lead_of_a_guess_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_target(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter")
    leads: list[list[float]] = []
    ranked = decoding.best_children

    def listed(logits: torch.Tensor, *rest: object) -> object:
        best, second = logits[0, 0].topk(2).values
        leads[-1].append(float(best - second))
        return ranked(logits, *rest)  # type: ignore[arg-type]

    for prompt in ((5, 6, 7), (9, 8)):
        leads.append([])
        monkeypatch.setattr(reference, "best_children", listed)
        (found,) = reference.references(str(target), str(drafter), [prompt], 6, [3])
        assert found.leads == {3: min(leads[-1])}
        assert len(leads[-1]) == 3 * len(found.rounds[3])
        assert len(found.answer) == 6
