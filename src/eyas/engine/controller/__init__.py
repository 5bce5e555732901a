"""Chooses draft trees by measured costs: cost model, gain model, calibration, and the controller that uses them."""

from eyas.engine.controller.calibration import costs_for, make_controller
from eyas.engine.controller.controller import Controller
from eyas.engine.controller.costs import CostModel, CostTable, Curve
from eyas.engine.controller.records import ControllerState, RoundRecord
from eyas.engine.controller.trees import TreeArm
from eyas.engine.controller.window import WindowArm

__all__ = [
    "Controller",
    "ControllerState",
    "CostModel",
    "CostTable",
    "Curve",
    "RoundRecord",
    "TreeArm",
    "WindowArm",
    "costs_for",
    "make_controller",
]
