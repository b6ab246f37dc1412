"""Random small planning problems: two device types, memory that binds, slow links, tied blocks, TP.

For the oracle, the property tests and the benchmark; the same seed gives the same problem everywhere.
"""

import random
from dataclasses import dataclass

from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.profile import BlockTiming, Profile, TpCommunication, UpdateTiming
from arachne_runtime.units import GIB, Bytes

from ..request import Request

MB = 10**6
TYPES = ("fast", "slow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large a problem may be."""

    devices: int = 6
    blocks: int = 6
    global_batch: int = 16
    micro_batch: int = 4
    tp: tuple[int, ...] = (1,)
    """TP degrees that are measured; above 1 nodes have up to four devices, else three."""


def random_request(seed: int, limits: Limits | None = None) -> Request:
    """A problem drawn from ``seed``: small enough for the oracle, by default as large as it takes."""
    limits = limits or Limits()
    rng = random.Random(f"problem {seed}")
    model = _model(rng, rng.randint(min(2, limits.blocks), limits.blocks))
    return Request(
        cluster=_cluster(rng, max(rng.randint(1, limits.devices) for _ in range(2)), model, max(limits.tp)),
        model=model,
        profile=_profile(rng, model, limits.micro_batch, limits.tp),
        global_batch=max(rng.randint(1, limits.global_batch) for _ in range(2)),
        schedules=rng.choice(
            [
                (ScheduleKind.ONE_F_ONE_B,),
                (ScheduleKind.GPIPE,),
                (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE),
            ]
        ),
        max_micro_batch=limits.micro_batch,
    )


def _model(rng: random.Random, num_blocks: int) -> ModelSpec:
    """Embedding, layers and head; the head may be tied to the embedding."""
    boundary = round(rng.choice([0.1, 1, 10, 40]) * MB)
    layer = _block(rng, "layer", boundary)
    head = _block(rng, "head", 0)
    if rng.random() < 0.3:
        embedding_parameters = rng.randint(1, 40) * MB
        head = _block(rng, "head", 0, parameters=embedding_parameters, tied=True)
        embedding = _block(rng, "embedding", boundary, parameters=embedding_parameters)
    else:
        embedding = _block(rng, "embedding", boundary)
    blocks = [embedding, *[layer] * (num_blocks - 2), head][:num_blocks]
    return ModelSpec(name="random", sequence=1, blocks=tuple(blocks))


def _block(
    rng: random.Random, kind: str, output: Bytes, parameters: int | None = None, tied: bool = False
) -> BlockSpec:
    held = rng.randint(1, 40) * MB if parameters is None else parameters
    return BlockSpec(
        kind=kind,
        parameters=held,
        activation_bytes=output + rng.choice([1, 30, 150, 500]) * MB,
        output_bytes=output,
        flops=1e9,
        tied_to=0 if tied else None,
        tied_parameters=held if tied else 0,
    )


def _cluster(rng: random.Random, num_devices: int, model: ModelSpec, most_tp: int) -> Cluster:
    """Nodes of one to four devices of two types; memories from plenty to hardly enough for all together."""
    entries: list[NodeEntry] = []
    scale = _model_bytes(model) / GIB
    memory = {t: round(1.2 + scale * rng.choice([1.3 / num_devices, 0.6, 1.0, 3.0]), 3) for t in TYPES}
    left = num_devices
    while left:
        gpus = min(left, rng.choice([1, 1, 2, 3] if most_tp == 1 else [1, 2, 4, 4]))
        kind = rng.choice(TYPES)
        entries.append(
            NodeEntry(
                name=f"n{len(entries)}",
                device=kind,
                gpus=gpus,
                memory_GiB=memory[kind],
                intra_GBps=rng.choice([8.0, 60.0]),
            )
        )
        left -= gpus
    network = Network(
        inter_GBps=rng.choice([0.5, 2.0, 12.0]),
        latency_us=rng.choice([5.0, 100.0]),
        pair=_pairs(rng, entries),
    )
    return Cluster(node=tuple(entries), network=network)


def _pairs(rng: random.Random, entries: list[NodeEntry]) -> tuple[NetworkPair, ...]:
    """Sometimes one link that is much slower than the others."""
    if len(entries) < 2 or rng.random() < 0.7:
        return ()
    a, b = rng.sample([entry.name for entry in entries], 2)
    return (NetworkPair(between=(a, b), inter_GBps=0.2),)


def _model_bytes(model: ModelSpec) -> float:
    """Weights, gradients and moments of the whole model with a few samples of activations."""
    return sum(16 * b.parameters + 4 * b.activation_bytes for b in model.blocks)


def _profile(rng: random.Random, model: ModelSpec, most: int, degrees: tuple[int, ...]) -> Profile:
    """Seconds grow less than samples do; the slow type is slower, not by the same factor everywhere."""
    kinds = list(dict.fromkeys(b.kind for b in model.blocks))
    cost = {"embedding": rng.uniform(0.1, 1), "layer": rng.uniform(1, 3), "head": rng.uniform(0.5, 4)}
    slower = {t: 1.0 if t == "fast" else rng.uniform(1.2, 4) for t in TYPES}
    timings: list[BlockTiming] = []
    updates: list[UpdateTiming] = []
    for device in TYPES:
        for kind in kinds:
            factor = 10e-3 * cost[kind] * slower[device] * rng.uniform(0.8, 1.2)
            fixed, backward = rng.uniform(0, 0.6), rng.uniform(1.4, 2.4)
            update = factor * rng.uniform(0.05, 0.5)
            for tp in degrees:
                # one degree is never tp times as fast, and some types gain little
                part = 1.0 if tp == 1 else 1 / (1 + (tp - 1) * rng.uniform(0.3, 0.95))
                timings += _timings(kind, device, tp, factor * part, fixed, backward, most)
                updates.append(UpdateTiming(kind=kind, device=device, tp=tp, update_s=update / tp))
    step_s = rng.choice([0.0, 1e-3])
    told = TpCommunication.INCLUDED if degrees == (1,) else rng.choice(list(TpCommunication))
    return Profile(
        model="random",
        sequence=1,
        tp_communication=told,
        timings=tuple(timings),
        updates=tuple(updates),
        step_s=step_s,
    )


def _timings(
    kind: str, device: str, tp: int, factor: float, fixed: float, backward: float, most: int
) -> list[BlockTiming]:
    return [
        BlockTiming(
            kind=kind,
            device=device,
            tp=tp,
            samples=n,
            forward_s=factor * (fixed + n),
            backward_s=factor * (fixed + backward * n),
        )
        for n in range(1, most + 1)
    ]
