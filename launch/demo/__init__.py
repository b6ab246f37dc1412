"""The demonstration: one real model on four unequal devices, trained three ways on one machine."""

from .figures import figures
from .run import Demonstration, Training, demonstrate

__all__ = ["Demonstration", "Training", "demonstrate", "figures"]
