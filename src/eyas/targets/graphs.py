"""CUDA graphs: passes over few tokens, recorded once and then started by one launch.

On a GPU, such a pass takes less time than the host needs to launch its kernels one by one. A graph launches all of
them, but always the same kernels at the same addresses. So rows and columns of passes are rounded up to recurring
shapes. Inputs that differ between passes of a shape (tokens, lengths, masks) are copied to buffers at fixed addresses.
Keys and values stay in the slot cache, to which the graphs belong: when it is reallocated, all are recorded again.

Shapes: R rows (a contiguous range of slots), Q columns of a pass, K columns of keys.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.runtime import to_device
from eyas.targets.shapes import USES, recurring

_LOG = logging.getLogger("eyas")
_MAX_TOKENS = 256
"""Maximum number of tokens of a recorded pass. Larger ones keep a GPU busy while their kernels are launched, anyway."""
_MAX_GRAPHS = 128
_COLUMNS = 256
"""Columns of keys are rounded up to a multiple of this, or of a quarter of the power of two below them if greater."""

Outputs = tuple[Tensor, ...]


class Recording(NamedTuple):
    """A recorded computation that can be replayed."""

    replay: Callable[[], None]
    outputs: Outputs
    """Overwritten by every replay."""


Record = Callable[[Callable[[], Outputs]], Recording]
"""Records a computation that has run before; RuntimeError if part of it can't be recorded, such as a host sync."""


class CudaRecorder:
    """Records CUDA graphs on a device, all of them in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            # one stream for all graphs: cuBLAS keeps a workspace per stream
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            counter = torch.zeros(1, device=device)
        # PyTorch records no more in a pool whose graphs have all been deleted, so this one stays
        self._first = self(lambda: (counter.add_(1),))

    def __call__(self, compute: Callable[[], Outputs]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            # other threads may use the device during the capture
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            outputs = compute()
        return Recording(graph.replay, outputs)


class _Recorded(NamedTuple):
    """A recording, and the buffers that it reads."""

    inputs: list[Tensor]
    recording: Recording


class CacheColumns(Protocol):
    """The parts of a slot cache that recorded passes need."""

    lengths: list[int]
    device: torch.device

    @property
    def slots(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    def start(self, rows: range) -> int: ...


class RecurringRows(NamedTuple):
    """The slots and cache columns of a pass, rounded up so that they recur."""

    rows: range
    end: int
    """K, the number of columns that are read, staged ones included."""


Compute = Callable[..., Outputs]
"""(rows, K or None, lengths [R], inputs ...) -> outputs [R, ...].

Without K, the number of columns that are read, it isn't recorded. Anything else that it uses must stay unchanged, at
the same address.
"""


class PassGraphs:
    """The most recently used recorded passes over one slot cache.

    Passes run one after the other, so they share one buffer per argument and result.
    """

    def __init__(self, record: Record, uses: int = USES) -> None:
        self._record = record
        self._uses = uses
        self._found: OrderedDict[Hashable, _Recorded | int] = OrderedDict()  # or the uses of a shape so far
        self._buffers: dict[Hashable, Tensor] = {}
        self.failure: str | None = None
        """The reason why nothing is recorded anymore; None = passes are recorded."""

    def __len__(self) -> int:
        """How many shapes of a pass are recorded at present."""
        return sum(isinstance(found, _Recorded) for found in self._found.values())

    def takes(self, tokens: int) -> bool:
        """Whether passes over `tokens` tokens are recorded."""
        return self.failure is None and tokens <= _MAX_TOKENS

    def clear(self) -> None:
        """Forget all recorded passes."""
        self._found.clear()
        self._buffers.clear()

    def run(
        self,
        kind: Hashable,
        cache: CacheColumns,
        rows: range,
        staged: int,
        inputs: Sequence[Tensor],
        compute: Compute,
        tokens: int | None = None,
    ) -> Outputs | None:
        """Run a pass that stages up to column `staged` behind each row's committed ones; None = run it unrecorded.

        `inputs` are [R, ...]; the first is [R, Q, ...] unless the pass's number of `tokens` is given. The outputs are
        copies. `kind` identifies everything else that `compute` depends on.
        """
        taken = self.takes(inputs[0].shape[:2].numel() if tokens is None else tokens)
        shape = recurring_rows(cache, rows, staged) if taken else None
        if shape is None:
            return None
        lengths = to_device(cache.lengths[shape.rows.start : shape.rows.stop], cache.device)
        given = [lengths, *(filled_up(tensor, len(shape.rows)) for tensor in inputs)]
        key = (kind, shape, *(tensor.shape for tensor in given))
        found = self._found.get(key, 0)
        if not isinstance(found, _Recorded):
            self._found[key] = found + 1
            if found + 1 < self._uses:
                return None
            done = compute(*shape, *given)  # libraries initialize themselves in it, which can't be recorded
            self._add(key, shape, given, compute, done)
            return tuple(out[: len(rows)] for out in done)
        self._found.move_to_end(key)
        for buffer, tensor in zip(found.inputs, given, strict=True):
            buffer.copy_(tensor)
        found.recording.replay()
        return tuple(out[: len(rows)].clone() for out in found.recording.outputs)

    def _add(
        self, key: Hashable, shape: RecurringRows, given: Sequence[Tensor], compute: Compute, done: Outputs
    ) -> None:
        """Record a pass that has just run, with the outputs `done`."""
        inputs = self._views("in", given)
        outputs = self._views("out", done)

        def recorded() -> Outputs:
            for buffer, out in zip(outputs, compute(*shape, *inputs), strict=True):
                buffer.copy_(out)
            return tuple(outputs)

        for buffer, tensor in zip(inputs, given, strict=True):
            buffer.copy_(tensor)
        try:
            self._found[key] = _Recorded(inputs, self._record(recorded))
        except RuntimeError as error:
            self.failure = str(error).split("\n", 1)[0]
            self.clear()
            _LOG.warning("no CUDA graphs can be recorded, so kernels are launched one by one: %s", self.failure)
            return
        while len(self._found) > _MAX_GRAPHS:
            self._found.popitem(last=False)

    def _views(self, role: str, like: Sequence[Tensor]) -> list[Tensor]:
        """Shared buffers shaped like these tensors; a recording keeps using buffers that larger ones have replaced."""
        views = []
        for number, tensor in enumerate(like):
            key = (role, number, tensor.dtype)
            if key not in self._buffers or self._buffers[key].numel() < tensor.numel():
                self._buffers[key] = tensor.new_zeros(tensor.numel())
            views.append(self._buffers[key][: tensor.numel()].view(tensor.shape))
        return views


def recurring_rows(cache: CacheColumns, rows: range, staged: int) -> RecurringRows | None:
    """The slots and columns of a pass that stages up to column `staged` behind `rows`; None if the cache lacks room.

    Slots beyond `rows` may hold other sequences. The pass stages behind their committed columns, which nobody reads.
    """
    slots = range(rows.start, min(rows.start + recurring(len(rows)), cache.slots))
    needed = cache.start(slots) + staged
    if needed > cache.capacity:
        slots = rows
        needed = cache.start(slots) + staged
    if needed > cache.capacity:
        return None
    blocks = -(-needed // _COLUMNS)
    step = max(1, 1 << max(0, (blocks - 1).bit_length() - 3))
    return RecurringRows(slots, min(cache.capacity, (blocks + -blocks % step) * _COLUMNS))


def filled_up(tensor: Tensor, *sizes: int) -> Tensor:
    """Pad the first dimensions of a tensor with zeros to `sizes`."""
    missing = [size - have for size, have in zip(sizes, tensor.shape, strict=False)]
    if not any(missing):
        return tensor
    pads = [0, 0] * (tensor.dim() - len(sizes))
    return F.pad(tensor, [*pads, *(number for more in reversed(missing) for number in (0, more))])
