"""From a user's model to blocks that a rank can build alone."""

from .layout import pipelined
from .parts import ModelParts, ParameterInfo
from .stage import StageModule, Tie
from .workload import Workload

__all__ = ["ModelParts", "ParameterInfo", "StageModule", "Tie", "Workload", "pipelined"]
