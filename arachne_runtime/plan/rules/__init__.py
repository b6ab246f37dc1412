"""What each document must satisfy beyond its types: every violation at once, each with its address."""

from .check import check_plan
from .cluster import check_cluster
from .model import check_model
from .profile import check_profile

__all__ = ["check_cluster", "check_model", "check_plan", "check_profile"]
