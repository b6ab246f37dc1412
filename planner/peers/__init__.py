"""Rival planners as strategies over the same price."""

from .amp import Amp
from .espresso import Espresso
from .even import Even
from .hexiscale import HexiScale
from .metis import Metis
from .sailor import Sailor
from .strategy import DEFAULT_BUDGET_S, Strategy
from .uniform import Uniform

PEERS: tuple[Strategy, ...] = (Even(), Uniform(), Amp(), Espresso(), HexiScale(), Metis(), Sailor())
"""Every rival, cheapest first."""

__all__ = [
    "DEFAULT_BUDGET_S",
    "PEERS",
    "Amp",
    "Espresso",
    "Even",
    "HexiScale",
    "Metis",
    "Sailor",
    "Strategy",
    "Uniform",
]
