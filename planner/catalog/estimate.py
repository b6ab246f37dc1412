"""Analytic seconds of a block of a model on a tensor-parallel group inside a usual node."""

from functools import partial

from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import TpCommunication
from arachne_runtime.units import GB, Seconds

from .analytic import Speed, tensor_share
from .collectives import num_collectives, ring_seconds, summed_bytes
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
        ring = ring_seconds(partial(_message_seconds, on), samples * summed_bytes(model, block), tp)
        extra = num_collectives(model, block) * ring
        return forward + extra, backward + extra
    return forward, backward


def _message_seconds(on: DeviceType, size: float) -> Seconds:
    """Over the data sheet's link between two devices of a node."""
    return on.intra_latency_us * 1e-6 + size / (on.intra_GBps * GB)
