"""Rival planners as strategies over the same price."""

from .even import Even
from .strategy import Strategy
from .uniform import Uniform

PEERS: tuple[Strategy, ...] = (Even(), Uniform())
"""Every rival, cheapest first."""

__all__ = ["PEERS", "Even", "Strategy", "Uniform"]
