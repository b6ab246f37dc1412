"""Real training runs with their plans, read from the form of eth-easl/sailor's measured runs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from planner import catalog
from planner.request import Request

CARRIED = Path(__file__).parent / "data" / "sailor_runs.json"
DEVICES = {"GH-96": "GH200"}
"""The source's names, where ours differ."""
MODELS = {26: "opt-350m", 34: "gpt-neo-2.7b"}
"""By number of blocks: the files do not name their model."""
MEASURED_LINKS_GBPS = 1e4
"""No limit: the profile's measured links count."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One real run."""

    name: str
    plan: Plan
    request: Request
    iteration_s: float
    peak_bytes: int

    @property
    def family(self) -> str:
        """``GH200`` or ``RTX``, or the device types."""
        types = sorted({entry.device for entry in self.request.cluster.node})
        return "RTX" if all("RTX" in t for t in types) else "+".join(types)

    @property
    def is_apart(self) -> bool:
        """Ruled by fixed costs that no layer profile holds: a single node, or a single micro-batch."""
        single = all(pipeline.micro_batches == 1 for pipeline in self.plan.pipelines)
        return single or len(self.request.cluster.node) == 1


def carried_runs() -> list[MeasuredRun]:
    """The runs that the repository carries."""
    runs = json.loads(CARRIED.read_text())["runs"]
    return [measured_run(name, document) for name, document in runs.items()]


def runs_in(folder: Path) -> list[MeasuredRun]:
    """Every ``*.json`` of a folder; UsageError where there is none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise UsageError(f"{folder} holds no *.json of a measured run")
    return [measured_run(file.stem, json.loads(file.read_text())) for file in files]


def measured_run(name: str, document: dict[str, Any]) -> MeasuredRun:
    """One document: ``pipeline_list`` is the plan, ``real`` the seconds, ``max_mem`` the peak bytes."""
    shelf = _Shelf()
    columns = sum(pipeline["dp"][0] for pipeline in document["pipeline_list"])
    micro_batches = document["gbs"] // (document["mbs"] * columns)
    pipelines = [
        pipeline
        for raw in document["pipeline_list"]
        for pipeline in _pipelines(raw, micro_batches, document["mbs"], shelf)
    ]
    model = _model(name, pipelines[0].stages[-1].layers[1])
    plan = Plan(
        model=model.name,
        global_batch=sum(p.micro_batches * p.micro_batch for p in pipelines),
        sequence=model.sequence,
        pipelines=tuple(pipelines),
    )
    cluster = Cluster(
        node=tuple(shelf.nodes), network=Network(inter_GBps=MEASURED_LINKS_GBPS, latency_us=0.0)
    )
    request = Request(
        cluster=cluster, model=model, profile=catalog.profile(model.name), global_batch=plan.global_batch
    )
    return MeasuredRun(
        name=name, plan=plan, request=request, iteration_s=document["real"], peak_bytes=document["max_mem"]
    )


def _model(name: str, num_blocks: int) -> ModelSpec:
    if num_blocks not in MODELS:
        known = ", ".join(f"{count} ({model})" for count, model in MODELS.items())
        raise UsageError(f"{name}: no known model has {num_blocks} blocks; known: {known}")
    return catalog.model(MODELS[num_blocks])


def _pipelines(raw: dict[str, Any], micro_batches: int, samples: int, shelf: "_Shelf") -> Iterator[Pipeline]:
    """The source's pipeline has ``dp`` columns, each a replica of every stage: one pipeline of ours."""
    stages: list[list[Stage]] = [[] for _ in range(raw["dp"][0])]
    for layers, replicas in zip(raw["layers_per_stage"], raw["tmp_per_stage"], strict=True):
        for column, (kinds, tp) in zip(stages, replicas, strict=True):
            ((device, gpus, _),) = kinds
            replica = Replica(devices=shelf.take(DEVICES.get(device, device), gpus, tp), share=samples)
            column.append(Stage(layers=(layers[0], layers[-1] + 1), replicas=(replica,)))
    for column in stages:
        yield Pipeline(micro_batches=micro_batches, micro_batch=samples, stages=tuple(column))


class _Shelf:
    """Nodes, filled in the order in which the source numbers its ranks: stage by stage."""

    def __init__(self) -> None:
        self.nodes: list[NodeEntry] = []
        self._free: dict[tuple[str, int], list[str]] = {}

    def take(self, device: str, gpus: int, count: int) -> tuple[str, ...]:
        """``count`` devices of one node of ``gpus``."""
        free = self._free.setdefault((device, gpus), [])
        if len(free) < count:
            node = NodeEntry(name=f"n{len(self.nodes)}", device=device, gpus=gpus)
            self.nodes.append(node)
            free[:] = [f"{node.name}:{i}" for i in range(gpus)]
        taken = tuple(free[:count])
        del free[:count]
        return taken
