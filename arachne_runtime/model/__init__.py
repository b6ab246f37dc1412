"""From a user's model to blocks that a rank can build alone."""

from .experts import MoE
from .extra_loss import add_loss, extra_losses
from .layout import pipelined
from .parts import ModelParts, ParameterInfo
from .stage import StageModule, Tie
from .workload import Workload

__all__ = [
    "MoE",
    "ModelParts",
    "ParameterInfo",
    "StageModule",
    "Tie",
    "Workload",
    "add_loss",
    "extra_losses",
    "pipelined",
]
