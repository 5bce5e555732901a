"""Sizing draft trees by measured cost: costs, gains, calibration, and the controller that weighs them."""

from eyas.engine.controller.controller import Controller
from eyas.engine.controller.costs import CostModel, CostTable, Curve
from eyas.engine.controller.record import ControllerState, RoundRecord

__all__ = ["Controller", "ControllerState", "CostModel", "CostTable", "Curve", "RoundRecord"]
