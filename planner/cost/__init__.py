"""The price of a plan: event simulation, synchronisation, memory."""

from .bounds import Bracket, bracket, lower_bound, pipeline_floors
from .estimate import Breakdown, Estimate, Infeasible, Price, Span
from .memory import StageMemory, in_flight, stage_memory
from .price import price, with_prediction
from .tables import StageCosts, Tables, Tie

__all__ = [
    "Bracket",
    "Breakdown",
    "Estimate",
    "Infeasible",
    "Price",
    "Span",
    "StageCosts",
    "StageMemory",
    "Tables",
    "Tie",
    "bracket",
    "in_flight",
    "lower_bound",
    "pipeline_floors",
    "price",
    "stage_memory",
    "with_prediction",
]
