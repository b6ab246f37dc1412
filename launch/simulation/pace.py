"""How fast training goes under a plan once copies of its state are counted, and how often it copies."""

from dataclasses import dataclass, replace
from math import sqrt

from arachne_runtime.units import Seconds

from .costs import Costs
from .holders import Holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of training under one plan."""

    step_s: Seconds
    """Of a step in which nothing is copied."""
    checkpoint_every: int
    """Steps."""
    checkpoint_s: Seconds
    """Delay of a step by a checkpoint in the background."""
    snapshot_every: int | None = None
    """Steps; None where every part of the state has holders on several nodes."""
    snapshot_s: Seconds = 0.0

    @property
    def copying_s(self) -> Seconds:
        """Mean delay of a step by copies."""
        snapshots_s = self.snapshot_s / self.snapshot_every if self.snapshot_every else 0.0
        return self.checkpoint_s / self.checkpoint_every + snapshots_s

    @property
    def whole_step_s(self) -> Seconds:
        """A step and its part of the copies."""
        return self.step_s + self.copying_s


def pace_of(
    step_s: Seconds,
    held: Holdings,
    num_devices: int,
    model_bytes: float,
    costs: Costs,
    *,
    to_node_loss_s: Seconds,
    to_checkpoint_s: Seconds,
    snapshots: bool,
) -> Pace:
    """Copies as often as costs least in the long run, by the mean times until they are needed.

    Each device writes its part of a checkpoint, once each; snapshots are of all that a device
    holds, since with them every device goes back to one step.
    """
    checkpoint_s = costs.copy_s(model_bytes / num_devices)
    pace = Pace(
        step_s=step_s,
        checkpoint_every=_steps(_best_interval_s(checkpoint_s, to_checkpoint_s), step_s),
        checkpoint_s=checkpoint_s,
    )
    exposed = len(held.exposed)
    if not snapshots or not exposed or len(held.nodes) < 2:
        return pace
    snapshot_s = costs.copy_s(held.most_bytes)
    every = _steps(_best_interval_s(snapshot_s, to_node_loss_s / exposed), step_s)
    return replace(pace, snapshot_every=every, snapshot_s=snapshot_s)


def _best_interval_s(copy_s: Seconds, between_losses_s: Seconds) -> Seconds:
    """J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (9), 1974."""
    return sqrt(2 * copy_s * between_losses_s)


def _steps(seconds: Seconds, step_s: Seconds) -> int:
    return max(1, round(seconds / step_s))
