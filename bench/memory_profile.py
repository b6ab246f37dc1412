"""A profile of bytes alone: what blocks keep and need on one rank, and shared out in groups of 2 and 4."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace

from arachne_runtime.measure.blocks import block_bytes, measure_blocks, update_of
from arachne_runtime.measure.probe import Probe, find_probes
from arachne_runtime.measure.timing import Effort
from arachne_runtime.model import ModelParts
from arachne_runtime.model.exchange import Peers
from arachne_runtime.model.experts import ExpertMesh, place_experts
from arachne_runtime.model.sharing import Sharing
from arachne_runtime.model.vocabulary import takes_shards
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import BlockTiming, Profile, Source, UpdateTiming, WorkingBytes
from arachne_runtime.plan.shards import Position
from arachne_runtime.testing import run_ranks

from .memory_plans import MAX_SHARE, WORKLOADS

SAMPLES = (1, 2, 3, 4, 6, 8, MAX_SHARE)
LEAST_EFFORT = Effort(batch_s=1e-6, rounds=1)
"""Only bytes are wanted."""
CPU = torch.device("cpu")
Row = TypeVar("Row", BlockTiming, UpdateTiming)


def measured_profile(
    workload: str = "gpt", degrees: Iterable[int] = (1,), samples: Sequence[int] = SAMPLES
) -> tuple[ModelSpec, Profile]:
    """Bytes of each kind of block by number of ``samples`` and degree of tensor parallelism."""
    found = measure_blocks(
        WORKLOADS[workload], device=CPU, device_type="cpu", samples=samples, effort=LEAST_EFFORT
    )
    timings, updates, model = list(found.timings), list(found.updates), found.model
    for degree in sorted(set(degrees) - {1}):
        ranks = run_ranks(degree, shared_out_on_rank, workload, found.timings, timeout_s=600)
        of_blocks, of_updates = zip(*ranks, strict=True)
        timings += [_most(rows) for rows in zip(*of_blocks, strict=True)]
        updates += [_most(rows) for rows in zip(*of_updates, strict=True)]
    return model, Profile(
        model=model.name, sequence=model.sequence, timings=tuple(timings), updates=tuple(updates)
    )


def shared_out_on_rank(
    workload: str, alone: Sequence[BlockTiming]
) -> tuple[list[BlockTiming], list[UpdateTiming]]:
    """Bytes of blocks that all ranks share as one replica; seconds are those of one rank, divided."""
    torch.manual_seed(0)  # all have one batch
    degree, parts = dist.get_world_size(), ModelParts.of(WORKLOADS[workload].model)
    sharing = _sharing(workload, parts.num_blocks)
    assert sharing.tensor is not None
    counts = sorted({row.samples for row in alone})
    probes = find_probes(parts, WORKLOADS[workload], counts[-1], device=CPU, sharing=sharing)
    for probe in probes:  # each device sends a part of the tokens, to experts of its own
        place_experts(probe.stage, ExpertMesh(replica=sharing.tensor.peers))
    seconds = {(row.kind, row.samples): row for row in alone}
    timings = []
    for probe in probes:
        for samples in counts:
            kept, working = block_bytes(probe, samples)
            row = seconds[probe.kind, samples]
            timings.append(
                replace(
                    row,
                    tp=degree,
                    forward_s=row.forward_s / degree,
                    backward_s=row.backward_s / degree,
                    activation_bytes=kept,
                    working=working,
                    source=Source.ANALYTIC,
                )
            )
    return timings, [_update(probe, workload, degree, parts) for probe in probes]


def _sharing(workload: str, num_blocks: int) -> Sharing:
    from arachne_runtime.model.tensor_parallel import TensorGroup

    ranks = range(dist.get_world_size())
    peers = Peers.of(dist.new_group(list(ranks)), ranks)
    return Sharing(
        position=Position(tensor=(peers.here, len(peers))),
        tensor=TensorGroup(peers, "cpu"),
        keeps_logits_of=num_blocks - 1 if takes_shards(WORKLOADS[workload].loss) else None,
    )


def _update(probe: Probe, workload: str, degree: int, parts: ModelParts) -> UpdateTiming:
    update = update_of(probe, WORKLOADS[workload])
    assert update is not None
    experts = {info.name for info in parts.parameters_of(probe.block) if info.form.is_of_experts}
    named = probe.stage.block_parameters(probe.block)
    return UpdateTiming(
        kind=probe.kind,
        device="cpu",
        tp=degree,
        update_s=0.0,
        temporary_bytes=update.temporary_bytes(CPU),
        parameters=sum(p.numel() for name, p in named if name not in experts),
    )


def _most(rows: Sequence[Row]) -> Row:
    """The largest of each figure: parts are not always even."""
    names = ("activation_bytes", "temporary_bytes", "parameters")
    found = {n: max(getattr(r, n) for r in rows) for n in names if hasattr(rows[0], n)}
    if isinstance(rows[0], BlockTiming):
        needed = [r.working for r in rows if isinstance(r, BlockTiming) and r.working is not None]
        fields = WorkingBytes.__struct_fields__
        found["working"] = WorkingBytes(**{n: max(getattr(w, n) for w in needed) for n in fields})
    return replace(rows[0], **found)
