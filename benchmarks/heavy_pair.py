"""Make the demo pair heavier without changing what it computes.

    python -m benchmarks.heavy_pair OUT_DIR [--layers 64] [--hidden 256] [--mlp 5600] [--heads 4] [--kv-heads 2]

The *heavy pair* (the default) has enough identity layers (zero output projections) and zero MLP columns added to cost
as much as a model of a few hundred million parameters, in many thin layers. The *wide pair* has the shape of models
that people use:

    python -m benchmarks.heavy_pair OUT_DIR --layers 32 --hidden 1024 --mlp 3072 --heads 16 --kv-heads 8

`--drafter [NAME=]PATH ...` takes other drafters trained for the demo target: EAGLE-3, DFlash, DSpark, Medusa or MTP.
Each is written to a folder called NAME, by default the name of its own folder.

The wide pair's states are padded with zeros. This scales the mean of their squares by old / new size, so norm weights
are multiplied by the root of that ratio, and the epsilon by the ratio. The drafter is padded in the same way.
Efficiency can so be measured on a memory-bound target with a drafter that really was trained for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import script
from eyas.drafters.checkpoint import load_network, save_network
from eyas.drafters.kinds.dspark import DSparkNetwork
from eyas.drafters.kinds.eagle3 import Eagle3Network
from eyas.drafters.network import DraftNetwork
from eyas.targets import load_target, load_tokenizer
from eyas.train.lm.lm import grow_depth
from tests.toy.pair import TOY_DRAFTER, TOY_TARGET


def padded(
    old: Tensor, shape: torch.Size, factor: float = 1.0, inputs: Sequence[tuple[int, int]] | None = None
) -> Tensor:
    """`old`, padded with zeros to `shape`; a vector that grows is a norm weight and is multiplied by `factor`.

    The inputs of a matrix may be several concatenated parts, each with an old and a new width.
    """
    if old.dim() == 3:
        return padded(old[0], shape[1:], factor, inputs).unsqueeze(0)
    if old.dim() == 1:
        new = torch.zeros(shape, dtype=old.dtype)
        new[: len(old)] = old * (factor if old.shape != shape else 1.0)
        return new
    widths = inputs or [(old.shape[1], shape[1])]
    parts = torch.split(old, [was for was, _ in widths], dim=1)
    wider = [F.pad(part, (0, now - was)) for part, (was, now) in zip(parts, widths, strict=True)]
    return F.pad(torch.cat(wider, dim=1), (0, 0, 0, shape[0] - len(old)))


def widened_target(model: LlamaForCausalLM, sizes: dict[str, int]) -> LlamaForCausalLM:
    """A target with the larger `sizes` (config fields) that computes the same as `model`."""
    ratio = model.config.hidden_size / sizes["hidden_size"]
    values = model.config.to_dict() | sizes | {"rms_norm_eps": model.config.rms_norm_eps * ratio}
    wide = LlamaForCausalLM(LlamaConfig(**values)).to(model.dtype)
    old = model.state_dict()
    wide.load_state_dict({name: padded(old[name], new.shape, ratio**0.5) for name, new in wide.state_dict().items()})
    return wide.eval()


def widened_drafter(network: DraftNetwork, sizes: dict[str, int], factor: int) -> DraftNetwork:
    """The drafter of a target that is `factor` times as deep and has `sizes`."""
    old_size = network.config.hidden_size
    new_size = sizes["hidden_size"]
    ratio = old_size / new_size
    state = (old_size, new_size)
    taps = network.config.taps or ()
    changed = {
        **sizes,
        "target_hidden_size": new_size,
        "rms_norm_eps": getattr(network.config, "rms_norm_eps", 0.0) * ratio,
        # boundary k of the light model is boundary k * factor of the heavy one: only identities lie between
        "taps": tuple(tap * factor for tap in taps),
    }
    own = {name: value for name, value in changed.items() if name in type(network.config).model_fields}
    wide = type(network)(network.config.model_copy(update=own))
    inputs = {"fc.weight": [state] * len(taps), "mask_hidden": [state] * len(taps), "eh_proj.weight": [state] * 2}
    if isinstance(network, Eagle3Network):
        inputs |= {f"layers.0.self_attn.{part}_proj.weight": [state] * 2 for part in "qkv"}
    if isinstance(network, DSparkNetwork):
        if network.config.markov_head_type != "vanilla":
            raise SystemExit("only the vanilla Markov head can be widened")
        if network.config.enable_confidence_head and network.config.confidence_head_with_markov:
            inputs["confidence_head.proj.weight"] = [state, (network.config.markov_rank,) * 2]
    old = network.state_dict()
    wide.load_state_dict({
        name: padded(old[name], new.shape, 1.0 if name.endswith("bias") else ratio**0.5, inputs.get(name))
        if new.is_floating_point() else old[name]
        for name, new in wide.state_dict().items()
    })  # fmt: skip
    return wide


@torch.inference_mode()
def logit_gap(light: LlamaForCausalLM, written: Path) -> float:
    """The largest difference of a logit between the light target and the one in a folder, both in float64.

    The heavy target is read from the folder because casting it in memory also rounded its RoPE frequencies.
    """
    heavy = LlamaForCausalLM.from_pretrained(written, dtype=torch.float64)
    ids = torch.randint(0, heavy.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    return float((light.double()(ids).logits - heavy(ids).logits).abs().max())


@script
def main(
    out: Path,
    *,
    drafter: Annotated[Sequence[str], "[NAME=]PATH ..."] = (str(TOY_DRAFTER),),
    layers: int = 64,
    hidden: int = 256,
    mlp: int = 5600,
    heads: int = 4,
    kv_heads: int = 2,
) -> None:
    sizes = {
        "hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip
    light = LlamaForCausalLM.from_pretrained(TOY_TARGET, dtype=torch.float64)
    factor = layers // light.config.num_hidden_layers
    heavy = widened_target(grow_depth(light, layers) if factor > 1 else light, sizes).to(torch.bfloat16)
    heavy.save_pretrained(out / "target")
    load_tokenizer(TOY_TARGET).save_pretrained(out / "target")

    target = load_target(TOY_TARGET, device="cpu", dtype=torch.float32)
    for source in drafter:
        name, _, path = source.rpartition("=")
        wide = widened_drafter(load_network(Path(path), target), sizes, factor)
        save_network(wide.to(torch.bfloat16), out / (name or Path(path).name))
    size = sum(p.numel() for p in heavy.parameters()) / 1e6
    print(f"{out}: target {size:.0f}M parameters in {layers} layers")
    print(f"largest difference of a logit in float64: {logit_gap(light, out / 'target'):.1e}")


if __name__ == "__main__":
    raise SystemExit(main())
