"""llm with its plugin for llama-server: prompts, streams, chats, tools, and the command."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import llm
import pytest
from common import KEY, QUESTION, TOOL, URL, chat, fits

PORT = 8080
"""Where the plugin expects llama-server, under any name: no option changes it."""


class Forward(socketserver.BaseRequestHandler):
    """Passes a connection's bytes on to the server, and what it answers back, until one side ends it."""

    def handle(self) -> None:
        address = urlsplit(URL)
        with socket.create_connection((address.hostname, address.port)) as server:
            others = {self.request: server, server: self.request}
            while True:
                for ready in select.select(list(others), [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    others[ready].sendall(data)


os.environ["OPENAI_API_KEY"] = KEY  # llm insists on one


@pytest.fixture(scope="module", autouse=True)
def at_its_port() -> Iterator[None]:
    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True

    try:
        server = Server(("127.0.0.1", PORT), Forward)
    except OSError:
        pytest.skip(f"port {PORT}, the only one that the plugin asks, is taken")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("stream", [False, True])
def test_prompt(stream: bool) -> None:
    answer = llm.get_model("llama-server").prompt(QUESTION, stream=stream, temperature=0, max_tokens=24)
    parts = list(answer)
    assert "".join(parts) == chat(24)
    assert (len(parts) > 1) == stream
    assert answer.usage().output <= 24


def test_async() -> None:
    async def text() -> str:
        answer = llm.get_async_model("llama-server").prompt(QUESTION, temperature=0, max_tokens=24)
        return "".join([part async for part in answer])

    assert asyncio.run(text()) == chat(24)


def test_conversation_and_system_prompt() -> None:
    conversation = llm.get_model("llama-server").conversation()
    assert conversation.prompt(QUESTION, temperature=0, max_tokens=24).text() == chat(24)
    assert conversation.prompt("Why?", system="Be brief.", temperature=0, max_tokens=8).text().strip()


def test_tools() -> None:
    """llm can't require a call: whether there is one is the model's choice."""
    shown = llm.Tool(name="get_weather", description="The weather.", input_schema=TOOL["function"]["parameters"])
    model = llm.get_model("llama-server-tools")
    answer = model.prompt(QUESTION, tools=[shown], temperature=0, max_tokens=60, stream=False)
    assert answer.text().strip() or all(fits(call.arguments) for call in answer.tool_calls())
    result = llm.ToolResult(name="get_weather", output="Sun.", tool_call_id="call_1")
    after = answer.conversation.prompt if answer.conversation else model.prompt
    assert after("Why?", tools=[shown], tool_results=[result], temperature=0, max_tokens=8, stream=False).text()


@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_command(how: list[str]) -> None:
    command = [os.path.join(sys.prefix, "bin", "llm"), "-m", "llama-server", "-o", "temperature", "0", *how]
    done = subprocess.run(
        [*command, "-o", "max_tokens", "24", QUESTION], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == chat(24).strip(), done.stderr
