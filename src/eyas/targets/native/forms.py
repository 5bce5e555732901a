"""What small modules compute, found by trials: norms, routers and activations, which model families write differently.

Shapes: T tokens, E experts, K of them chosen per token, n features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.native.library import KINDS, PANEL, Activation

_MIN_AGREEMENT = 0.8
"""Share of tokens for which a router's form must choose the same experts: ties may choose others."""
_MAX_GROUPS = 64


class NormForm(NamedTuple):
    """What a norm computes, found by a trial: an RMSNorm, which families write in several ways, or a LayerNorm."""

    factors: Tensor  # [n] float32; Gemma's weights are these minus 1
    eps: float
    rounds_twice: bool = False
    """Whether the normed values are rounded before they are multiplied (Llama), or only after (Gemma, OLMo)."""
    shift: Tensor | None = None  # [n] float32, added by a LayerNorm, which first subtracts the mean; None = an RMSNorm

    @property
    def width(self) -> int:
        """Number of features that are normed together."""
        return len(self.factors)

    @property
    def values(self) -> Tensor:
        """The factors, followed by the shift (if any)."""
        return self.factors if self.shift is None else torch.cat((self.factors, self.shift))

    @staticmethod
    @torch.inference_mode()
    def of(norm: nn.Module, dtype: torch.dtype) -> NormForm:
        """The form of a norm. Raises UnsupportedModelError for norms of another form."""
        weight = getattr(norm, "weight", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
            raise UnsupportedModelError(f"{type(norm).__name__} is neither an RMSNorm nor a LayerNorm")
        bias = getattr(norm, "bias", None)
        factors = weight.detach().float()
        shift = torch.zeros_like(factors) if bias is None else bias.detach().float()
        forms = [NormForm(each, eps, twice) for each in (factors, 1 + factors) for twice in (True, False)]
        x = torch.linspace(-3, 5, 4 * len(weight)).view(4, -1).cos().to(weight.device, dtype)
        wanted = norm(x)
        found = []
        for form in (*forms, NormForm(factors, eps, False, shift)):
            made = form._norm(x)
            near = 1e-8 if form.shift is None else 1e-5  # the shift may nearly cancel the rest
            if torch.allclose(made, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=near):
                found.append((int((made != wanted).sum()), not form.rounds_twice, form))
        if not found:
            raise UnsupportedModelError(f"{type(norm).__name__} is neither an RMSNorm nor a LayerNorm")
        return min(found, key=lambda each: each[:2])[2]

    def _norm(self, x: Tensor) -> Tensor:
        """Apply a norm of this form to states x [T, n], in their dtype."""
        wide = x.float() if self.shift is None else x.float() - x.float().mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.rounds_twice:
            return normed.to(x.dtype) * self.factors.to(x.dtype)
        return (normed * self.factors + (0.0 if self.shift is None else self.shift)).to(x.dtype)


class ExpertsForm(NamedTuple):
    """Stacked MLPs and their activation."""

    gate_up: Tensor  # [E, 2 I, H] each expert's rows of the gate, then of `up`; [E, I, H] without gates
    down: Tensor  # [E, H, I]
    gate_up_bias: Tensor | None  # [E, 2 I]
    down_bias: Tensor | None  # [E, H]
    activation: Activation
    alpha: float = 0.0
    limit: float = 0.0
    """See `Gating` in `kernels/abi.h`."""

    @property
    def gated(self) -> bool:
        """Whether each expert has a gate in addition to `up`."""
        return self.gate_up.shape[1] == 2 * self.down.shape[2]

    @staticmethod
    def of(experts: Any, dtype: torch.dtype) -> ExpertsForm:
        """Find the form from a module's parameters. Raises UnsupportedModelError unless they are stacks in `dtype`.

        Stacks with biases are taken for GPT-OSS's: weights are transposed, and rows of gate and `up` alternate.
        """
        weights = dict(experts.named_parameters())
        name = type(experts).__name__
        first = "gate_up_proj" if "gate_up_proj" in weights else "up_proj"
        stacks, biases = {first, "down_proj"}, {"gate_up_proj_bias", "down_proj_bias"}
        biased = set(weights) == stacks | biases
        if not (biased or set(weights) == stacks) or any(True for _ in experts.buffers()):
            raise UnsupportedModelError(f"{name} has parameters other than stacked weights")
        if any(type(weight.data) is not Tensor or weight.dtype != dtype for weight in weights.values()):
            raise UnsupportedModelError(f"the weights of {name} aren't {dtype}")
        both = weights[first].detach()
        down = weights["down_proj"].detach()
        if biased:
            halves = [(weight[..., ::2], weight[..., 1::2]) for weight in (both, weights["gate_up_proj_bias"].detach())]
            both, of_both = (torch.cat(pair, dim=-1) for pair in halves)
            form = ExpertsForm(
                both.transpose(1, 2).contiguous(),
                down.transpose(1, 2).contiguous(),
                of_both,
                weights["down_proj_bias"].detach(),
                Activation.CLIPPED,
                float(experts.alpha),
                float(experts.limit),
            )
        else:
            form = ExpertsForm(both, down, None, None, activation_of(experts.act_fn))
        if form.down.dim() != 3:
            raise UnsupportedModelError(f"the weights of {name} don't have the shapes of stacked MLPs")
        count, hidden, size = form.down.shape
        inner = 2 * size if first == "gate_up_proj" else size
        if form.gate_up.shape != (count, inner, hidden) or size % PANEL or hidden % PANEL:
            raise UnsupportedModelError(f"the weights of {name} aren't stacked MLPs in whole panels")
        return form


class RouterForm(NamedTuple):
    """How a router scores experts by a product, and weights the experts that it chooses."""

    weight: Tensor  # [E, H]
    offset: Tensor | None  # [E] added to the products
    bias: Tensor | None  # [E] float32, added to the scores only to choose experts
    chosen: int
    """K."""
    sigmoid: bool
    """Whether the scores are sigmoids, not a softmax."""
    renormalized: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float
    """Factor of the weights."""
    rounds_scores: bool
    """Whether the products are rounded to bfloat16."""
    rounds_weights: bool
    """Whether the weights, and the outputs that they weight, are rounded to bfloat16."""
    groups: int = 1
    groups_used: int = 1
    """Number of groups from which a token's experts are chosen."""
    summed: int = 1
    """Number of a group's best scores that are summed to the group's score."""

    @staticmethod
    @torch.inference_mode()
    def of(router: Any, dtype: torch.dtype) -> RouterForm:
        """The form of a router. Raises UnsupportedModelError for routers that do anything else."""
        weight = getattr(router, "weight", None)
        name = type(router).__name__
        if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype not in KINDS:
            raise UnsupportedModelError(f"{name} doesn't score experts by one weight")
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(0))
        x = (2 * x / weight.float().norm(dim=1).mean()).to(dtype)  # scores that softmax and sigmoid keep distinct
        try:
            made = router(x)
        except TypeError as error:  # it takes more arguments than states
            raise UnsupportedModelError(f"{name} can't be tried: {error}") from error
        if not isinstance(made, tuple) or [part.dim() for part in made] != [2, 2, 2]:
            raise UnsupportedModelError(f"{name} doesn't return scores, weights and indices")
        scores, weights, ids = made
        offset = getattr(router, "bias", None)
        rounded = dtype == torch.bfloat16 and scores.equal(scores.bfloat16().to(scores.dtype))
        products = x.float() @ weight.float().T
        close = 1e-2 if rounded else 1e-5
        products = products if offset is None else products + offset.float()
        if scores.shape != products.shape or not _close(scores.float(), products, close):
            raise UnsupportedModelError(f"{name} scores experts by more than a product")
        bias = getattr(getattr(router, "moe_statics", router), "e_score_correction_bias", None)
        form = RouterForm(
            weight.detach(),
            offset,
            None if bias is None else bias.detach().float().flatten().contiguous(),
            ids.shape[1],
            False,
            False,
            float(getattr(router, "routed_scaling_factor", 1.0)),
            rounded,
            weights.dtype == torch.bfloat16,
        )
        best = _MIN_AGREEMENT
        found = None
        for grouped, sigmoid, renormalized in product(form._grouped(router), (False, True), (False, True)):
            tried = grouped._replace(sigmoid=sigmoid, renormalized=renormalized)
            share = tried._agreement(scores.float(), weights.float(), ids)
            if share > best:
                best, found = share, tried
        if found is None:
            raise UnsupportedModelError(f"{name} chooses or weights experts in another way")
        return found

    def _grouped(self, router: Any) -> list[RouterForm]:
        """The form without groups of experts, and the forms with the groups that the router names."""
        groups, used = (getattr(router, name, None) or 1 for name in ("num_group", "topk_group"))
        size = len(self.weight) // groups
        if not 1 < groups <= _MAX_GROUPS or len(self.weight) % groups or used * size < self.chosen:
            return [self]
        with_groups = [self._replace(groups=groups, groups_used=used, summed=n) for n in (1, 2) if n <= size]
        return [self, *with_groups]

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices [T, K] of the experts chosen by scores [T, E]; of equal scores, the first."""
        shares = scores.sigmoid() if self.sigmoid else scores.softmax(1)
        valued = shares if self.bias is None else shares + self.bias
        if self.groups > 1:
            by_group = valued.view(len(valued), self.groups, -1)  # [T, groups, E / groups]
            sums = by_group.topk(self.summed, dim=2).values.sum(2)
            order = sums.sort(dim=1, descending=True, stable=True).indices
            unused = torch.ones_like(sums, dtype=torch.bool).scatter(1, order[:, : self.groups_used], False)
            valued = by_group.masked_fill(unused.unsqueeze(2), float("-inf")).flatten(1)
        ids = valued.sort(dim=1, descending=True, stable=True).indices[:, : self.chosen]
        weights = shares.gather(1, ids)
        if self.renormalized:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return weights * self.scale, ids

    def _agreement(self, scores: Tensor, weights: Tensor, ids: Tensor) -> float:
        """Share of tokens with scores [T, E] for which this form chooses `ids` [T, K]; 0 if its weights differ."""
        made, found = self.choose(scores)
        same = (found.sort(1).values == ids.sort(1).values).all(1)
        share = float(same.float().mean())
        if share <= _MIN_AGREEMENT:
            return 0.0
        close = 1e-2 if self.rounds_weights else 1e-5
        return share if _close(made.sort(1).values[same], weights.sort(1).values[same], close) else 0.0


def _close(found: Tensor, expected: Tensor, share: float) -> bool:
    """Whether two tensors differ by at most this share of the greatest value."""
    return bool((found - expected).abs().max() <= share * expected.abs().max())


def activation_of(activation: Callable[[Tensor], Tensor]) -> Activation:
    """Identify an activation. Raises UnsupportedModelError for one that the kernels don't have."""
    x = torch.linspace(-4, 4, 9)
    forms: dict[Activation, Callable[[Tensor], Tensor]] = {
        Activation.SILU: nn.functional.silu,
        Activation.GELU: partial(nn.functional.gelu, approximate="tanh"),
        Activation.EXACT_GELU: nn.functional.gelu,
        Activation.SQUARED_RELU: lambda x: nn.functional.relu(x).square(),
    }
    made = activation(x)
    for name, form in forms.items():
        if torch.allclose(made, form(x), atol=1e-5):
            return name
    raise UnsupportedModelError("the MLP's activation isn't SiLU, GELU or squared ReLU")
