"""What the ranks of a profile are told, and what each of them answers."""

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import BlockTiming, LinkTiming, StepTiming, UpdateTiming
from arachne_runtime.units import Seconds


class ProfileJob(Document, frozen=True, kw_only=True):
    """Read by every rank."""

    workload: str
    """``MODULE:NAME`` or ``FILE.py:NAME``."""
    cluster: Cluster
    devices: tuple[str, ...]
    """By rank."""
    samples: tuple[int, ...]
    results: str
    """File that rank 0 writes, a list of ``RankResult``."""
    progress: str
    """File that rank 0 keeps at one line: what is being measured."""


class RankResult(Document, frozen=True, kw_only=True):
    """What one rank measured."""

    device: str
    """Device type."""
    model: ModelSpec
    timings: tuple[BlockTiming, ...]
    updates: tuple[UpdateTiming, ...]
    step: StepTiming
    links: tuple[LinkTiming, ...]
    """The same on every rank."""
    seconds: Seconds
    """How long the measurements took."""
