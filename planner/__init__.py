"""The planner: from a cluster, a model and its measurements to a plan. Never imports torch.

Names are loaded when first used, so that ``import planner`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Objective as Objective
    from .request import Request as Request
    from .search import Found as Found
    from .search import Progress as Progress
    from .search import signed as signed
    from .sources import find_plan as find_plan

_HOMES = {
    "Found": "search",
    "Objective": "request",
    "Progress": "search",
    "Request": "request",
    "find_plan": "sources",
    "signed": "search",
}

__all__ = ["Found", "Objective", "Progress", "Request", "find_plan", "signed"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
