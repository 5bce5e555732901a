"""Chooses draft trees by measured costs: cost model, gain model, calibration, and the controller that uses them."""

from eyas.engine.controller.base import Controller
from eyas.engine.controller.calibration import costs_for, make_controller
from eyas.engine.controller.controller import TreeController
from eyas.engine.controller.costs import CostModel, CostTable, Curve
from eyas.engine.controller.records import ControllerState, RoundRecord

__all__ = [
    "Controller",
    "ControllerState",
    "CostModel",
    "CostTable",
    "Curve",
    "RoundRecord",
    "TreeController",
    "costs_for",
    "make_controller",
]
