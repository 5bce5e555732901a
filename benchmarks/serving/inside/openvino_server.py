"""OpenVINO GenAI behind OpenAI's route for chats, for `side_by_side`: run by a Python that has openvino-genai.

    python openvino_server.py MODEL.gguf --port PORT [--lookup] [--precision f32] [--drafted 4]

OpenVINO converts the GGUF file while it loads it. `--lookup` drafts by prompt lookup. Requests that come together are
decoded together. OpenVINO's own choice of precision, bfloat16 on processors with AMX, decoded Qwen2.5-Coder-1.5B at two
thirds of float32's speed.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from queue import Queue
from typing import Any

import openvino_genai as genai

CACHE_GB = 2
NGRAM = 3
"""Longest n-gram that prompt lookup looks for."""


class Engine:
    """The pipeline, and a thread that runs its steps while there are requests."""

    def __init__(self, model: str, lookup: bool, precision: str, drafted: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision}
        if lookup:
            properties["prompt_lookup"] = True
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._drafted = drafted if lookup else 0
        self._waiting: Queue[tuple[str, Any, Queue[tuple[list[int], bool]]]] = Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Steps of the pipeline, which only this thread uses."""
        running: list[tuple[Any, Queue[tuple[list[int], bool]]]] = []
        numbers = count()
        while True:
            while not running or not self._waiting.empty():
                prompt, config, answer = self._waiting.get()
                running.append((self._pipeline.add_request(next(numbers), prompt, config), answer))
            self._pipeline.step()
            for handle, answer in tuple(running):
                if handle.can_read():
                    (output,) = handle.read().values()
                    ended = output.finish_reason != genai.GenerationFinishReason.NONE
                    answer.put((list(output.generated_ids), ended))
                    if ended:
                        running.remove((handle, answer))

    def tokens(self, messages: list[dict[str, str]], most: int) -> Iterator[list[int]]:
        """The tokens of a greedy answer, as steps bring them."""
        config = genai.GenerationConfig()
        config.max_new_tokens = most
        config.do_sample = False
        config.eos_token_id = self._pipeline.get_config().eos_token_id
        config.stop_token_ids = self._pipeline.get_config().stop_token_ids
        if self._drafted:
            config.num_assistant_tokens = self._drafted
            config.max_ngram_size = NGRAM
        answer: Queue[tuple[list[int], bool]] = Queue()
        self._waiting.put((self.tokenizer.apply_chat_template(messages, add_generation_prompt=True), config, answer))
        ended = False
        while not ended:
            new, ended = answer.get()
            yield new


class Handler(BaseHTTPRequestHandler):
    """`/health` and streamed `/v1/chat/completions`."""

    engine: Engine

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._begin("text/event-stream")
        tokenizer = self.engine.tokenizer
        ids: list[int] = []
        shown = ""
        for new in self.engine.tokens(body["messages"], body["max_tokens"]):
            ids += new
            text = tokenizer.decode(ids)
            if not text.endswith("\ufffd"):  # which it does in the middle of a character
                self._send({"choices": [{"index": 0, "delta": {"content": text[len(shown) :]}}]})
                shown = text
        self._send({"choices": [], "usage": {"completion_tokens": len(ids)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


def main() -> None:
    """Load the model and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--precision", default="f32")
    parser.add_argument("--drafted", type=int, default=4)
    given = parser.parse_args()
    Handler.engine = Engine(given.model, given.lookup, given.precision, given.drafted)
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
