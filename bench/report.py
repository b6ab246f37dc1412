"""The form all benchmarks share: options, alternating pairs, `result:` lines, figures as JSON, exit code.

def measure(options: Options) -> Iterator[Result]:
    yield at_most("pipeline-wall", 1.01, "ratio", bound=1.05)

if __name__ == "__main__":
    raise SystemExit(run_bench("overhead", measure))
"""

import argparse
import json
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

EQUAL = 1e-9
"""Relative difference of two prices that counts as none: another order of the same sums."""


class Sense(StrEnum):
    """On which side of its bound a figure must be."""

    AT_MOST = "<="
    AT_LEAST = ">="


@dataclass(frozen=True, kw_only=True)
class Result:
    """One thing that a benchmark must show."""

    name: str
    figure: float
    unit: str
    sense: Sense
    bound: float
    detail: dict[str, Any] = field(default_factory=dict)
    """More figures, for the JSON file."""

    @property
    def holds(self) -> bool:
        """Whether the figure is on the right side; a NaN never is."""
        at_most = self.sense is Sense.AT_MOST
        return self.figure <= self.bound if at_most else self.figure >= self.bound

    def __str__(self) -> str:
        return f"result: {self.name} {self.figure:.4g} {self.unit} (wanted {self.sense} {self.bound:g})"


def at_most(name: str, figure: float, unit: str, bound: float, **detail: Any) -> Result:
    """A figure that must not exceed ``bound``."""
    return Result(name=name, figure=figure, unit=unit, sense=Sense.AT_MOST, bound=bound, detail=detail)


def at_least(name: str, figure: float, unit: str, bound: float, **detail: Any) -> Result:
    """A figure that must reach ``bound``."""
    return Result(name=name, figure=figure, unit=unit, sense=Sense.AT_LEAST, bound=bound, detail=detail)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every benchmark is told."""

    quick: bool
    """End within 60 s on two cores."""
    out: Path | None
    """Where figures (JSON) and pictures (PNG) go; exists."""


def run_bench(
    name: str, measure: Callable[[Options], Iterable[Result]], arguments: Sequence[str] | None = None
) -> int:
    """Measure, print one line a result, write ``NAME.json``; 0 if all hold, else 1."""
    options = _options(name, arguments)
    results = list(measure(options))
    if options.out is not None:
        record = _record(name, options, results)
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    for result in results:
        print(result, flush=True)
    return 0 if results and all(result.holds for result in results) else 1


def _options(name: str, arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument("--quick", action="store_true", help="end within 60 s on two cores")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures as JSON, pictures as PNG")
    given = parser.parse_args(arguments)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    return Options(quick=given.quick, out=given.out)


def _record(name: str, options: Options, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "bench": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "quick": options.quick,
        "results": [asdict(result) | {"holds": result.holds} for result in results],
    }


def machine() -> dict[str, Any]:
    """The machine in words: processor, cores, Python and torch."""
    from importlib.metadata import version
    from os import cpu_count

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def commit() -> str:
    """The commit of this tree, marked where it has changes; ``unknown`` outside of a checkout."""
    here = Path(__file__).parent
    asked = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run(asked, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median of repeats and an interval that holds the true median with some confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Median and its interval by order statistics, with at least this confidence.

    The whole range of too few values (fewer than 6 at 95 %, 5 at 90 %).
    """
    ordered = sorted(values)
    skip = _outside(len(ordered), 1 - confidence)
    return Interval(median=median(ordered), low=ordered[skip], high=ordered[-1 - skip])


def _outside(count: int, miss: float) -> int:
    """How many of ``count`` values may be left out on each side: 2 · P(fewer of them below) ≤ ``miss``."""
    from math import comb

    tail, skip = 0.0, 0
    while skip < count // 2 and 2 * (tail + comb(count, skip) / 2**count) <= miss:
        tail += comb(count, skip) / 2**count
        skip += 1
    return max(0, skip - 1)
