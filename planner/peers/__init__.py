"""Rival planners as strategies over the same price."""

from .even import Even
from .strategy import DEFAULT_BUDGET_S, Strategy
from .uniform import Uniform

PEERS: tuple[Strategy, ...] = (Even(), Uniform())
"""Every rival, cheapest first."""

__all__ = ["DEFAULT_BUDGET_S", "PEERS", "Even", "Strategy", "Uniform"]
