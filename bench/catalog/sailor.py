"""Entries from eth-easl/sailor: layer times and memory in fp32, links of like pairs of device types."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, combinations
from math import log2
from pathlib import Path
from typing import Any

import msgspec

from arachne_runtime.plan.profile import LinkScope, Source, UpdateTiming
from planner.catalog.packed import Curve, Timings

SOURCE = "github.com/eth-easl/sailor, commit cf2c8e3"
LICENCE = "MIT License, Copyright (c) 2023 - present, ETH Zurich"
DEVICES = {
    "A100-40": "A100-40",
    "A100-80": "A100-80",
    "GH-96": "GH200",
    "RTX-2080": "RTX-2080",
    "RTX-3090": "RTX-3090",
    "Titan-RTX": "Titan-RTX",
    "V100-16": "V100-16",
}
"""The source's names and ours."""
MESSAGE_BYTES = tuple(10**6 * 2**i for i in range(11))
"""1 MB to 1.024 GB: where the source fitted its quadratics."""


def load(folder: Path, name: str) -> Any:
    """A table of the source."""
    return msgspec.json.decode((folder / "sailor" / f"{name}.json").read_bytes())


def timings(folder: Path, model: str, kinds: Mapping[str, tuple[str, ...]]) -> Iterator[Timings]:
    """Rows by kind, where ``kinds`` names the layer ids that make up one block of each kind (summed).

    What the source rounds to 0 was not measured and is left out.
    """
    times, memory = load(folder, "layer_times")[model], load(folder, "layer_memory")[model]
    for theirs, ours in DEVICES.items():
        by_samples: dict[str, Any] = times.get(theirs, {})
        for tp in sorted({int(t) for row in by_samples.values() for t in row}):
            for kind, ids in kinds.items():
                rows = [
                    (n, *_sums(by_samples[str(n)][str(tp)], ids))
                    for n in sorted(map(int, by_samples))
                    if str(tp) in by_samples[str(n)]
                ]
                rows = [row for row in rows if min(row[1:3]) > 0]
                if not rows:
                    continue
                samples, forward, backward = (tuple(column) for column in zip(*rows, strict=True))
                kept = sum(memory[str(tp)][i]["act_mem_bytes"] for i in ids) if str(tp) in memory else 0
                yield Timings(
                    kind=kind,
                    device=ours,
                    tp=tp,
                    samples=samples,
                    forward_s=forward,
                    backward_s=backward,
                    activation_bytes=tuple(n * kept for n in samples) if kept else (),
                )


def updates(folder: Path, model: str, kinds: Mapping[str, tuple[str, ...]]) -> Iterator[UpdateTiming]:
    """Mean over the micro-batches; the source gives each layer of a model the same figure."""
    times = load(folder, "layer_times")[model]
    for theirs, ours in DEVICES.items():
        by_samples: dict[str, Any] = times.get(theirs, {})
        for tp in sorted({t for row in by_samples.values() for t in row}, key=int):
            for kind, ids in kinds.items():
                found = [row[tp][ids[0]][2] for row in by_samples.values() if tp in row]
                if min(found) > 0:
                    mean = float(f"{sum(found) / len(found):.6g}")
                    yield UpdateTiming(kind=kind, device=ours, tp=int(tp), update_s=mean)


def links(folder: Path) -> Iterator[Curve]:
    """Links of like pairs as measured; of unlike pairs, between nodes, the slower side of the two."""
    table = load(folder, "network_coefficients")
    like: dict[tuple[str, int], Curve] = {}
    for theirs, ours in DEVICES.items():
        pair = table["intra"][theirs]["2"]
        yield _curve((ours, ours), LinkScope.INTRA, 1, _reader(pair))
        for count, fit in table["inter"][theirs].items():
            curve = _curve((ours, ours), LinkScope.INTER, int(count), _reader(fit))
            like[ours, int(count)] = curve
            yield curve
    for a, b in combinations(DEVICES.values(), 2):
        for senders in (1, 2, 4, 8):
            if (a, senders) in like and (b, senders) in like:
                yield _slower(like[a, senders], like[b, senders])


def _sums(layers: Mapping[str, list[float]], ids: tuple[str, ...]) -> tuple[float, float]:
    """Forward and backward seconds."""
    forward, backward = (sum(layers[i][k] for i in ids) for k in (0, 1))
    return float(f"{forward:.6g}"), float(f"{backward:.6g}")


def _reader(fit: Any) -> Callable[[float], float]:
    """Bytes a second at a message size: GB/s = a x^2 + b x + c, x = log2(MB), never above the maximum."""
    (a, b, c), most = fit

    def speed(size: float) -> float:
        x = log2(size / 1e6)
        return min(1e9 * (a * x * x + b * x + c), most)

    return speed


def _curve(pair: tuple[str, str], scope: LinkScope, senders: int, speed: Callable[[float], float]) -> Curve:
    """Between nodes the source's figure is the node's total, here each sender's own."""
    shared = senders if scope is LinkScope.INTER else 1
    seconds = accumulate((size * shared / speed(size) for size in MESSAGE_BYTES), max)
    return Curve(
        between=pair,
        scope=scope,
        senders=senders,
        bytes=MESSAGE_BYTES,
        seconds=tuple(float(f"{s:.6g}") for s in seconds),
    )


def _slower(a: Curve, b: Curve) -> Curve:
    return Curve(
        between=(a.between[0], b.between[0]),
        scope=a.scope,
        senders=a.senders,
        source=Source.ANALYTIC,
        bytes=a.bytes,
        seconds=tuple(map(max, a.seconds, b.seconds)),
    )
