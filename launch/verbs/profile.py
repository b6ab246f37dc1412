"""``arachne profile``: measures a workload's blocks and the links on every device of a cluster or lab."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arachne_runtime.errors import UsageError

if TYPE_CHECKING:
    from arachne_runtime.plan.cluster import Cluster

    from ..profiling.job import RankResult
    from ..profiling.merge import Merged

SAMPLES = "1,2,4,8,16,32"


def command(
    workload: Annotated[
        str, typer.Argument(help="The arachne.Workload to time: MODULE:NAME or FILE.py:NAME.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for model.json, profile.json and cluster.toml.")],
    cluster: Annotated[
        Path | None, typer.Option(help="cluster.toml; without it the lab that is on, or this machine.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Measure this node only, and extend the profile in --out.")
    ] = None,
    samples: Annotated[str, typer.Option(help="Samples of a micro-batch to time, ascending.")] = SAMPLES,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Time every kind of block, the optimizer and the links.

    All devices at once; writes the files that the planner reads.
    """
    import json

    from arachne_runtime.plan import files

    from ..profiling.cluster_file import write_cluster
    from ..profiling.merge import extend, merge
    from ..profiling.run import measure

    counts = _samples(samples)
    devices_of = _cluster(cluster)
    out.mkdir(parents=True, exist_ok=True)
    results = measure(workload, devices_of, node, counts, show=not as_json)
    merged = merge(results)
    if node is not None:
        merged = extend(merged, out)
    files.write(merged.model, out / "model.json")
    files.write(merged.profile, out / "profile.json")
    write_cluster(devices_of, out / "cluster.toml")
    if as_json:
        print(json.dumps(_summary(merged, results, out), indent=2))
    else:
        _print(merged, results, out)


def _samples(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(word) for word in text.split(","))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1 or list(counts) != sorted(set(counts)):
        raise UsageError(f"--samples {text!r} is not a list of ascending numbers like {SAMPLES}")
    return counts


def _cluster(path: Path | None) -> "Cluster":
    """The devices to measure; several nodes can only be measured where a lab holds them."""
    from arachne_runtime.plan.files import read_cluster

    from .. import lab
    from ..profiling.this_machine import this_machine

    running = lab.current()
    if path is not None:
        return read_cluster(path)
    return running.cluster if running else this_machine()


def _summary(merged: "Merged", results: "list[RankResult]", out: Path) -> dict[str, object]:
    return {
        "model": str(out / "model.json"),
        "profile": str(out / "profile.json"),
        "cluster": str(out / "cluster.toml"),
        "blocks": len(merged.model.blocks),
        "devices": sorted({t.device for t in merged.profile.timings}),
        "timings": len(merged.profile.timings),
        "links": len(merged.profile.links),
        "seconds": max(result.seconds for result in results),
        "notes": list(merged.notes),
    }


def _print(merged: "Merged", results: "list[RankResult]", out: Path) -> None:
    from rich.console import Console

    from ..profiling.table import table

    console = Console(highlight=False)
    console.print(table(merged.profile))
    for note in merged.notes:
        console.print(f"note: {note}")
    seconds = max(result.seconds for result in results)
    console.print(f"wrote model.json, profile.json and cluster.toml in {out} ({seconds:.0f} s)")
