"""Which requests can be sampled at all."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from eyas.errors import RequestError
from eyas.types import SamplingParams


def check_request(params: SamplingParams, prompt: Sequence[int], stops: Collection[int], vocab_size: int) -> None:
    """RequestError if a request names tokens the target doesn't have, or leaves it none to emit.

    `stops` are the request's stop ids and the target's. The target's may lie outside its vocabulary (some
    configs' do): they are never sampled.
    """
    if not prompt:
        raise RequestError("the prompt is empty: give it at least one token, such as the target's BOS token")
    named = {"prompt": prompt, "stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias}
    for name, ids in named.items():
        _check_ids(name, ids, vocab_size)
    for token, bias in params.logit_bias.items():
        if math.isnan(bias) or bias == math.inf:
            raise RequestError(f"logit_bias of token {token} is {bias}: use a finite number, or -inf to ban it")
    banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
    if params.min_tokens > 0:
        banned.update(token for token in stops if 0 <= token < vocab_size)
    if len(banned) >= vocab_size:
        raise RequestError("logit_bias and min_tokens rule out every token: leave at least one")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has token id {token}, outside the target's vocabulary of {vocab_size}: "
                "was it made with another tokenizer?"
            )
