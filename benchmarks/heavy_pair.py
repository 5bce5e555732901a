"""Make the demo pair heavier without changing what it computes.

Identity layers (zero output projections) and zero MLP columns are added to the target until it costs as much as a
model of a few hundred million parameters; the drafter's MLP is widened alike. So efficiency can be measured on a
target that is bound by memory, with a drafter that really was trained for it.

    python -m benchmarks.heavy_pair OUT_DIR [--layers 64] [--intermediate 5600]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaForCausalLM

import eyas.assets
from eyas.drafters.checkpoint import load_network, save_network
from eyas.drafters.kinds.eagle3 import Eagle3Network
from eyas.targets import load_tokenizer
from eyas.train.lm.lm import grow_depth


def widened(linear: nn.Linear, rows: int, columns: int) -> nn.Parameter:
    """The weight [rows, columns] that extends `linear` with zeros."""
    weight = torch.zeros(rows, columns, dtype=linear.weight.dtype)
    weight[: linear.out_features, : linear.in_features] = linear.weight
    return nn.Parameter(weight)


@torch.no_grad()
def widen_mlp(mlp: nn.Module, size: int) -> None:
    """Give a gated MLP `size` columns, the new ones zero."""
    hidden = mlp.gate_proj.in_features
    mlp.gate_proj.weight = widened(mlp.gate_proj, size, hidden)
    mlp.up_proj.weight = widened(mlp.up_proj, size, hidden)
    mlp.down_proj.weight = widened(mlp.down_proj, hidden, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=5600)
    options = parser.parse_args()

    light = LlamaForCausalLM.from_pretrained(eyas.assets.DEMO_TARGET, dtype=torch.bfloat16)
    factor = options.layers // light.config.num_hidden_layers
    heavy = grow_depth(light, options.layers).to(torch.bfloat16)
    for layer in heavy.model.layers:
        widen_mlp(layer.mlp, options.intermediate)
    heavy.config.intermediate_size = options.intermediate
    ids = torch.randint(0, heavy.config.vocab_size, (1, 64))
    with torch.inference_mode():
        # in float32: the added zeros change the order in which a product is summed, and nothing else
        gap = float((light.float()(ids).logits - heavy.float()(ids).logits).abs().max())
    heavy = heavy.to(torch.bfloat16)
    heavy.save_pretrained(options.out / "target")
    load_tokenizer(eyas.assets.DEMO_TARGET).save_pretrained(options.out / "target")

    drafter = load_network(Path(eyas.assets.DEMO_DRAFTER))
    # boundary k of the light model is boundary k * factor of the heavy one: only identities lie between
    taps = tuple(tap * factor for tap in drafter.config.taps or ())
    config = drafter.config.model_copy(update={"intermediate_size": options.intermediate, "taps": taps})
    wide = Eagle3Network(config)
    for layer in drafter.layers:
        widen_mlp(layer.mlp, options.intermediate)
    wide.load_state_dict(drafter.state_dict())
    save_network(wide.to(torch.bfloat16), options.out / "drafter")
    size = sum(p.numel() for p in heavy.parameters()) / 1e6
    print(f"{options.out}: target {size:.0f}M parameters in {options.layers} layers")
    print(f"largest difference of a logit in float32: {gap:.1e}")


if __name__ == "__main__":
    main()
