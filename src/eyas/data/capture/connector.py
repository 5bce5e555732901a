"""States from a vLLM server: its hidden-states connector writes a file per request, which is read, checked and deleted.

vLLM numbers boundaries as eyas does, up to the output of the last layer, and writes them in ascending order. It doesn't
apply the final norm: final states are computed here from the last boundary.

Shapes: B chats, S positions, K boundaries in the file, A taps, Ht hidden, V vocabulary.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.data.store.layout import ShardLayout
from eyas.errors import EndpointError, StoreError
from eyas.targets.target import FinalNorm, Trace

MAX_CONCURRENT = 64
"""Maximum number of concurrent requests; batches of long chats have fewer."""
REQUEST_TIMEOUT = 600.0
"""Seconds that a request may take, including those queued before it."""
MAX_DISAGREEMENT = 1.0
"""Nats by which the server's next token may be less probable than the head's best, since both round."""


def boundaries(layout: ShardLayout, layers: int) -> tuple[int, ...]:
    """The boundaries that a server must write for a store: its taps, and the one that the final norm reads."""
    return tuple(sorted({*layout.taps, layers}))


class _Choice(BaseModel):
    token_ids: list[int]


class _Parameters(BaseModel):
    hidden_states_path: Path


class _Completion(BaseModel):
    """The fields of a response that are read."""

    choices: list[_Choice]
    kv_transfer_params: _Parameters


class _Read(NamedTuple):
    """A chat's states, and the token that the server says comes next."""

    states: Tensor  # [S, K, Ht]
    next_token: int


class ConnectorStates:
    """A `StateSource` that has the server at `url` run chats. Use it as a context manager.

    Raises EndpointError if the server fails, and StoreError for states that aren't the chat's or the target's.
    """

    def __init__(
        self, url: str, model: str, final_norm: FinalNorm, written: Sequence[int], explain: Callable[[str], str] = str
    ) -> None:
        """`url` ends with `/v1`; `model` is the server's name for the target; `written`: the `boundaries` it writes;
        `final_norm` is the target's.

        `explain` improves an error message with the server's log, which only the caller has, who started it.
        """
        self._url = url
        self._model = model
        self._written = tuple(written)
        self._explain = explain
        self._final_norm = final_norm
        self._target = final_norm.target
        self._client = httpx.Client(timeout=REQUEST_TIMEOUT, trust_env=False)

    def __enter__(self) -> ConnectorStates:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def device(self) -> torch.device:
        """Where the final norm and the head are."""
        return self._target.device

    def head(self, final: Tensor) -> Tensor:
        """Logits [..., V] of final states [..., Ht]."""
        return self._target.head(final)

    def version(self) -> str:
        """The server's version."""
        return str(self._sent("GET", self._url.removesuffix("/v1") + "/version").json()["version"])

    def trace(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Trace:
        """The states of right-padded `tokens` [B, S] of `lengths` [B]; zeros at padding (final states: their norm)."""
        rows = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        with ThreadPoolExecutor(min(MAX_CONCURRENT, len(rows))) as pool:
            read = list(pool.map(self._row, rows))
        states = pad_sequence([row.states for row in read], batch_first=True).to(self.device)  # [B, S, K, Ht]
        leaving = states[:, :, self._written.index(self._target.num_layers)]
        final = self._final_norm(leaving.flatten(0, 1)).view_as(leaving)
        self._check(final, lengths, read)
        return Trace(states[:, :, [self._written.index(k) for k in taps]], final)

    def _row(self, tokens: list[int]) -> _Read:
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        response = self._sent("POST", f"{self._url}/completions", body)
        try:
            answer = _Completion.model_validate_json(response.content)
            token = answer.choices[0].token_ids[0]
        except (ValidationError, IndexError) as error:
            raise EndpointError(
                self._explain(f"vLLM's answer names no file of hidden states: {response.text[:200]}")
            ) from error
        path = answer.kv_transfer_params.hidden_states_path
        try:
            return _Read(self._states(path, tokens), token)
        finally:
            path.unlink(missing_ok=True)
            _lock_of(path).unlink(missing_ok=True)

    def _states(self, path: Path, tokens: list[int]) -> Tensor:
        """The states [S, K, Ht] in the file of a request for `tokens`."""
        try:
            _wait_for(_lock_of(path))
            found = load_file(path)
            states, ids = found["hidden_states"], found["token_ids"]
        except (OSError, SafetensorError, KeyError) as error:
            raise EndpointError(self._explain(f"vLLM has written no hidden states into {path}: {error}")) from error
        if ids.tolist() != tokens:
            raise StoreError(
                f"vLLM has computed the states of {len(ids)} other tokens than the {len(tokens)} of the chat: the "
                "shard is not stored"
            )
        expected = (len(tokens), len(self._written), self._target.hidden_size)
        if tuple(states.shape) != expected or states.dtype != self._target.dtype:
            raise StoreError(
                f"vLLM has written states {list(states.shape)} in {states.dtype}, not {list(expected)} in "
                f"{self._target.dtype}: its model doesn't give boundaries {list(self._written)}"
            )
        return states

    def _check(self, final: Tensor, lengths: Tensor, read: Sequence[_Read]) -> None:
        """Raise StoreError unless the head predicts, from the final states, the tokens that the server generated."""
        if not self._target.head_is_exact:
            return
        last = final[torch.arange(len(read), device=final.device), lengths.to(final.device) - 1]  # [B, Ht]
        logits = self.head(last).float()  # [B, V]
        taken = logits.gather(1, torch.tensor([[row.next_token] for row in read], device=final.device))
        if bool((taken < logits.amax(1, keepdim=True) - MAX_DISAGREEMENT).any()):
            raise StoreError(
                "the head predicts another next token from vLLM's last states than vLLM itself: vLLM doesn't compute "
                "what the target does, or numbers layers differently. Capture with eyas's own pass: leave out `engine=`"
            )

    def _sent(self, method: str, url: str, body: object = None) -> httpx.Response:
        try:
            response = self._client.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise EndpointError(self._explain(f"vLLM gave no answer: {error or type(error).__name__}")) from error
        if not response.is_success:
            raise EndpointError(self._explain(f"vLLM says {response.status_code}: {response.text[:300]}"))
        return response


def _lock_of(path: Path) -> Path:
    """The file that vLLM keeps locked until the states are written; the connector's first versions have none."""
    return path.with_name(path.name + ".lock")


def _wait_for(lock: Path) -> None:
    """Wait until a lock is released, if only because its process ends."""
    if lock.exists():
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)
