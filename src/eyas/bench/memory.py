"""What an object holds in memory: the bytes of its tensors, arrays and Python objects, found by following references.

So every method is measured alike, whether it keeps weights, a cache, or tables of n-grams.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import torch

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
"""What belongs to the program, not to an object of it."""


def held_bytes(owner: object, besides: object = None) -> int:
    """The bytes of all that `owner` refers to, each counted once, without what `besides` refers to as well.

    A tensor counts with its whole storage, of which it may be a part.
    """
    shared = dict(_holdings(besides))
    return sum(size for key, size in dict(_holdings(owner)).items() if key not in shared)


def _holdings(root: object) -> Iterator[tuple[tuple[str, int], int]]:
    """What can be reached from an object: where each part lies, and its size."""
    seen, waiting = set[int](), [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, _CODE):
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            yield (str(storage.device), storage.data_ptr()), storage.nbytes()
        else:
            yield ("object", id(found)), sys.getsizeof(found)
            waiting += gc.get_referents(found)
