"""Random profiles: the catalog's estimates, off by as much as measurements are from them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import exp

from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.profile import (
    BlockTiming,
    Profile,
    Source,
    StepTiming,
    TpCommunication,
    UpdateTiming,
)
from arachne_runtime.units import GB, Seconds

from ..catalog import DeviceType
from ..catalog.estimate import estimate
from ..cost.tables import UPDATE_PASSES
from .models import log_uniform

MAX_SAMPLES = 64
"""Largest share, as ``catalog.profile_for`` estimates it."""

TYPE_SPREAD = 0.2
"""Standard deviation of the logarithm of a type's seconds over the estimate: efficiency.toml says 17 % on
average for types that the fit did not see."""
KIND_SPREAD = 0.08
"""The same of a kind of block on one type: 6.5 % for types that the fit saw."""
TENSOR_SPREAD = 0.06
"""The same of a TP degree: 3.7 % on average, 13 % at worst."""
UPDATE_SPREAD = 0.4
"""The same of an optimizer step; passes of 1.5 to 23 were measured (``cost.tables``)."""
MOST_EXTRA_S: Seconds = 1e-3
"""Of launching a block, beside the estimate: an uncompiled layer takes up to that on a slow host."""
INCLUDED = 0.3
"""Part of the profiles whose seconds hold the collectives."""
NO_TENSOR = 0.08
"""Part of the types that were measured on single devices only."""
STEP_S = (1e-3, 2e-2)
"""Fixed seconds of a step, in half of the profiles."""


@dataclass(frozen=True, slots=True)
class _Type:
    """How one device type differs from its data sheet."""

    on: DeviceType
    degrees: tuple[int, ...]
    kinds: Mapping[str, float]
    tensor: Mapping[int, float]
    updates: float
    extra_s: Seconds


def draw_profile(
    rng: random.Random, model: ModelSpec, types: Sequence[DeviceType], largest: Mapping[str, int]
) -> Profile:
    """Seconds of every kind of block on every type; ``largest``: devices of its largest node.

    TP degrees are powers of two up to that, shares powers of two as far as a layer of them fits.
    """
    first = {block.kind: i for i, block in reversed(list(enumerate(model.blocks)))}
    communication = TpCommunication.INCLUDED if rng.random() < INCLUDED else TpCommunication.EXCLUDED
    arithmetic = model.dtype
    if model.dtype == "float32" and rng.random() < 0.5:
        arithmetic = "tfloat32"
    own = [_draw_type(rng, known, largest[known.name], list(first)) for known in types]
    return Profile(
        model=model.name,
        sequence=model.sequence,
        dtype=model.dtype,
        tp_communication=communication,
        timings=tuple(row for each in own for row in _timings(model, first, each, arithmetic, communication)),
        updates=tuple(row for each in own for row in _updates(model, first, each)),
        steps=tuple(_steps(rng, types)),
    )


def _draw_type(rng: random.Random, on: DeviceType, largest: int, kinds: Sequence[str]) -> _Type:
    usual = exp(rng.gauss(0, TYPE_SPREAD))
    degrees = tuple(tp for tp in (1, 2, 4, 8) if tp <= largest)
    return _Type(
        on=on,
        degrees=(1,) if rng.random() < NO_TENSOR else degrees,
        kinds={kind: usual * exp(rng.gauss(0, KIND_SPREAD)) for kind in kinds},
        tensor={1: 1.0} | {tp: exp(rng.gauss(0, TENSOR_SPREAD)) for tp in (2, 4, 8)},
        updates=exp(rng.gauss(0, UPDATE_SPREAD)),
        extra_s=rng.choice((0.0, log_uniform(rng, MOST_EXTRA_S / 100, MOST_EXTRA_S))),
    )


def _timings(
    model: ModelSpec,
    first: Mapping[str, int],
    own: _Type,
    arithmetic: str,
    communication: TpCommunication,
) -> Iterator[BlockTiming]:
    for tp in own.degrees:
        for samples in _shares(model, own.on, tp):
            for kind, block in first.items():
                forward_s, backward_s = estimate(
                    model,
                    block,
                    own.on,
                    tp,
                    samples,
                    arithmetic=arithmetic,
                    communication=communication,
                )
                factor = own.kinds[kind] * own.tensor[tp]
                yield BlockTiming(
                    kind=kind,
                    device=own.on.name,
                    tp=tp,
                    samples=samples,
                    forward_s=_rounded(factor * forward_s + own.extra_s),
                    backward_s=_rounded(factor * backward_s + own.extra_s),
                    source=Source.ANALYTIC,
                )


def _shares(model: ModelSpec, on: DeviceType, tp: int) -> list[int]:
    """Powers of two while a layer of them fits."""
    layer = max(model.blocks, key=lambda b: b.flops if b.output_bytes else -1.0)
    powers = (2**i for i in range(MAX_SAMPLES.bit_length()))
    return list(takewhile(lambda n: n == 1 or n * layer.activation_bytes <= tp * on.memory_bytes, powers))


def _updates(model: ModelSpec, first: Mapping[str, int], own: _Type) -> Iterator[UpdateTiming]:
    """Passes over weights, gradients and moments."""
    for tp in own.degrees:
        for kind, block in first.items():
            yield UpdateTiming(
                kind=kind,
                device=own.on.name,
                tp=tp,
                update_s=_rounded(own.updates * _pass_s(model, model.blocks[block], own.on, tp)),
                source=Source.ANALYTIC,
            )


def _pass_s(model: ModelSpec, block: BlockSpec, on: DeviceType, tp: int) -> Seconds:
    assert on.memory_GBps is not None
    held = block.parameters * model.bytes_per_parameter.total / tp
    return UPDATE_PASSES * held / (on.memory_GBps * GB)


def _steps(rng: random.Random, types: Sequence[DeviceType]) -> Iterator[StepTiming]:
    if rng.random() < 0.5:
        for known in types:
            step_s = log_uniform(rng, *STEP_S)
            yield StepTiming(device=known.name, step_s=step_s, source=Source.ANALYTIC)


def _rounded(seconds: Seconds) -> Seconds:
    """Five digits: what is left of a difference between two platforms' logarithms cannot change a plan."""
    return float(f"{seconds:.5g}")
