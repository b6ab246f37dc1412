"""Templates: how many devices of which type stand in which stage of which pipeline; nothing that is computed.

A template knows types and counts only; ``planner.search.place`` gives it concrete devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Alike replicas of one stage."""

    device: str
    """Device type."""
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

    def devices(self) -> dict[str, int]:
        """Devices used, by type."""
        used: dict[str, int] = {}
        for stage in self.stages:
            for group in stage.groups:
                used[group.device] = used.get(group.device, 0) + group.num_devices
        return used


@dataclass(frozen=True, slots=True, order=True)
class Template:
    """All pipelines of a plan; devices that no stage takes stay idle."""

    pipelines: tuple[PipelineTemplate, ...]

    def devices(self) -> dict[str, int]:
        """Devices used, by type."""
        used: dict[str, int] = {}
        for pipeline in self.pipelines:
            for device, count in pipeline.devices().items():
                used[device] = used.get(device, 0) + count
        return used

    def __str__(self) -> str:
        return " + ".join(
            "[" + " > ".join(" ".join(_group_text(g) for g in s.groups) for s in p.stages) + "]"
            for p in self.pipelines
        )


def _group_text(group: Group) -> str:
    return f"{group.width}×{group.device}" + (f"·tp{group.tp}" if group.tp > 1 else "")


def mixed_stage(devices: Mapping[str, int]) -> StageTemplate:
    """A stage that holds so many TP-1 replicas of each type."""
    return StageTemplate(tuple(Group(d, 1, n) for d, n in devices.items() if n))


def replicated(pipeline: PipelineTemplate, copies: int) -> Template:
    """``copies`` alike pipelines."""
    return Template((pipeline,) * copies)


def leftover(pools: Mapping[str, int], used: Mapping[str, int]) -> dict[str, int]:
    """Devices of each pool that ``used`` leaves idle."""
    return {
        device: count - used.get(device, 0) for device, count in pools.items() if count > used.get(device, 0)
    }
