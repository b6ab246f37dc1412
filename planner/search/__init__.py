"""The search for a plan: propose templates, place and complete them, price, refine; prove small ones."""

from .find import Found, Rival, find_plan, is_small, signed
from .judge import Priced, Progress

__all__ = ["Found", "Priced", "Progress", "Rival", "find_plan", "is_small", "signed"]
