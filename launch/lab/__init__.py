"""Unequal devices on one Linux machine, for people without a mixed cluster."""

from .document import Lab, LabDevice, LabNetwork, check_lab, read_lab
from .running import Active, Enforcement, active, current, sweep

__all__ = [
    "Active",
    "Enforcement",
    "Lab",
    "LabDevice",
    "LabNetwork",
    "active",
    "check_lab",
    "current",
    "read_lab",
    "sweep",
]
