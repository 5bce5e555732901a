"""Chooses draft trees by measured costs: cost model, gain model, calibration, and the controller that uses them."""

from eyas.engine.controller.calibration import AUTO, costs_for, is_auto, make_controller
from eyas.engine.controller.controller import Controller, ControllerState, RoundRecord
from eyas.engine.controller.costs import CostModel, CostTable, Curve

__all__ = [
    "AUTO",
    "Controller",
    "ControllerState",
    "CostModel",
    "CostTable",
    "Curve",
    "RoundRecord",
    "costs_for",
    "is_auto",
    "make_controller",
]
