"""Faulty copies of the demo drafter, each with a fault that occurs in practice and raises no error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.drafters.checkpoint import WEIGHTS, write_directory
from eyas.drafters.files import CONFIG, read_json
from eyas.drafters.formats.taps import IDS

from ..toy.pair import TOY_DRAFTER

Files = tuple[dict[str, Any], dict[str, Tensor]]
SIZE = 256  # of the target's states


def write(path: Path, *faults: Callable[[Files], Files]) -> Path:
    """Write the demo drafter with these faults, without the provenance that would reveal some of them."""
    files: Files = (read_json(Path(TOY_DRAFTER) / CONFIG), load_file(Path(TOY_DRAFTER) / WEIGHTS))
    del files[0]["eyas"]
    for fault in faults:
        files = fault(files)
    write_directory(path, *files)
    return path


def taps(*ids: int) -> Callable[[Files], Files]:
    """Config keys with other layer numbers."""

    def fault(files: Files) -> Files:
        return files[0] | {IDS: list(ids), "eagle_config": {IDS: list(ids)}}, files[1]

    return fault


def setting(**values: Any) -> Callable[[Files], Files]:
    """Config keys with other values."""
    return lambda files: (files[0] | values, files[1])


def scaled_rope(files: Files) -> Files:
    """The scaling of a long-context target, which the drafter was trained without."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    return files[0] | {"rope_parameters": rope, "rope_theta": 10000.0}, files[1]


def fc_reversed(files: Files) -> Files:
    """The taps concatenated from the last to the first."""
    blocks = files[1]["fc.weight"].split(SIZE, 1)
    return files[0], files[1] | {"fc.weight": torch.cat(blocks[::-1], 1)}


def ids_for_offsets(files: Files) -> Files:
    """A vocabulary map of target ids, few enough that they are also valid as offsets."""
    config, tensors = files
    count = 1024
    ids = tensors["d2t"][:count] + torch.arange(count)
    covered = torch.zeros(config["vocab_size"], dtype=torch.bool)
    covered[ids + torch.arange(count)] = True  # derived from the same misunderstanding
    head = tensors["lm_head.weight"][:count].clone()
    return config | {"draft_vocab_size": count}, tensors | {"d2t": ids, "t2d": covered, "lm_head.weight": head}


def embedding_lost(files: Files) -> Files:
    """An embedding that should have been shared, saved as initialized."""
    lost = files[1]["embed_tokens.weight"]
    fresh = 0.02 * torch.randn(lost.shape, generator=torch.Generator().manual_seed(1))
    return files[0], files[1] | {"embed_tokens.weight": fresh.to(lost.dtype)}


def rows_permuted(files: Files) -> Files:
    """Query and key rows in llama.cpp's order."""
    from eyas.drafters.formats.gguf_layout import to_interleaved

    names = {"midlayer.self_attn.q_proj.weight": 4, "midlayer.self_attn.k_proj.weight": 2}
    return files[0], files[1] | {name: to_interleaved(files[1][name], heads) for name, heads in names.items()}


def random_weights(files: Files) -> Files:
    """Random weights with a trained vocabulary map."""
    from eyas.drafters.formats.fields import Fields
    from eyas.drafters.formats.tensor_names import MIDLAYER, name_in_file
    from eyas.drafters.kinds.eagle3 import Eagle3Network, read

    torch.manual_seed(2)
    fresh = Eagle3Network(read(Fields(files[0], "test"))).state_dict()
    named = {name_in_file(name, MIDLAYER): t for name, t in fresh.items() if name not in ("d2t", "t2d")}
    return files[0], files[1] | {name: t.to(torch.bfloat16) for name, t in named.items()}


def other_basis(files: Files) -> Files:
    """As if trained for a target with another basis of the residual stream: same shapes, tokens and function."""
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3)))[0]
    blocks = [block.float() @ turn for block in files[1]["fc.weight"].split(SIZE, 1)]
    return files[0], files[1] | {"fc.weight": torch.cat(blocks, 1).to(torch.bfloat16)}


def other_tokens(files: Files) -> Files:
    """As if trained for a target that numbers the same tokens differently, with its embedding, head and map."""
    order = torch.randperm(files[0]["vocab_size"], generator=torch.Generator().manual_seed(4))
    config, tensors = files
    ids = order[tensors["d2t"] + torch.arange(len(tensors["d2t"]))].sort()
    covered = torch.zeros(len(order), dtype=torch.bool)
    covered[ids.values] = True
    return config, tensors | {
        "embed_tokens.weight": tensors["embed_tokens.weight"][order.argsort()],
        "lm_head.weight": tensors["lm_head.weight"][ids.indices],
        "d2t": ids.values - torch.arange(len(ids.values)),
        "t2d": covered,
    }


def noise(share: float) -> Callable[[Files], Files]:
    """No fault: a drafter that is read correctly but drafts worse."""

    def weaker(files: Files) -> Files:
        draw = torch.Generator().manual_seed(5)
        return files[0], files[1] | {
            name: (t + share * t.float().std() * torch.randn(t.shape, generator=draw)).to(t.dtype)
            for name, t in files[1].items()
            if t.ndim == 2 and name not in ("embed_tokens.weight", "lm_head.weight")
        }

    return weaker
