"""Puts the process that is about to become a rank into its device of the lab."""

import os
from pathlib import Path

from arachne_runtime.errors import UnsupportedEnvironmentError

from . import cgroup, duty, network
from .state import Seat


def take(seat: Seat) -> None:
    """Enter the quota, or the supervisor's roster, and the network of one device."""
    try:
        if seat.cgroup:
            cgroup.enter(Path(seat.cgroup))
        if seat.roster:
            duty.register(Path(seat.roster))
        if seat.network:
            network.enter(seat.network)
    except OSError as error:
        raise UnsupportedEnvironmentError(
            f"rank {os.environ.get('RANK', '?')} cannot enter device {seat.device} of the lab: {error}; "
            f"is the lab (`arachne lab`) still running?"
        ) from error
