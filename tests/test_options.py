"""Options of targets, drafters and engines: each is checked before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eyas.drafters.options import DrafterOptions
from eyas.errors import CheckpointError, EyasError, MissingModelError, ModelError, UsageError
from eyas.options import EngineOptions, TargetOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"quantize": "int8", "compiled": True}, "leave out `compiled=`"),
        ({"eager": True, "device": "cpu"}, "leave out `eager=`"),
        ({"eager": True, "compiled": True}, "leave out `eager=`"),
        ({"kernels": "cuda"}, "unknown kernels 'cuda'"),
        ({"kernels": "triton", "device": "cpu"}, "leave out `device=cpu`"),
        ({"kernels": "triton", "attention": "eager"}, "leave out `compiled=` and `attention=`"),
        ({"kernels": "triton", "kv_cache_dtype": "int8"}, "leave out `device=`, `kernels=`"),
    ],
)
def test_targets_that_can_not_be(options: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    TargetOptions(tmp_path).check()
    with pytest.raises(UsageError, match=message):
        TargetOptions(tmp_path, **options).check()  # type: ignore[arg-type]


def test_a_target_s_files_are_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        TargetOptions(tmp_path).check()
    with pytest.raises(MissingModelError):
        TargetOptions(tmp_path / "gone").check()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, UsageError, "drafting needs a drafter"),
        ({"method": "eagle3"}, UsageError, "method eagle3 needs a drafter"),
        ({"method": "sorcery"}, UsageError, "unknown method"),
        ({"source": ".", "method": "ngram"}, UsageError, "`method=ngram` needs no drafter"),
        ({"source": ".", "window": "wide"}, UsageError, "`draft_window=wide`"),
        ({"source": ".", "quantize": "int2"}, UsageError, "unknown quantization 'int2'"),
        ({"method": "ngram", "window": 8}, UsageError, "drafters that are networks, and ngram is none"),
        ({"method": "ngram", "quantize": "off"}, UsageError, "drafters with weights, and ngram has none"),
        ({"source": ".", "weights": "none.bin"}, CheckpointError, "holds no such file"),
    ],
)
def test_drafters_that_can_not_be(options: dict[str, object], kind: type[EyasError], message: str) -> None:
    with pytest.raises(kind, match=message):
        DrafterOptions(**options).check()  # type: ignore[arg-type]


def test_drafters_that_can_be() -> None:
    for options in (DrafterOptions("."), DrafterOptions(method="ngram"), DrafterOptions(method="mtp", window="auto")):
        options.check()


def test_another_drafter_is_read_alike_unless_it_has_no_files() -> None:
    given = DrafterOptions("a", "eagle3", weights="w.safetensors", window=8)
    assert given.of("b") == DrafterOptions("b", None, weights="w.safetensors", window=8)
    assert given.of(None, "ngram") == DrafterOptions(method="ngram")


@pytest.mark.parametrize(
    ("options", "drafts", "message"),
    [
        ({"tree": "chain:2"}, False, "a tree needs a drafter"),
        ({"tree": "bush:2"}, True, "unknown tree"),
        ({"tree": "chain:2", "costs": Path("c.json")}, True, "`costs=` are measured for `tree=auto` only"),
        ({"costs": Path("c.json")}, False, "`costs=` are measured for `tree=auto` only"),
    ],
)
def test_engines_that_can_not_be(options: dict[str, object], drafts: bool, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineOptions(**options).check(drafts)  # type: ignore[arg-type]


def test_engines_that_can_be() -> None:
    EngineOptions().check(False)
    EngineOptions("auto:chain", costs=Path("c.json")).check(True)
    EngineOptions(costs=Path("c.json")).check(True)  # whose tree may be auto by default


def test_options_are_light() -> None:
    code = "import sys, eyas.options, eyas.drafters.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_session_imports_no_more_than_it_needs() -> None:
    """Every second of a start that isn't torch's or transformers' is eyas's own to save: packages are counted."""
    code = (
        "import sys, eyas.cli.app, eyas.session; "
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found = {name for name in done.stdout.split() if not name.startswith("_")}
    seldom = "datasets pandas pyarrow matplotlib optuna tensorboard datasketch fastapi uvicorn llguidance peft ray gguf"
    assert not found & set(seldom.split())
    assert 20 < len(found) <= 55, sorted(found)
