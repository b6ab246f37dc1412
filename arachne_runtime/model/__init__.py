"""From a user's model to blocks that a rank can build alone."""

from .experts import MoE
from .extra_loss import add_loss, extra_losses
from .layout import pipelined
from .parameters import ParameterInfo
from .parts import ModelParts
from .stage import StageModule, Tie
from .styles import Colwise, Rowwise
from .vocabulary import vocabulary_parallel, vocabulary_parallel_cross_entropy
from .workload import Workload

__all__ = [
    "Colwise",
    "MoE",
    "ModelParts",
    "ParameterInfo",
    "Rowwise",
    "StageModule",
    "Tie",
    "Workload",
    "add_loss",
    "extra_losses",
    "pipelined",
    "vocabulary_parallel",
    "vocabulary_parallel_cross_entropy",
]
