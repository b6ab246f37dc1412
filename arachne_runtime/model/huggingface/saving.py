"""Writes what was trained as a folder that transformers reads: each stage of a pipeline writes its shard."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch.distributed as dist
from torch import Tensor

from ...errors import UnsupportedPlanError
from ...plan.placement import Place
from ...plan.plan import Plan
from ...plan.tiling import shares_experts
from ..stage import StageModule
from .checkpoint import INDEX, Wanted
from .library import optional
from .names import pieces_of


class Trained(Protocol):
    """What is asked of an engine."""

    plan: Plan
    places: tuple[Place, ...]
    stages: tuple[StageModule, ...]


def save_folder(engine: Trained, folder: Path, config: Any, blocks: Sequence[Mapping[str, Wanted]]) -> None:
    """Write config.json, an index, and of each stage of the first pipeline its own parameters.

    Raises:
        UnsupportedPlanError: A rank of the first pipeline holds only a part of a parameter.

    """
    _refuse_parts(engine.plan)
    folder.mkdir(parents=True, exist_ok=True)
    for place, stage in zip(engine.places, engine.stages, strict=True):
        if (place.pipeline, place.replica, place.tp_rank) == (0, 0, 0):
            _write(folder / _shard(engine.plan, place.stage), _tensors(stage, config, blocks))
    if engine.places[0].rank == 0:
        config.save_pretrained(folder)
        _write_index(engine.plan, folder, config, blocks)
    if dist.is_initialized():
        dist.barrier()  # who returns may read all of it


def _refuse_parts(plan: Plan) -> None:
    """Alike on every rank, before one of them waits for the others."""
    for number, stage in enumerate(plan.pipelines[0].stages):
        if shares_experts(stage) or len(stage.replicas[0].devices) > 1:
            raise UnsupportedPlanError(
                f"$.pipelines[0].stages[{number}] holds parameters in parts (TP or experts), and a folder is "
                "written from whole ones: save under a plan with TP 1 and expert_parallel 1"
            )


def _owned(blocks: Sequence[Mapping[str, Wanted]]) -> Iterator[tuple[int, str, Wanted]]:
    """Each parameter once, in the lowest block that holds it."""
    seen: set[str] = set()
    for index, block in enumerate(blocks):
        for name, parameter in block.items():
            if parameter.names[0] not in seen:
                seen.add(parameter.names[0])
                yield index, name, parameter


def _tensors(stage: StageModule, config: Any, blocks: Sequence[Mapping[str, Wanted]]) -> dict[str, Tensor]:
    state = stage.state_dict()
    found: dict[str, Tensor] = {}
    for index, name, parameter in _owned(blocks):
        if index not in stage.block_range:
            continue
        value = state[f"blocks.{index}.{name}"]
        assert tuple(value.shape) == parameter.shape
        for piece in pieces_of(config.model_type, parameter.names[0], parameter.shape):
            found[piece.name] = value[piece.where].detach().cpu().contiguous()
    return found


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Under another name first: a reader never sees half a file."""
    part = path.with_suffix(".part")
    optional("safetensors.torch").save_file(dict(tensors), part, metadata={"format": "pt"})
    os.replace(part, path)


def _shard(plan: Plan, stage: int) -> str:
    count = len(plan.pipelines[0].stages)
    return f"model-{stage + 1:05d}-of-{count:05d}.safetensors"


def _write_index(plan: Plan, folder: Path, config: Any, blocks: Sequence[Mapping[str, Wanted]]) -> None:
    file_of = {
        block: _shard(plan, number)
        for number, stage in enumerate(plan.pipelines[0].stages)
        for block in stage.blocks
    }
    weight_map = {
        piece.name: file_of[index]
        for index, _, parameter in _owned(blocks)
        for piece in pieces_of(config.model_type, parameter.names[0], parameter.shape)
    }
    index = {"metadata": {"format": "pt"}, "weight_map": weight_map}
    (folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2))
