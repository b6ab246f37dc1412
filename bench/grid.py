"""The problems of ``bench.planners``: models and clusters of the paper (arXiv 2609.34244) and our own.

Models, types, numbers of devices and nodes of four are the paper's; it does not state what follows, which is
ours: sequences of 2,048 tokens, bfloat16 mixed precision, a global batch of 1,024 samples, 200 Gb/s for each
node, the five mixes of unlike nodes, the four types, and the types of the mixture-of-experts models.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.schedule import PRICEABLE
from planner import catalog
from planner.request import Request

SEQUENCE = 2048
GLOBAL_BATCH = 1024
INTER_GBPS = 25.0
"""HDR InfiniBand, 200 Gb/s, one NIC a node."""
LATENCY_US = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of one type and size."""

    device: str
    gpus: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One problem: a model on a cluster."""

    group: str
    """Which part of the grid it belongs to."""
    model: str
    nodes: tuple[Nodes, ...]

    @property
    def devices(self) -> dict[str, int]:
        """Devices by type."""
        found: dict[str, int] = {}
        for n in self.nodes:
            found[n.device] = found.get(n.device, 0) + n.gpus * n.count
        return found

    @property
    def name(self) -> str:
        """Model and devices, as a file may be called."""
        apart = "-apart" if {n.gpus for n in self.nodes} == {1, 4} else ""
        return f"{self.model}_{'_'.join(f'{count}x{kind}' for kind, count in self.devices.items())}{apart}"

    def request(self) -> Request:
        """The problem in the plain space: 1F1B, whole layers, no ZeRO."""
        return self._request(self.spec(half_layers=False))

    def larger(self) -> Request:
        """The same in the larger space: every schedule with a price, half-layer blocks, ZeRO-1."""
        return self._request(self.spec(half_layers=True), schedules=PRICEABLE, max_zero=1)

    def spec(self, *, half_layers: bool) -> ModelSpec:
        """The model."""
        return catalog.model(self.model, sequence=SEQUENCE, dtype="bfloat16", half_layers=half_layers)

    def _request(
        self,
        model: ModelSpec,
        *,
        schedules: tuple[ScheduleKind, ...] = (ScheduleKind.ONE_F_ONE_B,),
        max_zero: int = 0,
    ) -> Request:
        entries = tuple(
            NodeEntry(name=f"{n.device.lower()}-{n.gpus}g", device=n.device, gpus=n.gpus, count=n.count)
            for n in self.nodes
        )
        return Request(
            cluster=Cluster(node=entries, network=Network(inter_GBps=INTER_GBPS, latency_us=LATENCY_US)),
            model=model,
            profile=catalog.profile_for(model, self.devices, tp_degrees=(1, 2, 4)),
            global_batch=GLOBAL_BATCH,
            schedules=schedules,
            max_zero=max_zero,
        )


def _fours(**devices: int) -> tuple[Nodes, ...]:
    """Nodes of four; ``A100_40=32`` is 32 devices of the type A100-40."""
    return tuple(
        Nodes(device=kind.replace("_", "-"), gpus=4, count=count // 4) for kind, count in devices.items()
    )


def _mixed(**devices: tuple[int, int]) -> tuple[Nodes, ...]:
    """By type: nodes of four, and nodes of one."""
    return tuple(
        Nodes(device=kind.replace("_", "-"), gpus=gpus, count=count)
        for kind, counts in devices.items()
        for gpus, count in zip((4, 1), counts, strict=True)
    )


UNLIKE_NODES = (
    ("llama-3-8b", _mixed(A100_40=(6, 8), H100=(4, 4))),
    ("llama-3-8b", _mixed(A100_40=(12, 8), H100=(8, 16))),
    ("llama-3-8b", _mixed(A6000=(16, 16), H100=(16, 16))),
    ("qwen3-32b", _mixed(A100_40=(32, 32), H100=(20, 16))),
    ("qwen3-32b", _mixed(A100_40=(32, 32), A6000=(24, 32), H100=(24, 32))),
)
"""52, 104, 160, 256 and 416 devices in nodes of four and of one."""


def full() -> Iterator[Cell]:
    """The whole grid."""
    for model in ("llama-3-8b", "qwen3-32b"):
        for n in (32, 80, 128):
            yield Cell(group="two types", model=model, nodes=_fours(A100_40=n, H100=n))
        for a, b, h in ((32, 32, 64), (64, 64, 128), (128, 128, 256)):
            yield Cell(group="three types", model=model, nodes=_fours(A100_40=a, A6000=b, H100=h))
    for model, nodes in UNLIKE_NODES:
        yield Cell(group="unlike nodes", model=model, nodes=nodes)
    for n in (12, 24, 48):
        model = "llama-3-8b" if n == 12 else "qwen3-32b"
        yield Cell(group="four types", model=model, nodes=_fours(A6000=n, A100_40=n, L40S=n, H100=n))
    for n in (64, 128, 256):
        yield Cell(group="64B", model="qwen3-64b", nodes=_fours(A100_80=n, H100=n))
    for model in ("mixtral-8x7b", "qwen3-30b-a3b"):
        for n in (32, 80, 128):
            yield Cell(group="experts", model=model, nodes=_fours(A100_40=n, H100=n))
    for n in (80, 128, 256):
        yield Cell(group="experts", model="deepseek-v3-like", nodes=_fours(H100=n, H200=n))


def quick() -> Iterator[Cell]:
    """Four small cells: two types, three types, unlike nodes, experts."""
    yield Cell(group="two types", model="llama-3-8b", nodes=_fours(A100_40=32, H100=32))
    yield Cell(group="three types", model="qwen3-32b", nodes=_fours(A100_40=32, A6000=32, H100=64))
    yield Cell(group="unlike nodes", model=UNLIKE_NODES[0][0], nodes=UNLIKE_NODES[0][1])
    yield Cell(group="experts", model="qwen3-30b-a3b", nodes=_fours(A100_40=32, H100=32))
