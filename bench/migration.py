"""A change of cuts, TP degrees and widths in a running job, over a link of limited rate.

Two nodes of two devices each (namespaces and CPU quotas on one machine; Linux and root). A GPT trains a step
by one plan, another by the next, a third by the first again: four of its layers, with the moments of AdamW,
cross the link and come back, cut otherwise. What is judged: bytes sent by all ranks against the least that
two plans need, and the time from first to last message against the link, measured just before.

``--quick`` moves a smaller model over a faster link.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from arachne_runtime.model import ModelParts
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.files import write
from arachne_runtime.plan.moves import Moves, kept_between, moves_of
from arachne_runtime.plan.placement import rank_order
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from examples.gpt import GPT, Config
from launch.lab import Lab, LabDevice, active
from launch.lab.document import LabNetwork
from launch.torchrun import run_plan

from .migration_train import LoggedChange
from .report import Options, Result, at_least, at_most, run_bench

LAYERS, GLOBAL_BATCH = 8, 4
WIDTH, QUICK_WIDTH = 528, 264
RATE_MBPS, QUICK_RATE_MBPS = 400.0, 800.0
SHARE = 0.5
"""Of a core, each device: four of them on two cores."""
COPIES = 3
"""A parameter and the two moments of AdamW."""
REPEATS = 3


def measure(options: Options) -> Iterator[Result]:
    """Both directions of the change."""
    width, rate = (QUICK_WIDTH, QUICK_RATE_MBPS) if options.quick else (WIDTH, RATE_MBPS)
    parts = ModelParts.of(lambda: GPT(Config(width=width, layers=LAYERS)))
    wanted = [_moves(old, new, parts) for old, new in ((FIRST, SECOND), (SECOND, FIRST))]
    with tempfile.TemporaryDirectory(prefix="arachne-migration-") as scratch, active(lab(rate)) as on:
        print(*on.notes, sep="\n", flush=True)
        runs = [_changed(Path(scratch), width) for _ in range(1 if options.quick else REPEATS)]
    state = COPIES * sum(form.nbytes for block in parts.summed().forms for form in block)
    print(f"state of the job: {state / 1e6:.0f} MB", flush=True)
    for turn, name in enumerate(("there", "back")):
        yield from _judged(name, [run[turn] for run in runs], wanted[turn])


def _judged(name: str, changes: list[LoggedChange], wanted: Moves) -> Iterator[Result]:
    least = COPIES * wanted.nbytes
    off = max(abs(change.sent_bytes / least - 1) for change in changes)
    yield at_most(f"{name}-bytes-off", off, "of the least", bound=0.01, least_bytes=least)
    crossing = COPIES * sum(m.nbytes for m in wanted.moves if DEVICE_NODE[m.source] != DEVICE_NODE[m.target])
    shares = [crossing / change.transfer_s / change.link_bytes_per_s for change in changes]
    for change, share in zip(changes, shares, strict=True):
        print(
            f"{name}: {change.sent_bytes / 1e6:.1f} MB, {crossing / 1e6:.1f} MB of them over a link of "
            f"{change.link_bytes_per_s / 1e6:.1f} MB/s in {change.transfer_s:.2f} s ({share:.2f} of it); the "
            f"job stood for {change.seconds:.2f} s",
            flush=True,
        )
    told = [msgspec.to_builtins(change) for change in changes]
    yield at_least(f"{name}-link", sorted(shares)[len(shares) // 2], "of the link", bound=0.7, changes=told)


def lab(rate_mbps: float) -> Lab:
    """Two nodes of two devices."""
    devices = (LabDevice(name=f"{n}-{i}", node=n, share=SHARE) for n in ("left", "right") for i in range(2))
    return Lab(device=tuple(devices), network=LabNetwork(rate_Mbps=rate_mbps))


def _changed(folder: Path, width: int) -> list[LoggedChange]:
    log = folder / "changes.jsonl"
    write(FIRST, folder / "first.json")
    write(SECOND, folder / "second.json")
    words = ["-m", "bench.migration_train", str(log), str(folder / "second.json"), str(width), str(LAYERS)]
    run_plan(folder / "first.json", words, quiet=True)
    return [msgspec.json.decode(line, type=LoggedChange) for line in log.read_bytes().splitlines()]


def _moves(old: Plan, new: Plan, parts: ModelParts) -> Moves:
    process_of = {device: process for process, device in enumerate(rank_order(FIRST))}
    return moves_of(kept_between(old, new, parts.summed(), process_of), node_of=DEVICE_NODE.__getitem__)


def _plan(*stages: Stage) -> Plan:
    pipeline = Pipeline(micro_batches=2, micro_batch=2, stages=stages)
    return Plan(model="byte-gpt", global_batch=GLOBAL_BATCH, sequence=Config.sequence, pipelines=(pipeline,))


def _shared(start: int, stop: int, node: str) -> Stage:
    return Stage(layers=(start, stop), replicas=(Replica(devices=(f"{node}:0", f"{node}:1"), share=2),))


def _wide(start: int, stop: int, node: str) -> Stage:
    return Stage(
        layers=(start, stop),
        replicas=tuple(Replica(devices=(f"{node}:{index}",), share=1) for index in range(2)),
    )


FIRST = _plan(_shared(0, 7, "left"), _wide(7, LAYERS + 2, "right"))
SECOND = _plan(_wide(0, 3, "left"), _shared(3, LAYERS + 2, "right"))
DEVICE_NODE = {process: node_of(device) for process, device in enumerate(rank_order(FIRST))}


if __name__ == "__main__":
    raise SystemExit(run_bench("migration", measure))
