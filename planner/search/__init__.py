"""The search for a plan: propose templates, complete, pack and refine them; prove small problems."""

from .find import find_plan, is_small
from .found import Found, Rival, Runner, signed
from .judge import Priced, Progress
from .propose import Enumeration, Source

__all__ = [
    "Enumeration",
    "Found",
    "Priced",
    "Progress",
    "Rival",
    "Runner",
    "Source",
    "find_plan",
    "is_small",
    "signed",
]
