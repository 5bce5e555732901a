"""Training-time test against decoding: row t of all steps is the chain of guesses from t."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.eagle3 import Eagle3Config, Eagle3Network
from eyas.train import ttt

STEPS = 4


def tiny(**toggles: object) -> Eagle3Network:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 40, "draft_vocab_size": 20,
        "target_hidden_size": 10, "num_aux_hidden_states": 3,
    }  # fmt: skip
    module = Eagle3Network(Eagle3Config.model_validate(sizes | toggles)).double()
    for parameter in module.parameters():  # norms start at one and would hide a missing scale
        torch.nn.init.normal_(parameter, mean=0.5 if parameter.ndim == 1 else 0.0, std=0.5)
    return module


def chain(module: Eagle3Network, tokens: Tensor, taps: Tensor, row: int) -> list[Tensor]:
    """Decode as the engine does: commit pairs 0..row, then feed guesses one by one to a growing cache."""
    layers = module.config.num_hidden_layers
    cache: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * layers

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(cache[layer][0]):
            k, v = (torch.cat(pair, dim=2) for pair in zip(cache[layer], (k, v), strict=True))
        cache[layer] = (k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)

    hidden, normed = module.step(
        tokens[:, 1 : row + 2], module.fuse(taps[:, : row + 1]), torch.arange(row + 1)[None], attend
    )
    hidden, found = hidden[:, -1:], [normed[0, -1]]
    for step in range(1, STEPS):
        token = tokens[:, row + 1 + step : row + 2 + step]
        hidden, normed = module.step(token, hidden, torch.tensor([[row + step]]), attend)
        found.append(normed[0, -1])
    return found


@pytest.mark.parametrize(
    "toggles",
    [{}, {"norm_output": True, "fc_norm": True}, {"num_hidden_layers": 2}, {"norm_before_residual": True}],
)
@pytest.mark.parametrize("block", [3, 128])
def test_every_row_is_the_chain_decoding_would_make(
    toggles: dict[str, object], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttt, "BLOCK", block)
    module = tiny(**toggles)
    tokens, taps = torch.randint(40, (1, 12)), torch.randn(1, 12, 3, 10, dtype=torch.float64)
    states = list(ttt.unrolled(module, tokens, taps, STEPS))
    for row in range(12 - STEPS):
        for step, expected in enumerate(chain(module, tokens, taps, row)):
            torch.testing.assert_close(states[step][0, row], expected, rtol=1e-9, atol=1e-9)


def test_gradients_flow_through_the_whole_chain() -> None:
    """The last state's gradient, by way of its own guesses, is that of the chain written out."""
    module = tiny()
    tokens, taps = torch.randint(40, (1, 10)), torch.randn(1, 10, 3, 10, dtype=torch.float64)
    weight = module.fc.weight
    states = list(ttt.unrolled(module, tokens, taps, STEPS))
    (ours,) = torch.autograd.grad(states[-1][0, 5].sum(), weight)
    (theirs,) = torch.autograd.grad(chain(module, tokens, taps, 5)[-1].sum(), weight)
    torch.testing.assert_close(ours, theirs)
    assert ours.abs().sum() > 0


def test_rows_of_a_batch_and_padding_do_not_mix() -> None:
    module = tiny()
    tokens, taps = torch.randint(40, (2, 9)), torch.randn(2, 9, 3, 10, dtype=torch.float64)
    whole = list(ttt.unrolled(module, tokens, taps, STEPS))
    changed_tokens, changed_taps = tokens.clone(), taps.clone()
    changed_tokens[1], changed_taps[1] = 0, 0.0
    changed_tokens[0, 8], changed_taps[0, 7:] = 0, 9.0
    again = list(ttt.unrolled(module, changed_tokens, changed_taps, STEPS))
    for step in range(STEPS):
        torch.testing.assert_close(again[step][0, : 7 - step], whole[step][0, : 7 - step])
