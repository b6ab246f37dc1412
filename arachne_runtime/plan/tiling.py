"""How the devices of a stage share out its experts: EP x ETP x EDP tiles over (replica, TP rank)."""

from dataclasses import dataclass

from .plan import Stage


@dataclass(frozen=True, slots=True)
class Tile:
    """Where one device stands; devices are numbered in the stage, replica by replica."""

    expert: int
    """Which run of experts it holds (EP)."""
    tensor: int
    """Which part of each of them (ETP)."""
    data: int
    """Which copy of all experts of the stage it is in (EDP)."""
    experts: tuple[int, ...]
    """The devices that hold the same part of the other experts of its copy, by ``expert``."""
    tensors: tuple[int, ...]
    """The devices that hold the other parts of its experts, by ``tensor``."""


def tiles(stage: Stage) -> tuple[Tile, ...]:
    """By device. ETP varies fastest, then EP, then EDP, as in a plan's rules."""
    return tuple(_tile(stage, device) for device in range(len(stage.devices)))


def shares_experts(stage: Stage) -> bool:
    """Whether devices of the stage need one another to compute an expert's block."""
    return stage.expert_parallel * stage.expert_tensor > 1


def _tile(stage: Stage, device: int) -> Tile:
    etp, ep = stage.expert_tensor, stage.expert_parallel
    tensor, expert, data = device % etp, device // etp % ep, device // (etp * ep)
    first = data * etp * ep
    return Tile(
        expert,
        tensor,
        data,
        experts=tuple(first + other * etp + tensor for other in range(ep)),
        tensors=tuple(first + expert * etp + other for other in range(etp)),
    )
