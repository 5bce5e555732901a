"""Start `eyas serve`, ask it by OpenAI's client, and stop it. Needs the extra `serve` and the package `openai`.

python examples/serve_and_ask.py [--model MODEL] [--drafter DRAFTER] [--prompt TEXT]
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from openai import OpenAI


@contextmanager
def serving(model: str, drafter: str) -> Iterator[str]:
    """The address of a server that answers; it ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "eyas", "serve", model, "--draft-model", drafter, "--port", str(port)]
    server = subprocess.Popen(command)
    try:
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None:
                raise SystemExit(f"the server ended with {server.returncode}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()  # running requests may finish
        server.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address) as reply:
            return bool(reply.status == 200)
    except urllib.error.URLError:
        return False


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2", help="a folder, a GGUF file or a Hub id")
    options.add_argument("--drafter", default="smollm2", help="a folder, a GGUF file or a Hub id")
    options.add_argument("--prompt", default="Count to five.")
    options.add_argument("--tokens", type=int, default=64, help="longest answer")
    given = options.parse_args()

    with serving(given.model, given.drafter) as address:
        client = OpenAI(base_url=address, api_key="none")
        stream = client.chat.completions.create(
            model=given.model,
            messages=[{"role": "user", "content": given.prompt}],
            max_tokens=given.tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{chunk.usage.completion_tokens} tokens; speculation: {chunk.usage.model_extra['eyas']}")


if __name__ == "__main__":
    main()
