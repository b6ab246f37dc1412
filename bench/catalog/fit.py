"""Fits the analytic estimate on what was measured: python -m bench.catalog.fit FOLDER.

Writes planner/catalog/efficiency.toml and prints the errors: on each device type when the fit did not see it
(held out), and when it did. A fit minimises the logarithm of prediction over measurement, every device type
with the same weight, outliers damped.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

import planner.catalog
from planner.catalog.analytic import Arithmetic, Errors, Rates, Speed, Tensor, Work
from planner.catalog.configs import architecture
from planner.catalog.counting import count

from . import aceso, sailor, zorse

LIKE = {
    "B200": "H100-NVL",
    "GH200": "H100-NVL",
    "H100": "H100-NVL",
    "H200": "H100-NVL",
    "MI250X": "H100-NVL",
    "MI300X": "H100-NVL",
    "L40S": "L4",
    "RTX-4090": "L4",
    "RTX-PRO-6000": "L4",
    "RTX-3090": "A6000",
    "RTX-2080": "V100-16",
    "Titan-RTX": "V100-16",
    "V100-32": "V100-16",
}
"""The nearest measured type by generation, or by what is unlike a data sheet about it."""
START = np.log([0.7, 100.0, 3.0, 1.0, 1e-4])
BOUNDS = (np.log([0.05, 5.0, 1e-2, 1e-2, 1e-6]), np.log([1.0, 3e3, 20.0, 50.0, 3e-3]))
"""Of efficiency, FLOPs a byte, passes of activations and weights, fixed seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured layer: forward and backward of some samples."""

    device: str
    samples: int
    flops: float
    kept: float
    weights: float
    """Bytes."""
    peak: float
    bandwidth: float
    seconds: tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds sailor/, zorse/ and aceso/")
    folder = parser.parse_args().folder
    rows = defaultdict(list)
    for kind, row in (*_zorse(folder), *_sailor(folder)):
        rows[kind].append(row)
    arithmetic = {kind: fit_arithmetic(kind, rows[kind]) for kind in ("half", "tfloat32", "float32")}
    found = Rates(
        arithmetic=_with_head(arithmetic, list(_heads(folder))),
        like=LIKE,
        tensor=_fit_tensor(list(aceso.layers(folder))),
    )
    path = Path(planner.catalog.__file__).parent / "efficiency.toml"
    path.write_text(_HEADER + _toml(msgspec.to_builtins(found)))


def _zorse(folder: Path) -> Iterator[tuple[str, Row]]:
    for s in zorse.series(folder):
        if s.model in zorse.CONFIGS:
            spec = count(architecture(s.model, zorse.CONFIGS[s.model]), sequence=s.sequence, dtype=s.dtype)
            for n, *seconds in zip(s.samples, s.forward_s, s.backward_s, strict=True):
                if n & (n - 1) == 0:
                    yield row_of(s.device, s.dtype, spec.blocks[1], n, tuple(seconds))


def _sailor(folder: Path) -> Iterator[tuple[str, Row]]:
    """OPT-350 and GPT-Neo-2.7: their Ampere and Hopper data-centre GPUs computed in TF32."""
    for model, name in (("OPT-350", "opt-350m"), ("GPT-Neo-2.7", "gpt-neo-2.7b")):
        config = planner.catalog.config(name)
        block = count(architecture(name, config), sequence=2048, dtype="float32").blocks[1]
        for t in sailor.timings(folder, model, {"layer": ("2",)}):
            dtype = "tfloat32" if t.device in ("A100-40", "A100-80", "GH200") else "float32"
            if t.tp == 1:
                for n, *seconds in zip(t.samples, t.forward_s, t.backward_s, strict=True):
                    yield row_of(t.device, dtype, block, n, tuple(seconds))


def _heads(folder: Path) -> Iterator[tuple[str, Row]]:
    """OPT-350's head on one device."""
    spec = planner.catalog.model("opt-350m")
    for t in sailor.timings(folder, "OPT-350", {"head": ("25",)}):
        dtype = "tfloat32" if t.device in ("A100-40", "A100-80", "GH200") else "float32"
        if t.tp == 1:
            for n, *seconds in zip(t.samples, t.forward_s, t.backward_s, strict=True):
                yield row_of(t.device, dtype, spec.blocks[-1], n, tuple(seconds))


def row_of(device: str, dtype: str, block: Any, samples: int, seconds: tuple[float, ...]) -> tuple[str, Row]:
    """A measurement, and the arithmetic that computed it."""
    speed = Speed.of(planner.catalog.device(device), dtype)
    forward, backward = seconds
    return speed.kind, Row(
        device=device,
        samples=samples,
        flops=block.flops,
        kept=block.activation_bytes,
        weights=block.parameters * (2 if speed.kind == "half" else 4),
        peak=speed.peak,
        bandwidth=speed.device.memory_GBps * 1e9,
        seconds=(forward, backward),
    )


class _Table:
    """Rows of one arithmetic as arrays."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.device = np.array([r.device for r in rows])
        n = np.array([r.samples for r in rows], float)
        self.flops = n * [r.flops for r in rows]
        self.kept = n * [r.kept for r in rows]
        self.weights = np.array([r.weights for r in rows], float)
        self.peak = np.array([r.peak for r in rows])
        self.bandwidth = np.array([r.bandwidth for r in rows])
        self.seconds = np.array([r.seconds for r in rows]).T

    def predict(self, x: np.ndarray, direction: int) -> np.ndarray:
        e, q, a, w, c = np.exp(x)
        flops = self.flops * (1 + direction)
        return (
            flops * (1 / (e * self.peak) + 1 / (q * self.bandwidth))
            + (a * self.kept + w * self.weights) / self.bandwidth
            + c
        )

    def fit(self, direction: int, seen: np.ndarray) -> np.ndarray:
        count_of = Counter(self.device[seen])
        weight = np.array([1 / np.sqrt(count_of[d]) if d in count_of else 0.0 for d in self.device]) * seen

        def gaps(x: np.ndarray) -> np.ndarray:
            return np.log(self.predict(x, direction) / self.seconds[direction]) * weight

        return least_squares(gaps, START, bounds=BOUNDS, loss="soft_l1", f_scale=0.1).x


def fit_arithmetic(kind: str, rows: Sequence[Row]) -> Arithmetic:
    """The constants that explain the rows best, and how well they tell each device type unseen."""
    table = _Table(rows)
    everything = np.ones(len(rows), bool)
    total = table.seconds.sum(axis=0)
    x = [table.fit(d, everything) for d in (0, 1)]
    ratio = total / sum(table.predict(x[d], d) for d in (0, 1))
    factors, means, worsts, fitted = {}, [], [], []
    for device in sorted(set(table.device)):
        mine = table.device == device
        factors[device] = float(f"{np.median(ratio[mine]):.3g}")
        blind = sum(table.predict(table.fit(d, ~mine), d) for d in (0, 1))[mine]
        gaps, own = np.abs(blind / total[mine] - 1), np.abs(factors[device] / ratio[mine] - 1)
        means.append(gaps.mean())
        worsts.append(gaps.max())
        fitted.append(own.mean())
        print(
            f"{kind:9} {device:9} {mine.sum():4} rows  factor {factors[device]:5.2f}  "
            f"held out: mean {gaps.mean():5.1%} worst {gaps.max():4.0%}  "
            f"with its factor: mean {own.mean():5.1%} worst {own.max():4.0%}"
        )
    errors = Errors(
        held_out_mean=_short(np.mean(means)),
        held_out_worst=_short(np.max(worsts)),
        fitted_mean=_short(np.mean(fitted)),
        measurements=len(rows),
    )
    print(f"{kind:9} {errors}")
    return Arithmetic(forward=_work(x[0]), backward=_work(x[1]), factors=factors, errors=errors)


def _work(x: np.ndarray) -> Work:
    e, q, a, w, c = (_short(v) for v in np.exp(x))
    return Work(
        efficiency=e, flops_per_byte=q, activation_passes=a, head_passes=a, weight_passes=w, fixed_s=c
    )


def _with_head(found: dict[str, Arithmetic], heads: Sequence[tuple[str, Row]]) -> dict[str, Arithmetic]:
    """The median passes over the logits that explain the measured heads, in every arithmetic."""
    passes = []
    for direction in (0, 1):
        left = []
        for kind, row in heads:
            work = (found[kind].forward, found[kind].backward)[direction]
            x = np.log([work.efficiency, work.flops_per_byte, 1e-9, work.weight_passes, work.fixed_s])
            known = _Table([row]).predict(x, direction)[0]
            spent = row.seconds[direction] / found[kind].factors[row.device]
            left.append((spent - known) * row.bandwidth / (row.samples * row.kept))
        passes.append(_short(max(0.0, float(np.median(left)))))
    print(f"head      {len(heads)} rows  passes forward {passes[0]:.2f}, backward {passes[1]:.2f}")
    return {
        kind: msgspec.structs.replace(
            a,
            forward=msgspec.structs.replace(a.forward, head_passes=passes[0]),
            backward=msgspec.structs.replace(a.backward, head_passes=passes[1]),
        )
        for kind, a in found.items()
    }


def _fit_tensor(layers: Sequence[aceso.Layer]) -> Tensor:
    whole = {(r.hidden, r.tokens): r.seconds for r in layers if r.tp == 1}
    split = [r for r in layers if r.tp > 1]
    measured = [r.seconds / whole[r.hidden, r.tokens] for r in split]

    def gaps(x: np.ndarray) -> np.ndarray:
        told = _tensor(x)
        return np.log([told.share(r.tp, r.hidden, r.tokens) for r in split]) - np.log(measured)

    x = least_squares(gaps, [0.15, 0.4, 0.2, 0.3]).x
    errors = np.abs(np.exp(gaps(x)) - 1)
    print(f"tensor    {len(split)} rows  mean {errors.mean():.1%} worst {errors.max():.1%}")
    return _tensor([_short(v) for v in x], _short(errors.mean()), _short(errors.max()))


def _tensor(x: Sequence[float], mean: float = 0.0, worst: float = 0.0) -> Tensor:
    serial, width, tokens, degree = map(float, x)
    return Tensor(
        serial=serial, width=width, tokens=tokens, degree=degree, error_mean=mean, error_worst=worst
    )


def _short(value: float) -> float:
    return float(f"{value:.3g}")


_HEADER = """\
# Written by `python -m bench.catalog.fit FOLDER`; planner/catalog/analytic.py has the formula and the fields.
# Fitted on layers of zorse (commit 2fd6330) and sailor (commit cf2c8e3), the tensor part on aceso
# (SuperScaler, commit fa80ad0); all under the MIT License, see NOTICE.
"""


def _toml(table: dict[str, Any], path: str = "") -> str:
    """Tables of numbers and texts, a table a heading."""
    plain = {k: v for k, v in table.items() if not isinstance(v, dict)}
    lines = [f"\n[{path}]"] if path and plain else []
    lines += [f"{k} = {msgspec.json.encode(v).decode()}" for k, v in plain.items()]
    text = "\n".join(lines) + ("\n" if lines else "")
    return text + "".join(
        _toml(v, f"{path}.{k}" if path else k) for k, v in table.items() if isinstance(v, dict)
    )


if __name__ == "__main__":
    main()
