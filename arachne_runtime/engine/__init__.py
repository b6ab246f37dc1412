"""Plays a schedule on one rank with exact gradients."""

from .engine import Engine
from .recipe import Recipe
from .report import EvaluationReport, StepReport

__all__ = ["Engine", "EvaluationReport", "Recipe", "StepReport"]
