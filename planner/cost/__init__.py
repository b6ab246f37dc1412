"""The price of a plan: event simulation, synchronisation, memory."""

from .estimate import Breakdown, Estimate, Infeasible, Price, Span
from .memory import StageMemory, in_flight, stage_memory
from .price import price, with_prediction
from .tables import StageCosts, Tables, Tie

__all__ = [
    "Breakdown",
    "Estimate",
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
