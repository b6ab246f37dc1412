"""Arithmetic of unequal and adaptive batches: time of a step, learning it, noise scale, goodput; no torch."""

from .balance import Balancer, BalanceSettings, Phase
from .buckets import Reading
from .controller import Controller, ControllerSettings, ControllerState, Decision
from .curve import Corner, best_times
from .goodput import BatchProblem, Choice, best_batch
from .noise import (
    Group,
    NoiseAverage,
    NoiseReading,
    NoiseState,
    NoiseSums,
    SegmentNorms,
    measure_noise,
    total,
)
from .scaling import Progress, ScalingRule, gain, lr_factor
from .state import BalancerState
from .tails import Tails, num_tail_sums, tail_sums
from .time_model import ReplicaTime, TimeModel

__all__ = [
    "BalanceSettings",
    "Balancer",
    "BalancerState",
    "BatchProblem",
    "Choice",
    "Controller",
    "ControllerSettings",
    "ControllerState",
    "Corner",
    "Decision",
    "Group",
    "NoiseAverage",
    "NoiseReading",
    "NoiseState",
    "NoiseSums",
    "Phase",
    "Progress",
    "Reading",
    "ReplicaTime",
    "ScalingRule",
    "SegmentNorms",
    "Tails",
    "TimeModel",
    "best_batch",
    "best_times",
    "gain",
    "lr_factor",
    "measure_noise",
    "num_tail_sums",
    "tail_sums",
    "total",
]
