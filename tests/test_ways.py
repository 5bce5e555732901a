"""The ways through the source that docs/architecture.md walks: every file is there, and each touches an earlier one.

Two of them are run, too: a token and a request enter no file that the page doesn't name.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

import eyas
from eyas.cli.common.answers import StreamedText
from eyas.serve.app import ENDPOINTS
from eyas.serve.observe.metrics import Metrics
from eyas.text.chats import Message
from eyas.text.dialogue import Dialogue, converse
from eyas.text.prompts import PromptRow

from .pairs import save_drafter, save_target
from .serve.live import live
from .source import SOURCE, importers

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
WAYS = {
    "The way of a token": True,
    "The way of a request": True,
    "The way of a chat": False,
    "The way of a drafter's folder": False,
}
"""Section -> whether a test below runs it."""
ITEM = re.compile(r"^\s*\d+\.\s+(.*)$", re.MULTILINE)


def way(title: str) -> list[str]:
    """The files that the section's numbered list names, in order."""
    sections = re.split(r"^#+\s+(.*?)\s*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = sections[1::2]
    assert titles.count(title) == 1, f"{PAGE.name} has no section {title!r}"
    items = ITEM.findall(sections[2 * titles.index(title) + 2])
    paths = [re.match(r"`([^`]+)`", item) for item in items]
    assert all(paths), f"an item of {title!r} doesn't begin with a path: {items[paths.index(None)]!r}"
    return [path[1] for path in paths if path]


@pytest.mark.parametrize("title", WAYS)
def test_every_file_is_there_once(title: str) -> None:
    files = way(title)
    assert len(files) > 3
    assert len(set(files)) == len(files), "a way that comes back is no way: mend the code"
    assert not [file for file in files if not (SOURCE / file).is_file()]


@pytest.mark.parametrize("title", [title for title, runs in WAYS.items() if not runs])
def test_each_file_touches_an_earlier_one(title: str) -> None:
    """It imports one of them, or one of them imports it; a verb begins with what the verb before has written."""
    files = way(title)
    for i, file in enumerate(files[1:], start=1):
        earlier = set(files[:i])
        if file.startswith("cli/") and not file.startswith("cli/common/"):
            continue
        assert earlier & importers().get(file, set()) or any(
            file in importers().get(other, set()) for other in earlier
        ), f"{file} has nothing to do with any file before it"


class Entered:
    """The files of the package whose functions are called, in any thread that starts under it, while `on`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_name != "<module>" and code.co_filename.startswith(str(SOURCE)):
            self.files.add(Path(code.co_filename).relative_to(SOURCE).as_posix())

    def during(self, work: Callable[[], object]) -> set[str]:
        """What `work` enters in this thread and in those that report to this object already."""
        self.files = set()
        self.on = True
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            work()
        finally:
            sys.setprofile(before)
            self.on = False
        return self.files


def open_pair(path: Path) -> eyas.Engine:
    model = save_target(path / "model")
    drafter = save_drafter(path / "drafter")
    return eyas.load(model, drafter, tree="dynamic:3,3,8", dtype="float32")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_token_goes_its_way(tmp_path: Path, temperature: float) -> None:
    engine = open_pair(tmp_path)
    params = eyas.SamplingParams(max_tokens=30, temperature=temperature, seed=1)

    def generate() -> None:
        dialogue = Dialogue(PromptRow("0", "a prompt", messages=(Message(role="user", content="Why?"),)))
        text = StreamedText(engine.tokenizer, speculating=True)
        for _, chunk in converse(engine, [dialogue], params):
            text.add(chunk)

    entered = Entered().during(generate)
    named = set(way("The way of a token"))
    passed_along = {"__init__.py", "types.py", "text/chats.py", "runtime.py"}
    # a drafter runs in whichever way this machine is faster: natively, or its modules
    drafters_modules = {"drafters/config.py", "targets/native/packed_linears.py"}
    assert entered - named <= passed_along | drafters_modules | {
        "targets/transformers_names.py",
        "targets/threads.py",
        "targets/native/library.py",
    }
    native = {f"targets/native/{name}.py" for name in ("decoder", "linears", "ops", "noise")}
    modules = {"targets/linears.py", "targets/attention.py", "targets/taps.py"}
    drafter = {"targets/native/levels.py", "drafters/kinds/eagle3.py", "drafters/network.py"}
    optional = {"cli/decode/generate.py"} | drafter
    assert named - entered <= optional | (modules if engine.target.native else native | modules)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_goes_its_way(tmp_path: Path, stream: bool) -> None:
    entered = Entered()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 20, "seed": 1}
    metrics = Metrics("tiny", ENDPOINTS)
    before = threading.getprofile()
    threading.setprofile(entered)
    try:
        with live(open_pair(tmp_path), metrics, metrics=metrics) as server:

            def ask() -> None:
                answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": stream}, timeout=60)
                assert answer.status_code == 200, answer.text

            ask()  # what is done once
            files = entered.during(ask)
    finally:
        threading.setprofile(before)
    named = set(way("The way of a request"))
    # between `submit` and the chunks it is a token's way
    rooms = ("drafters/", "engine/", "targets/", "tree/", "verify/", "runtime.py")
    assert {file for file in files if not file.startswith(rooms)} <= named
    assert named - files <= {"cli/serve/serve.py", "serve/run.py"}
