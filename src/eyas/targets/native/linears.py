"""Linear layers that run on the native kernels, with float32 and bfloat16 weights.

Every output is summed over the inputs in a fixed order, in float32, whatever else is in the pass. So a token's result
is bit-identical alone and in a batch, in a plain pass and in a tree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.linears import PrepackedLinear
from eyas.targets.native.library import KINDS, PANEL, Linear, address, loaded_kernels
from eyas.targets.native.microkernels import chosen_microkernels
from eyas.targets.native.ops import multiplied


def as_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with a weight [out, in] and a bias [out], or with concatenated stacks [E, ...] of them."""
    rows = weight.detach().reshape(-1, weight.shape[-1])
    linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(rows, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().flatten(), requires_grad=False)
    return linear


class NativeLinear(PrepackedLinear):
    """A frozen replacement for `nn.Linear` with its weight in panels of 16 outputs."""

    def _pack(self, weight: Tensor) -> Tensor:
        self._widen_bias()
        return loaded_kernels().pack(weight)

    def _widen_bias(self) -> None:
        self._wide_bias = None if self.bias is None else self.bias.float().contiguous()

    def exact(self) -> Tensor:
        """The row-major weight [out, in] by which this layer multiplies, in a dtype that rounds it at most once."""
        return loaded_kernels().unpack(self._prepacked, self.out_features)

    def restored(self) -> Tensor:
        return self.exact().to(self._dtype)

    def rows(self, first: int, outputs: int) -> Linear:
        """Some outputs of this layer as the kernels take them; valid as long as this module lives.

        If its inputs aren't bfloat16 values, `microkernels` must be set to 0. Raises UnsupportedModelError if the first
        output doesn't begin a panel.
        """
        return self.struct(first, outputs, self._microkernels_for(torch.bfloat16))

    def _microkernels_for(self, inputs: torch.dtype) -> int:
        """How inputs of a dtype are multiplied, as the kernels take it."""
        return chosen_microkernels() if inputs == self._prepacked.dtype == torch.bfloat16 else 0

    @property
    def kind(self) -> int:
        """The kernels' number for this kind of weights."""
        return KINDS[self._prepacked.dtype]

    def struct(self, first: int, outputs: int, microkernels: int) -> Linear:
        """As `rows`, multiplied by the given `microkernels`."""
        if first % PANEL:
            raise UnsupportedModelError(f"output {first} doesn't begin a panel of {PANEL}")
        # no tensor operations here
        weight = self._prepacked
        bias = address(self._wide_bias)
        return Linear(
            weight.data_ptr() + first // PANEL * weight.stride(0) * weight.element_size(),
            bias and bias + 4 * first,
            outputs,
            self.in_features,
            self.kind,
            microkernels,
        )

    def multiply(self, x: Tensor) -> Tensor:
        return self.product(x, self._dtype == torch.bfloat16).to(self._dtype).view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor, rounds: bool) -> Tensor:
        """Multiply x [..., in] -> [T, out] in float32; `rounds`: round the result to bfloat16."""
        return multiplied(self.struct(0, self.out_features, self._microkernels_for(x.dtype)), x, rounds)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:  # noqa: ARG002  # it has no children
        if fn(torch.empty(0)).device.type != "cpu" or fn(torch.empty(0, dtype=self._dtype)).dtype != self._dtype:
            raise RuntimeError("prepacked weights can't be moved or cast: load the model with that device or dtype")
        return self
