"""Targets for verbs that measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.cli.common.build import open_target
from eyas.cli.common.options import RuntimeOptions

from ... import tiny


@pytest.mark.parametrize(("modules", "dtype"), [(False, "auto"), (True, torch.float32)])
def test_a_target_is_measured_as_it_is_served(
    modules: bool, dtype: str | torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` may be bfloat16 in native passes on a CPU whose modules would be slow in it, and are run in float32."""
    tiny.build_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    asked: list[Any] = []
    monkeypatch.setattr("eyas.targets.load_target", lambda _, **options: asked.append(options["dtype"]))
    monkeypatch.setattr("eyas.targets.loading.cpu_computes_in", lambda wanted: wanted == torch.float32)
    open_target(str(tmp_path), RuntimeOptions(device="cpu"), modules=modules)
    assert asked == [dtype]
