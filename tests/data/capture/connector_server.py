"""A server in this process that takes vLLM's arguments and writes files as vLLM's hidden-states connector does."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.targets import Target

VERSION = "0.32.0"


class ConnectorServer(ThreadingHTTPServer):
    """Answers a completion with the path of a file that is written and unlocked a moment later."""

    request_queue_size = 64

    def __init__(self, target: Target, arguments: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        options = dict(pairwise(arguments))
        speculation = json.loads(options["--speculative-config"])
        assert speculation["method"] == "extract_hidden_states"
        assert speculation["num_speculative_tokens"] == 1
        self.layers = speculation["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        transfer = json.loads(options["--kv-transfer-config"])
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("ExampleHiddenStatesConnector", "kv_producer")
        self.folder = Path(transfer["kv_connector_extra_config"]["shared_storage_path"])
        self.dtype = getattr(torch, options["--dtype"])
        self.limit = int(options["--max-model-len"])
        self.target = target
        self.busy = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.damage: Callable[[dict[str, Any]], Any] = lambda _: None
        """Modifies the file and response that are about to be sent."""
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def close(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def answered(self, body: dict[str, Any]) -> dict[str, Any]:
        """The status, path, next token and tensors of a request."""
        prompt = torch.tensor([body["prompt"]])
        assert prompt.shape[1] < self.limit
        with self.busy:  # hooks catch the states of one pass at a time
            self.requests.append(body)
            number = len(self.requests)
            trace = self.target.trace(prompt, torch.tensor([prompt.shape[1]]), sorted(self.layers))
            following = int(self.target.head(trace.final[0, -1]).argmax())
        said = {
            "status": 200,
            "path": self.folder / f"cmpl-{number}.safetensors",
            "next": [following],
            "tensors": {"hidden_states": trace.taps[0].to(self.dtype).contiguous(), "token_ids": prompt[0].clone()},
        }
        self.damage(said)
        return said


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ConnectorServer

    def do_GET(self) -> None:
        self._send(200, {"version": VERSION})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = self.server.answered(body)
        path: Path | None = said["path"]
        choices = [{"index": 0, "text": "", "finish_reason": "length", "token_ids": said["next"]}]
        parameters = None if path is None else {"hidden_states_path": str(path)}
        if path is None:
            self._send(said["status"], {"choices": choices, "kv_transfer_params": parameters})
            return
        with path.with_name(path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._send(said["status"], {"choices": choices, "kv_transfer_params": parameters})
            time.sleep(0.005)
            if said["tensors"] is not None:
                save_file(said["tensors"], path)

    def _send(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass
