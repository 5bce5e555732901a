"""fp8 keeps what its docstring promises, other encodings keep everything, and masks come back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.store.layout import decode_states, encode_states, pack_mask, unpack_mask
from eyas.errors import StoreError


@given(st.integers(0, 2**32 - 1), st.floats(-30, 30), st.floats(0, 12))
def test_fp8_error_is_bounded_for_every_value(seed: int, magnitude: float, spread: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.rand(4, 3, 16, generator=draw) * spread
    states = torch.randn(4, 3, 16, generator=draw) * 2.0 ** (magnitude - sizes)
    states[0, 0] = 0
    encoded = encode_states(states, "fp8")
    assert encoded.exponents is not None
    assert encoded.exponents.shape == (4, 3)
    scale = torch.exp2(encoded.exponents.float()).unsqueeze(-1)
    error = (decode_states(encoded, torch.float32) - states).abs()
    assert (error <= torch.maximum(states.abs() * 2**-4, scale * 2**-10)).all()
    top = encoded.values.float().abs().amax(-1).flatten()[1:]
    assert ((top >= 224) & (top <= 448)).all()


def test_fp8_uses_its_bound() -> None:
    """Half a step of a 3-bit mantissa is really lost, so the bound above isn't idle."""
    states = torch.tensor([[1.0, 1.0625, 256.0]])
    assert decode_states(encode_states(states, "fp8"), torch.float32).tolist() == [[1.0, 1.0, 256.0]]


@pytest.mark.parametrize(("encoding", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_others_keep_every_bit(encoding: str, dtype: torch.dtype) -> None:
    states = torch.randn(5, 7).to(dtype)
    assert torch.equal(decode_states(encode_states(states, encoding), dtype), states)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_states_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(StoreError, match="states overflow"):
        encode_states(torch.tensor([[1.0, bad]], dtype=torch.float16), "bf16")


@given(st.lists(st.booleans(), max_size=40))
def test_masks_come_back(bits: list[bool]) -> None:
    mask = np.array(bits, dtype=np.bool_)
    encoded = pack_mask(mask)
    assert len(encoded) == -(-len(bits) // 8)
    assert unpack_mask(encoded, len(bits)).tolist() == bits
