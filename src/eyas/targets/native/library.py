"""The native kernels, called through ctypes: a wheel's library for this kind of processor, or one compiled here, once.

Without a wheel or a compiler, or on a processor without AVX2, `kernels()` is None and everything runs as plain PyTorch.
A compiled library is kept in the user's cache directory under a hash of its sources, compiler and processor. If any of
them changes, it is compiled again, which takes up to half a minute.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from enum import IntEnum, IntFlag
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.cache.folder import made_in_cache
from eyas.files import writing_path
from eyas.machine import processor_flags, processor_model
from eyas.runtime import LOADING, WEIGHTS
from eyas.targets.native.abi import check_sizes, constant, described
from eyas.targets.native.builds import NATIVE_FLAGS, compile_library, compiler, is_whole, prebuilt, sources_hash

_LOG = logging.getLogger("eyas")
DISABLE = "EYAS_NATIVE"
"""The environment variable that turns the kernels off if it is 0."""
KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""Dtype of a prepacked weight -> its number in the kernels."""


class Microkernel(IntFlag):
    """What multiplies bfloat16 inputs, other than chains of fused multiply-adds."""

    PAIRS = 1
    """Two inputs at a time (`vdpbf16ps`), with the same sums. A linear instead has a bit for each number of tokens."""
    TILES = 1 << 32
    """32 inputs at a time (AMX), in their own order."""
    TILES_OF_VECTORS = 1 << 33
    """The sums of tiles, computed slowly without AMX: the reference for trials of tiles."""
    AS_FLOATS = 1 << 34
    """Slowly, without quantizing the inputs of packed weights: for trials of layers."""


@described("Linear")
class Linear(Structure):
    """A prepacked weight and its bias."""


class Activation(IntEnum):
    """The activation of an MLP, applied to the outputs of its gate (if it has one) and of `up`."""

    SILU = 0
    GELU = 1
    """In the tanh form."""
    CLIPPED = 2
    """gate * sigmoid(alpha * gate) * (up + 1), with both clipped (GPT-OSS)."""
    EXACT_GELU = 3
    """With the error function."""
    SQUARED_RELU = 4


@described("Gating")
class Gating(Structure):
    """How a gated MLP combines the outputs of its gate and of `up`: see `Gating` in kernels/abi.h."""


@described("Experts")
class Experts(Structure):
    """The experts of a layer, and the router that chooses among them."""

    @property
    def weights(self) -> int:
        """Number of weights that a token is multiplied by."""
        linears = [part[0] for part in (self.gate, self.up, self.down) if part] if self.count else []
        return int(self.chosen * sum(linear.out * linear.in_ for linear in linears))


_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("input_norm", "mlp_norm", "embedding_norm", "q_norm", "k_norm", "attention_out_norm", "mlp_out_norm")
"""A layer's norms, in the order of the kernels' `Layer`."""


@described("Latent")
class Latent(Structure):
    """The parts of latent attention other than the linears of a layer's input."""


@described("Recurrent")
class Recurrent(Structure):
    """A recurrence that mixes tokens, next to attention or in its place."""


@described("Layer")
class Layer(Structure):
    """A decoder layer: its linears, its norms, and which positions its tokens see."""

    @property
    def weights(self) -> int:
        """Number of weights that a token is multiplied by."""
        latent = self.latent.query, self.latent.absorb, self.latent.expand
        recurrent = *self.recurrent.inputs[: self.recurrent.count], self.recurrent.out
        linears = (*latent, *recurrent, *(getattr(self, name) for name in _LINEARS))
        return int(self.experts.weights + sum(linear.out * linear.in_ for linear in linears))


@described("Decoder")
class Decoder(Structure):
    """A decoder: its layers, sizes, embedding, final norm and head."""


class Mode(IntEnum):
    """What the tokens of a pass see, or that it only makes keys and values."""

    PATHS = 0
    """A token sees the committed columns and its own path."""
    BLOCKS = 1
    """A token sees the committed columns and all columns that the pass stages in its row."""
    CONTEXT = 2
    """Each layer only makes keys and values of the given states."""
    STAGING = 3
    """Like PATHS, but the last layer only makes keys and values, because nothing else is needed of these tokens."""


@described("RowStates")
class RowStates(Structure):
    """The committed and staged recurrent states of a pass's rows."""


@described("Fold")
class Fold(Structure):
    """Accepted guesses, the steps of which are repeated on the staged states."""


@described("Pass")
class NativePass(Structure):
    """One pass of a decoder over the slot cache."""


@described("Beam")
class Beam(Structure):
    """A beam search and the buffers for its candidates."""


@described("SuffixSearch")
class SuffixSearch(Structure):
    """A search for what followed a text's last tokens, and the buffers for the draft."""


class Kernels:
    """The functions of a compiled library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        check_sizes(_function(library.eyas_sizes, (c_void_p,), c_int64))
        self.name = path.stem
        self.lanes: int = _function(library.eyas_lanes, (), c_int64)()
        self.microkernels = Microkernel(_function(library.eyas_microkernels, (), c_int64)())
        """What can multiply bfloat16 inputs here, apart from chains."""
        self.vnni = bool(_function(library.eyas_vnni, (), c_int64)())
        """Whether they multiply codes with VNNI, not in two steps."""
        self._pack = _function(library.eyas_pack, (c_void_p, *(c_int64,) * 3, c_void_p, c_int64))
        self._pack_blocks = _function(
            library.eyas_pack_blocks, (c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64), c_int64
        )
        self._narrow = _function(library.eyas_narrow, (POINTER(Linear), c_void_p, c_int64))
        self._unpack = _function(library.eyas_unpack, (c_void_p, *(c_int64,) * 3, c_void_p, c_int64))
        self.rows = _function(library.eyas_rows, (c_void_p, *(c_int64,) * 2, c_void_p, c_int64, c_void_p, c_int64))
        self.linear = _function(library.eyas_linear, (POINTER(Linear), c_void_p, c_int64, c_void_p, c_int64, c_int64))
        self.experts = _function(
            library.eyas_experts,
            (POINTER(Experts), c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
        )
        self.attention = _function(
            library.eyas_attention,
            (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64),
        )
        self.guess = _function(
            library.eyas_guess,
            (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        )
        self.best = _function(library.eyas_best, (c_void_p, c_int64, c_int64), c_int64)
        self.draw = _function(
            library.eyas_draw, (c_void_p, c_int64, c_int64, c_float, c_float, c_int64, c_int64, c_int64), c_int64
        )
        self.gumbel = _function(
            library.eyas_gumbel, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64)
        )
        self.token_scratch = _function(library.eyas_token_scratch, (POINTER(Decoder),), c_int64)
        self.row_size = _function(library.eyas_row_size, (POINTER(Decoder),), c_int64)
        self.fold = _function(library.eyas_fold, (POINTER(Decoder), POINTER(Fold)))
        self.decoder = _function(library.eyas_decoder, (POINTER(Decoder), POINTER(NativePass)), c_int64)
        self.beam = _function(library.eyas_beam, (POINTER(Decoder), POINTER(NativePass), POINTER(Beam)), c_int64)
        self.suffix = _function(library.eyas_suffix, (POINTER(SuffixSearch),), c_int64)

    def pack(self, weight: Tensor) -> Tensor:
        """Convert a weight [out, in] to panels of 16 outputs, [panels, in, 16], in its own dtype."""
        weight = weight.detach().contiguous()
        prepacked = WEIGHTS.zeros((-(-weight.shape[0] // PANEL), weight.shape[1], PANEL), weight.dtype, weight.device)
        self._pack(weight.data_ptr(), *weight.shape, KINDS[weight.dtype], prepacked.data_ptr(), torch.get_num_threads())
        return prepacked

    def pack_blocks(self, ggml_type: int, addresses: Tensor, blocks: int, panels: Tensor) -> None:
        """Read rows of `blocks` blocks of 32 inputs in a GGML type, at these `addresses` [out], into `panels`."""
        given = addresses.contiguous()
        known = self._pack_blocks(
            ggml_type, given.data_ptr(), len(given), blocks, panels.data_ptr(), torch.get_num_threads()
        )
        assert known, ggml_type

    def narrow(self, linear: Linear, panels: Tensor) -> None:
        """Quantize a packed weight to signed 4-bit codes, as GGML's Q4_0 does, into `panels` [P, bytes]."""
        self._narrow(linear, panels.data_ptr(), torch.get_num_threads())

    def unpack(self, prepacked: Tensor, out: int) -> Tensor:
        """Convert a prepacked weight back to [out, in]."""
        weight = torch.empty(out, prepacked.shape[1], dtype=prepacked.dtype)
        self._unpack(
            prepacked.data_ptr(), *weight.shape, KINDS[prepacked.dtype], weight.data_ptr(), torch.get_num_threads()
        )
        return weight


PANEL = constant("PANEL")
"""Outputs per panel; sizes of states must be multiples of it."""
MAX_TOKENS_PER_PRODUCT = 12
"""Maximum number of tokens that are multiplied together."""
MAX_ROTATED = constant("MAX_ROTATED")
"""Maximum number of features that RoPE rotates in latent attention."""
MAX_TAPS = constant("MAX_TAPS")
"""Largest kernel size of a convolution, in tokens."""


def _function(function: Any, arguments: Sequence[Any], result: Any = None) -> Any:
    function.argtypes = list(arguments)
    function.restype = result
    return function


@cache
def kernels() -> Kernels | None:
    """The kernels for this machine, compiled at the first call if necessary; None if there are none."""
    if os.environ.get(DISABLE) == "0":
        return None
    flags = processor_flags()
    if not {"avx2", "fma", "f16c"} <= flags:
        return None
    if (shipped := prebuilt(flags, processor_model())) is not None:
        return Kernels(shipped)
    found = compiler()
    if found is None:
        _LOG.info("no C++ compiler was found, so the CPU runs PyTorch's kernels: install g++ to decode faster")
        return None
    try:
        return Kernels(made_in_cache("native", partial(_compiled, found, flags)))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", b"") or b""
        _LOG.warning(
            "the native kernels can't be compiled here, so the CPU runs PyTorch's: %s %s",
            error,
            output.decode(errors="replace")[-500:],
        )
        return None


def loaded_kernels() -> Kernels:
    """The kernels. Raises RuntimeError if there are none."""
    found = kernels()
    if found is None:
        raise RuntimeError("there are no native kernels on this machine")
    return found


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's values as the kernels take it; None is null."""
    return None if tensor is None else tensor.data_ptr()


def _compiled(compiler: str, flags: frozenset[str], folder: Path) -> Path:
    """The library's file in a `folder`, compiled unless it is there and undamaged."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    parts = (sources_hash(), " ".join(sorted(flags)), " ".join(NATIVE_FLAGS), torch.__version__)
    name = hashlib.sha256(b"\0".join([version, *(part.encode() for part in parts)])).hexdigest()[:16]
    path = folder / f"kernels-{name}.so"
    if path.exists():
        if is_whole(path):
            return path
        _LOG.warning("the native kernels in %s are damaged or of an earlier version: they are compiled again", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_path(path) as made:
        LOADING.info("compiling the native kernels, which takes about a minute, kept in %s", path)
        compile_library(compiler, NATIVE_FLAGS, made)
    return path
