"""Arithmetic of unequal and adaptive batches: time of a step, learning it, noise scale, goodput; no torch."""

from .balance import Balancer, BalanceSettings, Phase
from .buckets import Reading
from .time_model import ReplicaTime, TimeModel

__all__ = ["BalanceSettings", "Balancer", "Phase", "Reading", "ReplicaTime", "TimeModel"]
