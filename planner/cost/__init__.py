"""The price of a plan: event simulation, synchronisation, memory."""

from arachne_runtime.plan.schedule import in_flight

from .estimate import Breakdown, Estimate, Infeasible, Price, Span
from .ideal import Ideal
from .memory import StageMemory, stage_memory
from .price import price, with_prediction
from .tables import StageCosts, Tables, Tie

__all__ = [
    "Breakdown",
    "Estimate",
    "Ideal",
    "Infeasible",
    "Price",
    "Span",
    "StageCosts",
    "StageMemory",
    "Tables",
    "Tie",
    "in_flight",
    "price",
    "stage_memory",
    "with_prediction",
]
