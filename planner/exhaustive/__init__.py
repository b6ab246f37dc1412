"""The oracle: the cheapest of all plans of a small problem, by branch and bound with proven bounds."""

from .oracle import Best, best_plan, solve

__all__ = ["Best", "best_plan", "solve"]
