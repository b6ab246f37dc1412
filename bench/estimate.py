"""The catalog against what was published and measured: parameters, and seconds of layers that it estimates.

Judged on the measurements that the wheel carries. Blind: the constants are fitted again without the device
type that they are to tell. `python -m bench.catalog.fit FOLDER` does the same on all measurements, and
writes the constants.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, median

from arachne_runtime.plan.profile import TpCommunication
from planner import catalog
from planner.catalog.analytic import Speed
from planner.catalog.configs import architecture
from planner.catalog.counting import count
from planner.catalog.estimate import estimate
from planner.catalog.measured import Measured, measured_of

from .catalog.fit import Row, fit_arithmetic, row_of
from .report import Options, Result, at_most, run_bench

LLAMAS = ("llama-7b", "llama-13b", "llama-33b")
SAILOR = ("opt-350m", "gpt-neo-2.7b")
TYPES = ("A100-40", "A6000", "H100", "V100-32")


def measure(options: Options) -> Iterator[Result]:
    yield at_most("parameters", _worst_count(), "of the published count, at worst", bound=0.005)
    rows = defaultdict(list)
    for kind, row in _rows():
        rows[kind].append(row)
    for kind in ("half",) if options.quick else ("half", "tfloat32", "float32"):
        errors = fit_arithmetic(kind, rows[kind]).errors
        yield at_most(
            f"blind-{kind}", errors.held_out_mean, "mean error", bound=0.25, worst=errors.held_out_worst,
            layers=errors.measurements,
        )  # fmt: skip
    known = list(_known_types())
    yield at_most("known-types", fmean(known), "mean error", bound=0.12, worst=max(known), layers=len(known))
    between = list(_left_out_sequences())
    yield at_most(
        "between-sequences", fmean(between), "mean error", bound=0.12, worst=max(between), layers=len(between)
    )
    yield at_most("profile-of-4-types", _profile_ms(), "ms of CPU time", bound=50)


def _worst_count() -> float:
    gaps = []
    for name in catalog.model_names():
        published = catalog.named_model(name).published
        if published is not None:
            blocks = catalog.model(name, sequence=512, dtype="bfloat16").blocks
            gaps.append(abs(sum(b.parameters - b.tied_parameters for b in blocks) / published - 1))
    return max(gaps)


def _rows() -> Iterator[tuple[str, Row]]:
    """Layers of one device, powers of two of samples."""
    for name in (*LLAMAS, *SAILOR):
        for packed in catalog.entry(name).profiles:
            shape = architecture(name, catalog.config(name))
            block = count(shape, sequence=packed.sequence, dtype=packed.dtype).blocks[1]
            for t in packed.timings:
                if t.kind != "layer" or t.tp > 1:
                    continue
                has = catalog.device(t.device).flops.get("tfloat32", 0.0) > 100e12
                dtype = "tfloat32" if has and packed.arithmetic == "tfloat32" else packed.dtype
                for n, *seconds in zip(t.samples, t.forward_s, t.backward_s, strict=True):
                    if n & (n - 1) == 0:
                        yield row_of(t.device, dtype, block, n, tuple(seconds))


def _known_types() -> Iterator[float]:
    """Errors of the shipped constants on layers of LLaMA, each type with its own factor."""
    for name in LLAMAS:
        for packed in catalog.entry(name).profiles:
            shape = architecture(name, catalog.config(name))
            spec = count(shape, sequence=packed.sequence, dtype=packed.dtype)
            for t in packed.timings:
                speed = Speed.of(catalog.device(t.device), packed.dtype)
                for n, *seconds in zip(t.samples, t.forward_s, t.backward_s, strict=True):
                    weight = spec.bytes_per_parameter.weight
                    told = sum(speed.seconds(spec.blocks[1], n, weight_bytes=weight))
                    yield abs(told / sum(seconds) - 1)


def _left_out_sequences() -> Iterator[float]:
    """Errors of a sequence told from the ones above and below it, on types that have all three."""
    for name in LLAMAS:
        for sequence in (1024, 2048):
            spec = catalog.model(name, sequence=sequence, dtype="float16")
            known = measured_of(spec)
            assert known is not None
            others = replace(known, references=tuple(r for r in known.references if r.spec != spec))
            for device in dict.fromkeys(t.device for r in others.references for t in r.packed.timings):
                for row in known.exact("layer", device, 1):
                    if _brackets(others, device, sequence):
                        told = _told(others, device, row.samples)
                        yield abs(told / (row.forward_s + row.backward_s) - 1)


def _brackets(known: Measured, device: str, sequence: int) -> bool:
    found = [r.spec.sequence for r in known.references if r.nearest("layer", device, 1) is not None]
    return bool(found) and min(found) < sequence < max(found)


def _told(known: Measured, device: str, samples: int) -> float:
    on = catalog.device(device)
    ratio = known.ratio("layer", on, 1, samples)
    forward, backward = estimate(
        known.model, 1, on, 1, samples, arithmetic="float16", communication=TpCommunication.EXCLUDED
    )
    return ratio.forward * forward + ratio.backward * backward


def _profile_ms() -> float:
    """The slowest model's, the median of nine."""
    slowest = 0.0
    for name in ("deepseek-v3-like", "llama-7b", "opt-350m"):
        spec = catalog.model(name)
        spent = []
        for _ in range(9):
            start = time.process_time()
            catalog.profile_for(spec, TYPES)
            spent.append(time.process_time() - start)
        slowest = max(slowest, median(spent))
    return slowest * 1e3


if __name__ == "__main__":
    raise SystemExit(run_bench("estimate", measure))
