"""Seconds of a block that nobody measured: FLOPs, bytes moved, and efficiencies fitted on what was measured.

A forward of n samples takes, on a device of peak P and memory bandwidth M,

    factor * (n F (1 / (e P) + 1 / (q M)) + n a A / M + w W / M + c)

with FLOPs F, kept activations A and weights W of the block; a backward has twice the FLOPs and constants of
its own. The constants and the factor of each device type stand in efficiency.toml, written by
``bench.catalog.fit`` with its errors; docs/catalog.md explains them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.units import GB, Seconds

from .devices import DeviceType

EXPERT_PASSES = {"forward": 1.0, "backward": 4.0}
"""How often expert weights cross the memory bus a micro-batch, few tokens or many: read; read, and their
gradient written and added (read, written). Derived, not measured."""


HALVES = frozenset({"attention", "mlp", "moe"})
"""Kinds of half-layer blocks: each launches about half of a layer's kernels, so two of them cost what the
layer does. Derived: the constants were fitted on whole layers, which cannot tell the halves apart."""


class Work(Document, frozen=True, kw_only=True):
    """Constants of one direction."""

    efficiency: float
    """e: part of the peak that matrix products reach where memory does not bind."""
    flops_per_byte: float
    """q: FLOPs of matrix products for each byte that they move."""
    activation_passes: float
    """a: bytes moved for each byte kept."""
    head_passes: float
    """The same in the last block, where most of it is logits; measured in fp32 only."""
    weight_passes: float
    """w: bytes moved for each byte of weights, once a micro-batch."""
    fixed_s: Seconds
    """c: launching the kernels of a layer; half of it for half a layer."""


class Errors(Document, frozen=True, kw_only=True):
    """Of the seconds of a layer, forward and backward together, as a part of the measured ones."""

    held_out_mean: float
    """On device types that the fit did not see, mean over types."""
    held_out_worst: float
    """The same, of the single worst measurement."""
    fitted_mean: float
    """On the types that it saw, each with its own factor."""
    measurements: int


class Arithmetic(Document, frozen=True, kw_only=True):
    """What one way of computing matrix products reaches."""

    forward: Work
    backward: Work
    factors: Mapping[str, float]
    """By device type: its measured seconds over those of the formula, in the median."""
    errors: Errors


class Tensor(Document, frozen=True, kw_only=True):
    """Computing under tensor parallelism, without its communication, as parts of the seconds of one device.

    A device of t does (1 - s) / t + s of it, s = serial * (hidden / 4096)^-width * (tokens / 2048)^-tokens *
    (t / 2)^-degree, never above 1: what all devices repeat, and what smaller matrices lose.
    """

    serial: float
    width: float
    tokens: float
    degree: float
    error_mean: float
    error_worst: float

    def share(self, tp: int, hidden: float, tokens: float) -> float:
        """What one device of ``tp`` does."""
        if tp == 1:
            return 1.0
        wide, long = (hidden / 4096) ** -self.width, (tokens / 2048) ** -self.tokens
        repeated = min(1.0, float(self.serial * wide * long * (tp / 2) ** -self.degree))
        return (1 - repeated) / tp + repeated


class Rates(Document, frozen=True, kw_only=True):
    """All of efficiency.toml."""

    arithmetic: Mapping[str, Arithmetic]
    """By ``half`` (16-bit on tensor cores), ``tfloat32`` and ``float32``."""
    like: Mapping[str, str]
    """Device types without measurements, and the one whose factor stands for theirs."""
    tensor: Tensor

    def factor(self, kind: str, device: str) -> float:
        """The device type's own factor, that of the type it is like, else 1."""
        known = self.arithmetic[kind].factors
        return known.get(device, known.get(self.like.get(device, ""), 1.0))


@cache
def rates() -> Rates:
    """The fitted constants that the wheel carries."""
    raw = (resources.files(__package__) / "efficiency.toml").read_bytes()
    return msgspec.toml.decode(raw, type=Rates)


@dataclass(frozen=True, slots=True)
class Speed:
    """How a device type computes a dtype: by the arithmetic it has for it."""

    device: DeviceType
    kind: str
    """A key of ``Rates.arithmetic``."""
    peak: float
    """FLOP/s."""

    @classmethod
    def of(cls, device: DeviceType, dtype: str) -> "Speed":
        """A dtype without an arithmetic of its own (bfloat16 before Ampere) is computed in float32."""
        kind = {"bfloat16": "half", "float16": "half", "tfloat32": "tfloat32"}.get(dtype, "float32")
        peak = device.flops.get(dtype)
        if peak is None and dtype != "float64":
            kind, peak = "float32", device.flops.get("float32")
        if peak is None or device.memory_GBps is None:
            raise NotMeasuredError(
                f"device type {device.name!r}: no {dtype} rate or memory bandwidth is known, so nothing can "
                f"be estimated; run `arachne profile` on it"
            )
        return cls(device, kind, peak)

    def seconds(
        self, block: BlockSpec, samples: int, *, weight_bytes: int, tp: int = 1, share: float = 1.0
    ) -> tuple[Seconds, Seconds]:
        """Forward and backward of ``samples`` samples; a device of ``tp`` holds 1 / tp and does ``share``."""
        constants = rates().arithmetic[self.kind]
        factor = rates().factor(self.kind, self.device.name)
        weights = weight_bytes / tp
        return (
            factor * self._direction(constants.forward, block, samples, weights, "forward", share),
            factor * self._direction(constants.backward, block, samples, weights, "backward", share),
        )

    def _direction(
        self, work: Work, block: BlockSpec, samples: int, weight_bytes: float, direction: str, share: float
    ) -> Seconds:
        assert self.device.memory_GBps is not None
        bandwidth = self.device.memory_GBps * GB
        flops = samples * block.flops * (1 if direction == "forward" else 2)
        dense = block.parameters - block.expert_parameters
        weights = work.weight_passes * dense + EXPERT_PASSES[direction] * block.expert_parameters
        passes = work.activation_passes if block.output_bytes else work.head_passes
        moved = share * passes * samples * block.activation_bytes + weights * weight_bytes
        products = flops * (1 / (work.efficiency * self.peak) + 1 / (work.flops_per_byte * bandwidth))
        fixed_s = work.fixed_s / 2 if block.kind in HALVES else work.fixed_s
        return share * products + moved / bandwidth + fixed_s


def tensor_share(model: ModelSpec, tp: int, samples: int) -> float:
    """Part of the computing that one device of a tensor-parallel group does; 1 for one device."""
    return rates().tensor.share(tp, hidden_of(model), samples * model.sequence)


def hidden_of(model: ModelSpec) -> int:
    """Width of what crosses the first boundary: elements a token."""
    element = {"float64": 8, "float32": 4}.get(model.dtype, 2)
    return max(1, model.blocks[0].output_bytes // (model.sequence * element))
