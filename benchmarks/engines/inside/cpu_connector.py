"""vLLM's hidden-states connector without a GPU: only its copy through pinned memory and CUDA's streams is replaced.

vLLM imports it (`kv_connector_module_path`), so this folder has to be on its PYTHONPATH.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Copied:
    """In place of the CUDA event of a copy: there was nothing to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes a request's file from the cache directly, with vLLM's own slots, tensors and locks."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        blocks = torch.tensor(pending.block_ids).unsqueeze(1)
        slots = (torch.arange(self._block_size) + blocks * self._block_size).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        copied = _Copied()
        self._req_copy_events[pending.req_id] = copied
        lock = self._lock_fds.pop(pending.req_id, None)
        self._write_tensors(
            {"hidden_states": states, "token_ids": pending.token_ids.clone()}, copied, pending.filename, lock
        )
