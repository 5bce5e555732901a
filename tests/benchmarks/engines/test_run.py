"""What `make engines` does about engines that can't be had, that fail, and with results of earlier runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import benchmarks.engines.__main__ as check
from benchmarks.engines.compare import Result
from benchmarks.engines.counts import Counts
from benchmarks.engines.table import MARKS
from eyas.errors import EndpointError
from tests.toy.pair import TOY_DRAFTER, TOY_TARGET

PAIR = ("--model", str(TOY_TARGET), "--drafter", str(TOY_DRAFTER))
COUNTS = Counts(3, 9, (2, 2, 1))
VLLM = Result("vLLM", "1", "vllm", "over HTTP", 3, "2026-11-21", 2, 7, 2, 2, COUNTS, COUNTS)
LLAMA = replace(VLLM, engine="llama.cpp", form="gguf")


class Fake:
    """Checks whose engines answer what a test says."""

    vllm_yields: Any = ()
    llama_yields: Any = ()

    def __init__(self, *_: Any) -> None:
        pass

    def vllm(self, _: Any) -> Iterator[Result]:
        yield from self.vllm_yields

    def llama(self, _: Any) -> Iterator[Result]:
        yield from self.llama_yields


VLLM_CPU, LLAMA_CPP = ("--vllm", "python"), ("--llama", "server", "sources")


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, named: tuple[str, ...] = (*VLLM_CPU, *LLAMA_CPP)
) -> int:
    monkeypatch.setattr(check, "Checks", Fake)
    monkeypatch.setattr(check, "make_prompts", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["engines", *named, "--output", str(folder / "r.json"), *PAIR, *arguments])
    return check.main()


def test_an_engine_that_is_not_named_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Fake, "vllm_yields", [VLLM])
    monkeypatch.setattr(Fake, "llama_yields", [LLAMA])
    assert run(monkeypatch, tmp_path, named=LLAMA_CPP) == 0
    assert [row["engine"] for row in json.loads((tmp_path / "r.json").read_text())["results"]] == ["llama.cpp"]


def test_an_engine_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing() -> Iterator[Result]:
        yield VLLM
        raise EndpointError("it ended at once")

    monkeypatch.setattr(Fake, "vllm_yields", failing())
    assert run(monkeypatch, tmp_path) == 1
    assert json.loads((tmp_path / "r.json").read_text())["results"][0]["passed"] is True


def test_a_result_that_is_not_as_it_should_be_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Fake, "vllm_yields", [replace(VLLM, theirs=Counts(3, 9, (2, 2, 2)))])
    assert run(monkeypatch, tmp_path) == 1


def test_results_of_the_other_engine_stay_and_the_page_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(MARKS))
    monkeypatch.setattr(Fake, "vllm_yields", [VLLM])
    monkeypatch.setattr(Fake, "llama_yields", [LLAMA])
    assert run(monkeypatch, tmp_path, "--page", str(page)) == 0
    monkeypatch.setattr(Fake, "vllm_yields", [replace(VLLM, version="2")])
    assert run(monkeypatch, tmp_path, "--page", str(page), named=VLLM_CPU) == 0
    assert "vLLM 2, over HTTP" in page.read_text()
    assert "vLLM 1, over HTTP" not in page.read_text()
    assert "llama.cpp 1, over HTTP" in page.read_text()
