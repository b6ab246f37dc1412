"""Measures each kind of block: seconds by number of samples, the optimizer's step, bytes, FLOPs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.flop_counter import FlopCounterMode

from ..errors import ModelError, UsageError
from ..model.experts import MoE
from ..model.parts import ModelParts
from ..model.workload import Workload
from ..plan.model import BlockSpec, ModelSpec, ParameterBytes
from ..plan.profile import BlockTiming, UpdateTiming, WorkingBytes
from ..plan.shards import Axis
from ..units import Bytes, Seconds
from .kept import kept_bytes, view_bytes
from .probe import Passes, Probe, find_probes, kinds_by_cost
from .timing import DEFAULT_EFFORT, Effort, Phases, seconds_in_turn
from .together import Together
from .working import temporary_bytes, working_bytes

DEFAULT_SAMPLES = (1, 2, 4, 8, 16, 32)
"""Log-spaced, since a profile is read linearly between two neighbours."""

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""(kind, samples or 0 for its optimizer, batches left)."""


def _silently(kind: str, samples: int, left: int) -> None:
    """Nobody waits to be told."""


@dataclass(frozen=True, slots=True)
class BlockMeasurements:
    """What was measured of all kinds of blocks on one device."""

    model: ModelSpec
    timings: tuple[BlockTiming, ...]
    updates: tuple[UpdateTiming, ...]


def measure_blocks(
    workload: Workload,
    *,
    device: torch.device,
    device_type: str,
    samples: Sequence[int] = DEFAULT_SAMPLES,
    together: Together | None = None,
    effort: Effort = DEFAULT_EFFORT,
    on_progress: OnProgress | None = None,
) -> BlockMeasurements:
    """Time every kind of block of a workload on ``device``, all ranks at the same time.

    Every rank passes the same workload and samples. Raises ModelError where the model cannot be cut.
    """
    if not samples or list(samples) != sorted(set(samples)) or samples[0] < 1:
        raise UsageError(f"samples must ascend from at least 1, got {list(samples)}")
    together = together or Together.of_default_group()
    parts = ModelParts.of(workload.model)
    _shared(parts)  # what a model file cannot say ends here, before anything is timed
    probes = find_probes(parts, workload, samples[-1], device=device)
    steps = _Steps(probes, workload, device, device_type, together, effort)
    say = on_progress or _silently
    timings, updates = steps.blocks(samples, say), steps.updates(say)
    model = _model_spec(parts, workload, probes, timings, steps.optimizer_bytes)
    return BlockMeasurements(model, timings, updates)


class _Steps:
    """The measurements, with what they share."""

    def __init__(
        self,
        probes: Sequence[Probe],
        workload: Workload,
        device: torch.device,
        device_type: str,
        together: Together,
        effort: Effort,
    ) -> None:
        self._probes = probes
        self._device, self._type = device, device_type
        self._together, self._effort = together, effort
        self._workload = workload
        self.optimizer_bytes = 0
        """Bytes of optimizer state by parameter, the largest of all kinds."""

    def blocks(self, samples: Sequence[int], say: OnProgress) -> tuple[BlockTiming, ...]:
        """Forward and backward of a block of each kind for each number of samples."""
        asked = [(probe, count) for probe in self._probes for count in samples]
        bytes_of = [block_bytes(probe, count) for probe, count in asked]
        later = len(self._probes) * (self._effort.rounds + 1)
        found = self._in_turn(
            [partial(_both_ways, probe, count) for probe, count in asked],
            lambda index, left: say(asked[index][0].kind, asked[index][1], left + later),
        )
        return tuple(
            BlockTiming(
                kind=probe.kind,
                device=self._type,
                samples=count,
                forward_s=forward_s,
                backward_s=backward_s,
                activation_bytes=kept,
                working=working,
            )
            for (probe, count), (kept, working), (forward_s, backward_s) in zip(
                asked, bytes_of, found, strict=True
            )
        )

    def updates(self, say: OnProgress) -> tuple[UpdateTiming, ...]:
        """What a step does with all parameters of one block: their norm, the optimizer; 0 s without any."""
        updates = [u for probe in self._probes if (u := update_of(probe, self._workload)) is not None]
        found = self._in_turn(
            [update.phases for update in updates], lambda index, left: say(updates[index].kind, 0, left)
        )
        self.optimizer_bytes = max((update.state_bytes for update in updates), default=0)
        seconds = {update.kind: sum(phases) for update, phases in zip(updates, found, strict=True)}
        temporary = {update.kind: update.temporary_bytes(self._device) for update in updates}
        return tuple(
            UpdateTiming(
                kind=probe.kind,
                device=self._type,
                update_s=seconds.get(probe.kind, 0.0),
                temporary_bytes=temporary.get(probe.kind, 0),
            )
            for probe in self._probes
        )

    def _in_turn(
        self, works: Sequence[Callable[[], Phases]], on_batch: Callable[[int, int], None]
    ) -> tuple[tuple[Seconds, ...], ...]:
        return seconds_in_turn(
            works, device=self._device, together=self._together, effort=self._effort, on_batch=on_batch
        )


def block_bytes(probe: Probe, samples: int) -> tuple[Bytes, WorkingBytes]:
    """What a block keeps from forward to backward for so many samples, and what it needs beside."""
    return _kept(probe.passes(samples)), working_bytes(probe.passes(samples))


def update_of(probe: Probe, workload: Workload) -> "Update | None":
    """The end of a step for a block, with gradients made up; None without parameters that train."""
    parameters = [p for p in probe.stage.parameters() if p.requires_grad]
    if not parameters:
        return None
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.normal_(std=1e-3)
    return Update(probe.kind, parameters, workload.optimizer(parameters))


@dataclass(frozen=True, slots=True)
class Update:
    """The end of a step for the parameters of one block."""

    kind: str
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer

    def phases(self) -> Phases:
        """The norm of the gradients, and the optimizer's step."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return (lambda: float(get_total_norm(gradients)), self.optimizer.step)

    def temporary_bytes(self, device: torch.device) -> Bytes:
        """What norm and step allocate, once the optimizer has its states."""
        phases = self.phases()
        if not self.optimizer.state:
            self.optimizer.step()
        return temporary_bytes(device, lambda: [phase() for phase in phases], self._held())

    def _held(self) -> Iterator[torch.Tensor]:
        for parameter in self.parameters:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
            yield from (v for v in self.optimizer.state[parameter].values() if isinstance(v, torch.Tensor))

    @property
    def state_bytes(self) -> Bytes:
        """Bytes of optimizer state by parameter."""
        return _state_bytes(self.optimizer, self.parameters)


def _both_ways(probe: Probe, samples: int) -> Phases:
    """Forward and backward on inputs of their own, which live as long as they are timed."""
    passes = probe.passes(samples)
    return (passes.forward, passes.backward)


def _kept(passes: Passes) -> Bytes:
    """Bytes that a forward keeps for its backward."""
    kept = kept_bytes(
        passes.probe.stage,
        passes.inputs,
        passes.forward,
        context=passes.context,
        outputs_stay=passes.probe.loss is not None,
    )
    passes.forget()
    return kept


def _state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Bytes:
    """Bytes of optimizer state by parameter, rounded up; step counters are left out."""
    state = [
        value
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    ]
    return -(-view_bytes(state) // sum(p.numel() for p in parameters))


def _model_spec(
    parts: ModelParts,
    workload: Workload,
    probes: Sequence[Probe],
    timings: Sequence[BlockTiming],
    optimizer_bytes: Bytes,
) -> ModelSpec:
    sizes = {probe.kind: _sizes(probe, timings) for probe in probes}
    shared = _shared(parts)
    blocks = tuple(
        BlockSpec(
            kind=kind,
            parameters=sum(p.numel for p in parts.parameters_of(block)),
            activation_bytes=sizes[kind].activation_bytes,
            output_bytes=sizes[kind].output_bytes,
            flops=sizes[kind].flops,
            tied_to=shared[block][0],
            tied_parameters=shared[block][1],
            **_experts(parts, block, workload.sequence),
        )
        for block, kind in enumerate(kinds_by_cost(parts.kinds))
    )
    dtypes = [p.dtype for b in range(parts.num_blocks) for p in parts.parameters_of(b)]
    weight = max((dtype.itemsize for dtype in dtypes), default=4)
    return ModelSpec(
        name=workload.name,
        sequence=workload.sequence,
        dtype=_boundary_dtype(probes),
        bytes_per_parameter=ParameterBytes(weight=weight, gradient=weight, optimizer=optimizer_bytes),
        blocks=blocks,
    )


def _experts(parts: ModelParts, block: int, sequence: int) -> dict[str, Any]:
    """Fields of a block that holds routed experts: how many, how large, how many of them work on a token."""
    infos = [info for info in parts.parameters_of(block) if info.form.is_of_experts]
    units = [s.units[0] for info in infos for s in info.splits if s.axis is Axis.EXPERT]
    if not units:
        return {}
    routed, held = max(units), sum(info.numel for info in infos)
    top_k = next((m.top_k for b, _, m in parts.modules() if b == block and isinstance(m, MoE)), 0)
    return {
        "experts": routed,
        "expert_parameters": held,
        "experts_per_token": top_k,
        "expert_flops": 2.0 * held * top_k / routed * sequence,
    }


def _shared(parts: ModelParts) -> list[tuple[int | None, int]]:
    """For each block the owner of the parameters that it borrows, and how many these are."""
    owners = {tie.name: tie.blocks[0] for tie in parts.ties}
    found: list[tuple[int | None, int]] = []
    for block in range(parts.num_blocks):
        borrowed: dict[int, int] = {}
        for p in parts.parameters_of(block):
            if p.tie is not None and owners[p.tie] != block:
                borrowed[owners[p.tie]] = borrowed.get(owners[p.tie], 0) + p.numel
        if len(borrowed) > 1:
            raise ModelError(
                f"block {block} ({parts.kinds[block]}) shares parameters with blocks {sorted(borrowed)}; "
                f"a model file can name one owner: tie all of them to one block"
            )
        found.append(next(iter(borrowed.items()), (None, 0)))
    return found


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What one sample takes in a block of a kind."""

    activation_bytes: Bytes
    output_bytes: Bytes
    flops: float


def _sizes(probe: Probe, timings: Sequence[BlockTiming]) -> _Sizes:
    """By sample, at the largest number measured: what a block keeps once weighs least there."""
    largest = max((t for t in timings if t.kind == probe.kind), key=lambda t: t.samples)
    passes = probe.passes(largest.samples)
    with FlopCounterMode(display=False) as counter:
        outputs = passes.forward()
    passes.forget()
    crossing = 0 if probe.loss is not None else view_bytes(outputs)
    kept = largest.activation_bytes or 0
    return _Sizes(
        activation_bytes=-(-kept // largest.samples),
        output_bytes=-(-crossing // largest.samples),
        flops=counter.get_total_flops() / largest.samples,
    )


def _boundary_dtype(probes: Sequence[Probe]) -> str:
    """Dtype of what crosses the boundaries: of the first floating-point input behind the first block."""
    crossing = [x.dtype for probe in probes[1:] for x in probe.inputs if x.is_floating_point()]
    return str((crossing or [torch.float32])[0]).removeprefix("torch.")
