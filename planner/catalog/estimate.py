"""Analytic seconds of a block of a model on a tensor-parallel group inside a usual node."""

from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import TpCommunication
from arachne_runtime.units import GB, Bytes, Seconds

from .analytic import Speed, tensor_share
from .devices import DeviceType


def estimate(
    model: ModelSpec,
    block: int,
    on: DeviceType,
    tp: int,
    samples: int,
    *,
    arithmetic: str,
    communication: TpCommunication,
) -> tuple[Seconds, Seconds]:
    """Forward and backward of block number ``block``; ``arithmetic`` is the dtype of its matrix products.

    NotMeasuredError for a device type without a rate for it.
    """
    forward, backward = Speed.of(on, arithmetic).seconds(
        model.blocks[block],
        samples,
        weight_bytes=model.bytes_per_parameter.weight,
        tp=tp,
        share=tensor_share(model, tp, samples),
    )
    if tp > 1 and communication is TpCommunication.INCLUDED:
        extra = _collectives(model, block) * _ring(on, tp, samples * _width(model, block))
        return forward + extra, backward + extra
    return forward, backward


def _collectives(model: ModelSpec, block: int) -> int:
    stated = model.blocks[block].tp_collectives
    if stated is not None:
        return stated
    return 1 if block in (0, len(model.blocks) - 1) else 2


def _width(model: ModelSpec, block: int) -> Bytes:
    """Bytes a sample that a block's all-reduce sums: its output, the last one's input."""
    return model.blocks[block].output_bytes or model.blocks[block - 1].output_bytes


def _ring(on: DeviceType, tp: int, size: float) -> Seconds:
    """Ring all-reduce over the data sheet's link: 2 (tp - 1) messages of size / tp."""
    return 2 * (tp - 1) * (on.intra_latency_us * 1e-6 + size / tp / (on.intra_GBps * GB))
