"""JetSpec (arXiv 2606.18394): DFlash's tensors, with slots that see no later ones, trained on the forward KL for trees.

Its files are DFlash's with `dflash_config.causal_head` (the authors') or `dflash_config.causal` (vLLM, AutoModel).
"""

from __future__ import annotations

from eyas.drafters.block.network import BlockConfig, BlockNetwork
from eyas.drafters.kind import JETSPEC
from eyas.drafters.kinds.dflash import block_kind


class JetSpecConfig(BlockConfig):
    """DFlash's sizes; its block is causal."""

    causal = True


KIND = block_kind("jetspec", JetSpecConfig, BlockNetwork, ("DFlashDraftModel",), family=JETSPEC)
