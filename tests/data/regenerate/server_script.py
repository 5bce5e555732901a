"""A standalone server script that takes vLLM's arguments and answers with its model's name, seed and the question."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = f"{arguments['--model']} {arguments['--seed']} <{body['messages'][-1]['content']}>"
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        self._send({"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": 3}})

    def _send(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
