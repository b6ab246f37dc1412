"""Random clusters, models and valid plans, for every test that must hold for any of them."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry, node_of
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.profile import BlockTiming, Profile, TpCommunication
from planner.request import Request

DEVICE_TYPES = ("A100-40", "V100-16", "T4-16")


@st.composite
def clusters(
    draw: DrawFn, *, max_nodes: int = 4, max_gpus: int = 3, types: Sequence[str] = DEVICE_TYPES
) -> Cluster:
    """Clusters of one to ``max_nodes`` entries (some with copies), with or without zones and pairs."""
    entries = []
    for name in "abcdefgh"[: draw(st.integers(1, max_nodes))]:
        entries.append(
            NodeEntry(
                name=name,
                device=draw(st.sampled_from(types)),
                gpus=draw(st.integers(1, max_gpus)),
                count=draw(st.sampled_from((1, 1, 2))),
                intra_GBps=draw(st.sampled_from((None, 20.0, 200.0))),
                memory_GiB=draw(st.sampled_from((None, 16.0))),
                price_per_hour=draw(st.sampled_from((None, 1.5))),
                zone=draw(st.sampled_from((None, "z1", "z2"))),
            )
        )
    network = Network(
        inter_GBps=draw(st.sampled_from((1.25, 12.5))),
        latency_us=draw(st.sampled_from((10.0, 50.0))),
        pair=draw(_pairs(entries)),
    )
    return Cluster(node=tuple(entries), network=network)


@st.composite
def models(
    draw: DrawFn, *, min_blocks: int = 1, max_blocks: int = 6, experts: bool = False, name: str = "tiny"
) -> ModelSpec:
    """Models of an embedding, alike layers and a head (fewer kinds when short), with or without a tie."""
    count = draw(st.integers(min_blocks, max_blocks))
    kinds = ["embedding", *["layer"] * (count - 2), "head"] if count >= 2 else ["layer"]
    by_kind = {kind: draw(_blocks(kind, experts and kind == "layer")) for kind in dict.fromkeys(kinds)}
    blocks = [by_kind[kind] for kind in kinds]
    blocks[-1] = msgspec.structs.replace(blocks[-1], output_bytes=0)
    if count >= 2 and draw(st.booleans()):
        shared = min(blocks[0].parameters, blocks[-1].parameters)
        blocks[-1] = msgspec.structs.replace(blocks[-1], tied_to=0, tied_parameters=shared)
    return ModelSpec(name=name, sequence=draw(st.sampled_from((1, 16, 128))), blocks=tuple(blocks))


@st.composite
def plans(
    draw: DrawFn,
    *,
    max_devices: int = 6,
    max_blocks: int = 6,
    max_pipelines: int = 3,
    max_micro_batches: int = 4,
    max_share: int = 3,
    max_chunks: int = 3,
    tp: int | None = None,
    num_blocks: int | None = None,
    devices: Sequence[str] | None = None,
    schedules: Sequence[ScheduleKind] = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B),
    model: str = "tiny",
    sequence: int = 16,
) -> Plan:
    """Valid plans: unlike pipelines, unequal widths, shares and cuts.

    ``tp=1`` gives every replica one device; ``devices`` limits where the plan may go (default: up to
    three nodes of up to three devices), ``num_blocks`` fixes the model's length. Interleaved, a set of
    devices holds up to ``max_chunks`` stages.
    """
    used = draw(_some_devices(devices, max_devices))
    groups = draw(_replica_groups(used, tp))
    schedule = draw(st.sampled_from(schedules))
    blocks = num_blocks or draw(st.integers(1, max_blocks))
    parts = draw(_composition(len(groups), max_parts=max_pipelines))
    pipelines, rest = [], groups
    for part in parts:
        mine, rest = rest[:part], rest[part:]
        chunks = max_chunks if schedule is ScheduleKind.INTERLEAVED else 1
        pipelines.append(draw(_pipelines(mine, blocks, max_micro_batches, max_share, chunks)))
    return Plan(
        model=model,
        global_batch=sum(p.micro_batches * p.micro_batch for p in pipelines),
        sequence=sequence,
        schedule=schedule,
        pipelines=tuple(pipelines),
    )


@st.composite
def settings_of_a_plan(draw: DrawFn, *, max_blocks: int = 6) -> tuple[Cluster, ModelSpec, Plan]:
    """A cluster, a model, and a valid plan for both."""
    cluster = draw(clusters())
    model = draw(models(max_blocks=max_blocks))
    plan = draw(
        plans(
            devices=cluster.devices, num_blocks=len(model.blocks), model=model.name, sequence=model.sequence
        )
    )
    return cluster, model, plan


@st.composite
def _pipelines(
    draw: DrawFn,
    groups: Sequence[tuple[str, ...]],
    blocks: int,
    max_micro_batches: int,
    max_share: int,
    max_chunks: int,
) -> Pipeline:
    """One pipeline that uses every group of devices as a replica, of up to ``max_chunks`` stages each."""
    widths = draw(_composition(len(groups), max_parts=blocks))
    chunks = draw(st.integers(1, min(max_chunks, blocks // len(widths))))
    micro_batch = draw(st.integers(max(widths), max(widths) * max_share))
    rows, rest = [], groups
    for width in widths:
        mine, rest = rest[:width], rest[width:]
        shares = draw(_parts(micro_batch, width))
        rows.append(tuple(Replica(devices=d, share=share) for d, share in zip(mine, shares, strict=True)))
    stages = [
        Stage(layers=layers, recompute=draw(st.booleans()), replicas=replicas)
        for layers, replicas in zip(
            pairwise(draw(_cuts(blocks, len(rows) * chunks))), rows * chunks, strict=True
        )
    ]
    micro_batches = draw(st.integers(1, max_micro_batches))
    return Pipeline(micro_batches=micro_batches, micro_batch=micro_batch, stages=tuple(stages))


@st.composite
def _some_devices(draw: DrawFn, devices: Sequence[str] | None, at_most: int) -> list[str]:
    if devices is None:
        gpus = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        devices = [
            f"{node}:{index}" for node, count in zip("abc", gpus, strict=False) for index in range(count)
        ]
    order = draw(st.permutations(list(devices)))
    return order[: draw(st.integers(1, min(at_most, len(order))))]


@st.composite
def _replica_groups(draw: DrawFn, devices: Sequence[str], tp: int | None) -> list[tuple[str, ...]]:
    """Tensor-parallel groups, each in one node; in an order that mixes the nodes."""
    groups: list[tuple[str, ...]] = []
    for node in dict.fromkeys(node_of(device) for device in devices):
        mine = [device for device in devices if node_of(device) == node]
        while mine:
            size = draw(st.integers(1, len(mine))) if tp is None else min(tp, len(mine))
            groups.append(tuple(mine[:size]))
            mine = mine[size:]
    return draw(st.permutations(groups))


@st.composite
def _composition(draw: DrawFn, total: int, *, max_parts: int) -> list[int]:
    """``total`` as an ordered sum of 1 to ``max_parts`` positive parts."""
    return draw(_parts(total, draw(st.integers(1, min(total, max_parts)))))


@st.composite
def _parts(draw: DrawFn, total: int, count: int) -> list[int]:
    """``total`` as an ordered sum of exactly ``count`` positive parts."""
    return [b - a for a, b in pairwise(draw(_cuts(total, count)))]


@st.composite
def _cuts(draw: DrawFn, total: int, count: int) -> list[int]:
    """``0 < ... < total``: the edges of ``count`` parts."""
    inner = st.lists(st.integers(1, max(total - 1, 1)), min_size=count - 1, max_size=count - 1, unique=True)
    return [0, *sorted(draw(inner)), total]


@st.composite
def _blocks(draw: DrawFn, kind: str, experts: bool) -> BlockSpec:
    return BlockSpec(
        kind=kind,
        parameters=draw(st.integers(1, 10**6)),
        activation_bytes=draw(st.integers(0, 10**7)),
        output_bytes=draw(st.integers(1, 10**6)),
        flops=float(draw(st.integers(1, 10**9))),
        experts=draw(st.sampled_from((4, 8))) if experts else 0,
    )


def _pairs(entries: Sequence[NodeEntry]) -> SearchStrategy[tuple[NetworkPair, ...]]:
    """None, or one slower link between the first two entries."""
    if len(entries) < 2:
        return st.just(())
    pair = NetworkPair(between=(entries[0].name, entries[1].name), inter_GBps=0.5, latency_us=100.0)
    return st.sampled_from(((), (pair,)))


@st.composite
def profiles(
    draw: DrawFn, model: ModelSpec, *, types: Sequence[str], max_tp: int = 3, max_samples: int = 9
) -> Profile:
    """Measurements of every kind of block at every TP degree for 1 to ``max_samples`` samples."""
    timings = []
    for kind in dict.fromkeys(block.kind for block in model.blocks):
        for device in types:
            for tp in range(1, max_tp + 1):
                for samples in (1, 2, max_samples):
                    seconds = draw(st.floats(1e-3, 1.0)) * samples
                    timings.append(
                        BlockTiming(
                            kind=kind,
                            device=device,
                            tp=tp,
                            samples=samples,
                            forward_s=seconds,
                            backward_s=draw(st.sampled_from((1.0, 2.0, 3.0))) * seconds,
                        )
                    )
    return Profile(
        model=model.name,
        sequence=model.sequence,
        timings=tuple(timings),
        tp_communication=draw(st.sampled_from(TpCommunication)),
        step_s=draw(st.sampled_from((0.0, 0.01))),
    )


@st.composite
def problems(draw: DrawFn, *, types: Sequence[str]) -> tuple[Plan, Request]:
    """A plan of any schedule without runs in turns, and the request that it answers."""
    cluster, model = draw(clusters(types=types)), draw(models())
    plan = draw(
        plans(
            devices=cluster.devices,
            num_blocks=len(model.blocks),
            model=model.name,
            sequence=model.sequence,
            schedules=[kind for kind in ScheduleKind if kind is not ScheduleKind.INTERLEAVED],
        )
    )
    request = Request(
        cluster=cluster,
        model=model,
        profile=draw(profiles(model, types=types, max_samples=20)),
        global_batch=plan.global_batch,
        schedules=(plan.schedule,),
    )
    return plan, request
