"""The ends of a target: its sizes, embedding, final norm and head, without a pass over its layers.

Training from a store and export need no more of a target, and a model of one layer has it all. Shapes: N states, Ht
hidden size, V vocabulary, Vd tokens of a draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.architecture import (
    context_limit,
    decoder_layers,
    logit_finish,
    refuse_unsupported,
    refused_where_it_fails,
)
from eyas.targets.native.linears import NativeLinear
from eyas.targets.taps import check_boundaries


class EmbeddingAndHead:
    """A transformers model's sizes and limits, embedding and head; a `Target` has passes besides.

    Raises UnsupportedModelError for models that can't be targets.
    """

    head_is_exact: bool
    """Whether `head` gives the model's own logits."""

    def __init__(self, model: Any, config: Any = None) -> None:
        """`config` describes the whole model, of which `model` may have the first layers only; None: it is whole."""
        refuse_unsupported(type(model), model.config)
        own = model.config.get_text_config()
        self.model = model
        self.config = own if config is None else config.get_text_config()
        head = model.get_output_embeddings()
        self.vocab_size: int = getattr(head, "out_features", None) or head.weight.shape[0]
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.max_length = context_limit(self.config)
        self.layers = decoder_layers(model, own.num_hidden_layers)
        self.finish = logit_finish(self.config)
        """What the model does to its head's product: nothing, a scale, a soft cap."""
        self._odd_taps: Mapping[int, list[int]] = {}

    @classmethod
    def alone(cls, model: Any, config: Any) -> EmbeddingAndHead:
        """The ends of a model that `config` describes, from one with its first layer only."""
        made = cls(model, config)
        with refused_where_it_fails(model), torch.inference_mode():
            token = made.an_ordinary_token()
            logits = model(input_ids=token, use_cache=False).logits
            made.head_is_exact = made._gives(model.base_model(input_ids=token, use_cache=False)[0], logits)
        return made

    def an_ordinary_token(self, rows: int = 1) -> Tensor:
        """Token ids [rows, 1] to try a model with: a padding token's state is all zeros, as are its logits."""
        return torch.full((rows, 1), self.vocab_size // 2, device=self.device)

    def _gives(self, final: Tensor, logits: Tensor) -> bool:
        """Whether `head` computes these `logits` of the `final` states."""
        head = self.finish(self.model.get_output_embeddings()(final))
        return torch.allclose(head.float(), logits.float(), rtol=1e-3, atol=1e-4)

    @property
    def final_boundary(self) -> int:
        """The tap boundary after the final norm, n + 1: what the head reads."""
        return self.num_layers + 1

    def head(self, final: Tensor, rows: nn.Module | None = None) -> Tensor:
        """Compute logits [..., V] of final hidden states [..., Ht]; gradients flow to the states.

        `rows` are what `head_rows` made: logits of those tokens only. Raises UnsupportedModelError if the model does
        more to its logits (`head_is_exact` is False).
        """
        if not self.head_is_exact:
            raise UnsupportedModelError(
                f"{self.config.model_type} changes its logits in a way that eyas doesn't know, so they can't be "
                "recomputed from stored states for training; decoding is not affected"
            )
        head = self.model.get_output_embeddings() if rows is None else rows
        out: Tensor = self.finish(head(final.to(self.dtype)))
        return out

    @property
    def head_is_linear(self) -> bool:
        """Whether logits are the head's product and nothing else."""
        return self.head_is_exact and isinstance(self.finish, nn.Identity)

    def head_rows(self, ids: Tensor) -> nn.Module:
        """A copy of the head for the tokens `ids` [Vd] only."""
        whole = self.model.get_output_embeddings()
        ids = ids.to(self.device)
        rows = nn.Linear(whole.in_features, len(ids), bias=whole.bias is not None, device="meta")
        rows.weight = nn.Parameter(whole.weight.detach()[ids], requires_grad=False)
        if whole.bias is not None:
            rows.bias = nn.Parameter(whole.bias.detach()[ids], requires_grad=False)
        return NativeLinear(rows, False) if isinstance(whole, NativeLinear) else rows

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raise RequestError for boundaries that don't exist or repeat, UnsupportedModelError for unreadable ones."""
        check_boundaries(taps, self.final_boundary, self._odd_taps)


class FinalNorm:
    """What a model does after its layers, for states that another engine's layers have computed.

    It is the model's own pass with its layers left out, so that nothing here knows how models name their last norm.
    Raises UnsupportedModelError for a model whose final states are not those of its last layer, normed.
    """

    def __init__(self, target: EmbeddingAndHead) -> None:
        self.target, outputs = target, list[Any]()
        self._pass, self._layer = _without_layers(target.model.base_model, target.layers)
        handle = target.layers[-1].register_forward_hook(lambda _module, _args, output: outputs.append(output))
        try:
            with torch.no_grad():
                expected = target.model.base_model(input_ids=target.an_ordinary_token(), use_cache=False)[0][0]
        finally:
            handle.remove()
        self._layer.wraps = not isinstance(outputs[-1], Tensor)
        leaving = outputs[-1][0] if self._layer.wraps else outputs[-1]
        if leaving.shape != (1, 1, target.hidden_size) or not torch.allclose(self(leaving[0]), expected):
            raise UnsupportedModelError(
                f"{target.config.model_type} does more to its last layer's states than to norm them: capture with "
                "eyas's own pass (leave out --engine)"
            )

    @torch.no_grad()
    def __call__(self, leaving: Tensor) -> Tensor:
        """The final states [N, Ht] of the states [N, Ht] that leave the last layer."""
        self._layer.states = leaving.to(self.target.device, self.target.dtype).unsqueeze(1)  # [N, 1, Ht]
        final: Tensor = self._pass(input_ids=self.target.an_ordinary_token(len(leaving)), use_cache=False)[0]
        return final[:, 0]


class _GivenStates(nn.Module):
    """In place of a layer: it puts out `states`, whatever it is given, and has the layer's attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.states: Tensor | None = None
        self.wraps = False
        """Whether layers put out a tuple."""

    def forward(self, *_args: Any, **_options: Any) -> Any:
        """The states [N, 1, Ht]."""
        return (self.states,) if self.wraps else self.states

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("layer", "states") else getattr(self.layer, name)


def _without_layers(model: nn.Module, layers: nn.ModuleList) -> tuple[nn.Module, _GivenStates]:
    """A copy of a model that shares all of it but its `layers`, and what is in place of these."""
    given = _GivenStates(layers[-1])
    *path, name = next(found for found, module in model.named_modules() if module is layers).split(".")
    shell = inner = _shared_copy(model)
    for part in path:
        inner._modules[part] = inner = _shared_copy(inner._modules[part])
    inner._modules[name] = nn.ModuleList([given])
    return shell, given


def _shared_copy(module: Any) -> Any:
    """The same module, whose parts can be replaced without changing the original's."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
