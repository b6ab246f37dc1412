"""Templates: how many groups of which devices stand in which stage of which pipeline; nothing computed.

A template knows pools and counts only; ``planner.search.place`` gives it concrete devices.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Alike replicas of one stage."""

    pool: int
    """Index of ``Supply.pools``."""
    tp: int
    """Devices of each replica; they share a node."""
    width: int
    """Number of replicas."""

    @property
    def num_devices(self) -> int:
        """Devices of all its replicas."""
        return self.tp * self.width


@dataclass(frozen=True, slots=True, order=True)
class StageTemplate:
    """One stage: usually one group, several where unlike replicas share the work of a stage."""

    groups: tuple[Group, ...]

    @property
    def width(self) -> int:
        """Number of replicas."""
        return sum(group.width for group in self.groups)


@dataclass(frozen=True, slots=True, order=True)
class PipelineTemplate:
    """The stages of one pipeline, first to last."""

    stages: tuple[StageTemplate, ...]

    @property
    def depth(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def devices(self) -> dict[int, int]:
        """Devices used, by pool."""
        used: dict[int, int] = {}
        for stage in self.stages:
            for group in stage.groups:
                used[group.pool] = used.get(group.pool, 0) + group.num_devices
        return used


@dataclass(frozen=True, slots=True, order=True)
class Template:
    """All pipelines of a plan; devices that no stage takes stay idle."""

    pipelines: tuple[PipelineTemplate, ...]
