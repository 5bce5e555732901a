"""What objects hold in memory, each part counted once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from eyas.bench.memory import held_bytes


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_tensors_count_with_their_storage_and_once() -> None:
    one = torch.zeros(1000)
    held = held_bytes(Holder(whole=one, part=one[:10], again=[one]))
    assert 4000 <= held < 8000
    assert held_bytes(Holder(network=nn.Linear(100, 100))) >= 4 * 10100


def test_what_another_holds_too_is_its_own() -> None:
    lent, table = torch.zeros(10000), {(n, n + 1): n for n in range(1000, 2000)}
    owner = Holder(embedding=lent, table=table)
    assert 50_000 < held_bytes(owner, besides=Holder(weights=[lent])) < held_bytes(owner) - 39_000
    assert held_bytes(owner, besides=[lent, table]) < 2000


def test_the_program_is_nobodys() -> None:
    assert held_bytes(Holder(code=held_bytes, room=torch, kind=Holder, method=Holder.__init__)) < 2000


def test_a_circle_ends() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert held_bytes(circle) > 0
