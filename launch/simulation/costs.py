"""What losses, changes, copies and restarts take in a simulation, each with the place of its measurement."""

from arachne_runtime.plan.document import Document
from arachne_runtime.units import GB, Seconds

from ..coordinator.settings import Settings


class Costs(Document, frozen=True, kw_only=True):
    """All measured on CPUs with gloo and small models; a trace file may state those of another system.

    Bytes that move have the time of the cluster's links (``planner.search.migrate``), not one of these.
    """

    detect_s: Seconds = Settings(devices=()).dead_s
    """A node that is gone until it counts as dead: its agent is silent so long."""
    recover_s: Seconds = 0.35
    """From then to the next step: the largest of kill to next step (docs/membership.md: 0.11 to 0.35 s)."""
    pause_s: Seconds = 0.45
    """Survivors' pause at a planned change (docs/membership.md, join: 0.25 to 0.45 s)."""
    plan_s: Seconds = 0.2
    """A search for the devices that are left (docs/search.md: 512 devices less a node, 0.18 s of a core)."""
    start_s: Seconds = 6.7
    """A node that comes until its processes wait as joiners (``bench.restarts``: from command to engine)."""
    restart_s: Seconds = 4.9
    """A job that ends and starts again, without reading its checkpoint (``bench.restarts``: kill to step)."""
    copy_s_per_GB: Seconds = 0.42
    """A step's delay by a copy of state to host memory: 0.24 of a save of 1.77 s/GB (docs/checkpoints.md)."""
    save_s_per_GB: Seconds = 1.77
    """Writing a checkpoint while nothing else is done (docs/checkpoints.md)."""
    load_s_per_GB: Seconds = 0.98
    """Reading a checkpoint into a new engine (docs/checkpoints.md)."""

    def copy_s(self, bytes_: float) -> Seconds:
        """Delay of the step in which a device's state of so many bytes is copied."""
        return self.copy_s_per_GB * bytes_ / GB

    def save_s(self, bytes_: float) -> Seconds:
        """Writing a device's state of so many bytes."""
        return self.save_s_per_GB * bytes_ / GB

    def load_s(self, bytes_: float) -> Seconds:
        """Reading a device's state of so many bytes."""
        return self.load_s_per_GB * bytes_ / GB
