"""The oracle: the cheapest of all plans of a small problem, by branch and bound with proven bounds.

It shares the price with ``planner.search`` and nothing else, so that a fault of one is found by the other;
where both say the same in two ways (pools, packings), that is why.
"""

from .oracle import Best, NotProvenError, best_plan, solve
from .random_problems import Limits, random_request

__all__ = ["Best", "Limits", "NotProvenError", "best_plan", "random_request", "solve"]
