"""From a pair and a word to a controller: `auto` sizes trees, `auto:chain` chains."""

from __future__ import annotations

from pathlib import Path

from eyas.drafters.decoding import NetworkDrafter
from eyas.engine.controller.calibration import calibrate, describe
from eyas.engine.controller.controller import WIDTHS, Controller
from eyas.engine.controller.costs import CostModel, CostTable
from eyas.errors import UsageError
from eyas.target import Target

AUTO = ("auto", "auto:chain")
"""What a tree's text may be to have a controller choose."""


def is_auto(tree: object) -> bool:
    """Does `tree` ask for a controller? UsageError for a kind of auto that isn't known."""
    if not isinstance(tree, str) or tree.partition(":")[0] != "auto":
        return False
    if tree not in AUTO:
        raise UsageError(f"unknown tree {tree!r}: write {' or '.join(AUTO)}")
    return True


def make_controller(
    target: Target, drafter: NetworkDrafter, text: str, batch_size: int, costs: Path | CostTable | None = None
) -> Controller:
    """The controller that `text` asks for, for batches of up to `batch_size`.

    `costs` is a table, or a file: read if it is there, else measured (seconds; all slots must be empty) and written.
    None = measured and not kept. UsageError for a file that can't be used.
    """
    offered = drafter.network.config.draft_vocab_size
    widths = [width for width in WIDTHS if width <= offered] if text == "auto" else [1]
    if not isinstance(costs, CostTable):
        costs = costs_for(target, drafter, batch_size, costs)
    return Controller(
        CostModel(costs),
        widths=widths,
        max_length=target.max_length,
        counts_freely=target.device.type == "cpu",
    )


def costs_for(target: Target, drafter: NetworkDrafter, batch_size: int, saved: Path | None = None) -> CostTable:
    """The costs in the file `saved`; measured, and written there, if it doesn't exist. None = measured and not kept."""
    if saved is not None and saved.exists():
        return CostTable.read(saved, describe(target, drafter))
    table = calibrate(target, drafter, batch_size, drafter.network.config.draft_vocab_size)
    if saved is not None:
        table.save(saved)
    return table
